"""Engines from models: parameter groups, optimizer, modes, and the schedule, equal to those of
transformers to the last bit."""

import os
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from launch import forked, succeed
from one_rank import one_rank  # noqa: F401
from tiny_models import new_model
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from dschat_ppo.common import dist
from dschat_ppo.engine.build_engine import (
    OptimizerSettings,
    _import_muon,
    build_optimizer,
    parameter_groups,
    rate_factor,
    train_engine,
)
from dschat_ppo.engine.ds_config import train_config
from dschat_ppo.models.adapters.layers import add_adapter
from dschat_ppo.models.adapters.settings import AdapterSettings

SETTINGS = OptimizerSettings(0.5, 0.1, "linear", 2, 6, (0.8, 0.9), 1e-6)


def test_biases_and_norms_do_not_decay_also_where_weights_are_partitioned():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Embedding(5, 2))
    model[0].weight.data, model[0].weight.ds_shape = torch.empty(0), (2, 3)  # as ZeRO-3 leaves it
    decayed, others = parameter_groups(model, SETTINGS)
    assert (decayed["weight_decay"], others["weight_decay"], len(others["params"])) == (0.1, 0.0, 3)
    assert {id(p) for p in decayed["params"]} == {id(model[0].weight), id(model[2].weight)}


def test_lora_has_its_own_rate_and_the_schedule_scales_all_groups():
    model = new_model("llama")
    add_adapter(model, AdapterSettings(2, 4, 0.0, "q_proj", False, True, False))
    settings = replace(SETTINGS, second_learning_rate=2.0, warmup_steps=0, total_steps=4)
    groups = parameter_groups(model, settings)
    names = {id(p): name for name, p in model.named_parameters()}
    assert [(group.get("lr"), group["weight_decay"]) for group in groups] == [
        (None, 0.1),
        (None, 0.0),
        (2.0, 0.1),
        (2.0, 0.0),
    ]
    assert ["lora" in names[id(group["params"][0])] for group in groups] == [
        False,
        False,
        True,
        True,
    ]
    assert sum(len(group["params"]) for group in groups) == sum(
        weight.requires_grad for weight in model.parameters()
    )
    optimizer = build_optimizer(model, settings)
    scheduler = LambdaLR(optimizer, partial(rate_factor, settings))
    scheduler.step()
    assert scheduler.get_last_lr() == [0.375, 0.375, 1.5, 1.5]


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, torch.bfloat16), (1, torch.bfloat16), (0, torch.float32)]
)
@pytest.mark.usefixtures("one_rank")
def test_one_rank_neither_copies_nor_rounds_accumulated_gradients(stage, dtype):
    """Two micro-batches with gradients 1 and 2**-9: their sum is no number of bf16. Its tenth is
    Adam's first state."""
    model, settings = (
        nn.Linear(1, 1, bias=False).to(dtype),
        replace(SETTINGS, warmup_steps=0, betas=(0.9, 0.9)),
    )
    config = train_config(stage, "bf16" if dtype.itemsize == 2 else "fp32", False, 1, 0.0)
    engine = train_engine(model, config, settings)
    reduced = []
    engine.allreduce_bucket = lambda *_: reduced.append(1)
    for last, gradient in ((False, 1.0), (True, 2.0**-9)):
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(
            engine(torch.full((1, 1), gradient, dtype=dtype, device=dist.device())),
            scale_wrt_gas=False,
        )
    engine.step()
    [state] = [state for state in engine.optimizer.state.values() if "exp_avg" in state]
    assert float(state["exp_avg"].flatten()[0]) == pytest.approx(0.1 * (1 + 2.0**-9), rel=1e-6)
    assert not reduced


def test_functions_of_muon_are_not_compiled(monkeypatch):
    for name in ("muon_optimizer", "original_muon"):
        monkeypatch.delitem(sys.modules, f"deepspeed.runtime.zero.muon.{name}", raising=False)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    _import_muon.cache_clear()
    _import_muon()
    function = sys.modules["deepspeed.runtime.zero.muon.original_muon"].zeropower_via_newtonschulz5
    assert not hasattr(function, "_torchdynamo_orig_callable"), "torch.compile has not decorated it"
    assert os.environ["TORCHDYNAMO_DISABLE"] == "0"


@pytest.mark.ranks
def test_below_zero_2_the_number_of_ranks_changes_no_gradient(tmp_path):
    """The sums of bf16 gradients are added in fp32. (Each gradient is rounded, the same on any
    rank.)"""
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.pt"
        succeed(forked(ranks, "tests/workers/two_ranks.py", "summed_gradients", out, timeout=100))
    (one, _), (two, _) = (torch.load(tmp_path / f"{ranks}.pt") for ranks in (1, 2))
    assert len(one) == 2 and all(part.abs().max() > 1e-3 for part in one)
    for part, other in zip(one, two, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-6, atol=1e-9)


KINDS = [
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
]


def of_transformers(kind: str, warmup: int, total: int, peak: float, **settings) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(kind, optimizer, warmup, total, scheduler_specific_kwargs=settings)
    return [float(scheduler.lr_lambdas[0](step)) for step in range(total + 4)]


def factors(
    kind: str, warmup: int, total: int, steps: int, peak: float = 1.0, least: float = 0.0
) -> list[float]:
    settings = OptimizerSettings(
        peak, 0.0, kind, warmup, total, (0.9, 0.95), 1e-8, min_lr_ratio=least
    )
    return [rate_factor(settings, step) for step in range(steps)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup", "total"), [(0, 7), (3, 11), (7, 100), (0, 1), (5, 6)])
def test_factors_are_those_of_transformers(kind, warmup, total):
    assert factors(kind, warmup, total, total + 4, 3e-5) == of_transformers(
        kind, warmup, total, 3e-5
    )
    if kind == "cosine":  # which has a lowest factor there
        expected = of_transformers("cosine_with_min_lr", warmup, total, 0.5, min_lr_rate=0.3)
        assert factors(kind, warmup, total, total + 4, least=0.3) == expected


def test_a_lowest_factor_by_hand():
    assert factors("linear", 1, 5, 7, least=0.2) == pytest.approx([0, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert factors("polynomial", 1, 5, 7, 0.5, least=0.2) == pytest.approx(
        [0, 1, 0.8, 0.6, 0.4, 0.2, 0.2]
    )
    assert factors("cosine_with_restarts", 1, 3, 5, least=0.2) == pytest.approx(
        [0, 1, 0.6, 0.2, 0.2]
    )
