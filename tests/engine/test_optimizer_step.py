"""One optimizer step on one rank: micro-batches add up, and a NaN or infinity changes nothing."""

import math

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from one_rank import one_rank  # noqa: F401
from tiny_models import new_model
from torch import nn

from dschat_ppo.common import dist
from dschat_ppo.engine.build_engine import OptimizerSettings, train_engine
from dschat_ppo.engine.ds_config import train_config
from dschat_ppo.engine.optimizer_step import accumulate, apply, apply_together, learning_rates
from dschat_ppo.models.loading import DTYPES
from dschat_ppo.rollout.fused_layers import adjoining

pytestmark = pytest.mark.usefixtures("one_rank")

SETTINGS = OptimizerSettings(0.01, 0.0, "linear", 0, 20, (0.9, 0.95), 1e-8)


def engine_of(stage: int, dtype: str = "fp32", frozen: bool = False):
    torch.manual_seed(0)
    config = train_config(stage, dtype, False, 1, 1.0)
    config["fp16"] |= {"initial_scale_power": 8, "hysteresis": 1}
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Dropout(0.2), nn.Linear(9, 3)).to(
        DTYPES[dtype]
    )
    model[0].requires_grad_(not frozen)
    return train_engine(model, config, SETTINGS)


def weights(engine) -> torch.Tensor:
    return torch.cat(
        [parameter.detach().float().flatten() for parameter in engine.module.parameters()]
    )


def batches(step: int, dtype: str = "fp32") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(2, 4, generator=generator).to(dist.device(), DTYPES[dtype]) for _ in range(3)
    ]


def good(engine):
    return lambda x: engine(x).float().pow(2).sum() / 18  # 18 numbers in a step


def bad_in(engine, number: int, bad):
    """The loss `good`, changed by `bad(loss, output)` in each micro-batch of this number."""
    calls = [0]

    def loss_of(x):
        y = engine(x).float()
        calls[0] += 1
        loss = y.pow(2).sum() / 18
        return bad(loss, y) if (calls[0] - 1) % 3 == number else loss

    return loss_of


def nan_loss(loss, y):
    return loss * math.nan


def infinite_loss_with_finite_gradients(loss, y):
    return loss + math.inf


def nan_gradient(loss, y):  # the slope of the root at 0 is infinite, times 0
    return (
        loss
        + torch.where(
            torch.zeros_like(y, dtype=torch.bool), (y - y.detach()).abs().sqrt(), 0.0
        ).sum()
    )


def huge_gradient(loss, y):  # finite, but the sum of its squares is not
    return loss + 1e30 * (y - y.detach()).sum()


@pytest.mark.parametrize(("stage", "dtype"), [(0, "bf16"), (1, "bf16"), (2, "bf16"), (1, "fp32")])
def test_weights_of_one_layer_lie_side_by_side(stage, dtype):
    """A rollout on a GPU multiplies by those of queries, keys and values together
    (`rollout/fused_layers.py`)."""
    model = new_model("qwen2").to(DTYPES[dtype])
    train_engine(model, train_config(stage, dtype, False, 1, 1.0), SETTINGS)
    for layer in model.model.layers:
        attention = layer.self_attn
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        for parts in (
            [x.weight for x in projections],
            [x.bias for x in projections],
            [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight],
        ):
            joined = adjoining([part.detach() for part in parts])
            assert joined is not None and torch.equal(
                joined, torch.cat([part.detach() for part in parts])
            )


def test_a_model_that_was_loaded_in_eval_mode_trains():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    assert train_engine(model, train_config(0, "fp32", False, 1, 1.0), SETTINGS).module[1].training


def test_micro_batches_add_up_to_one_batch():
    split, whole = engine_of(0), engine_of(0)
    for engine in (split, whole):
        engine.module.eval()
    for step in range(3):
        parts = batches(step)
        first = apply(accumulate(split, parts, good(split)))
        second = apply(accumulate(whole, [torch.cat(parts)], good(whole)))
        assert first.applied and first.fault is None
        assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-5)
    torch.testing.assert_close(weights(split), weights(whole))


@pytest.mark.parametrize(("stage", "frozen"), [(0, False), (2, True)])
@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (nan_loss, "loss"),
        (infinite_loss_with_finite_gradients, "loss"),
        (nan_gradient, "gradient"),
        (huge_gradient, "norm"),
    ],
)
def test_a_bad_number_skips_the_update_and_is_located(stage, frozen, bad, kind):
    """The engine then trains like one that never saw the step; also if one layer is frozen."""
    engine, spared = engine_of(stage, frozen=frozen), engine_of(stage, frozen=frozen)
    start = [weight.detach().clone() for weight in engine.module[0].parameters()]
    for step in range(4):
        if step == 2:
            before, rate, skipped = (
                weights(engine),
                learning_rates(engine)["lr"],
                engine.skipped_steps,
            )
            result = apply(accumulate(engine, batches(9), bad_in(engine, 1, bad)))
            assert (result.applied, result.overflow, result.grad_norm) == (False, False, math.inf)
            assert (result.fault.kind, result.fault.rank, result.fault.micro_batch) == (kind, 0, 1)
            assert torch.equal(weights(engine), before) and learning_rates(engine)["lr"] == rate
            assert engine.skipped_steps > skipped
        results = []
        for one in (engine, spared):
            torch.manual_seed(step)  # dropout
            results.append(apply(accumulate(one, batches(step), good(one))))
        assert results[0] == results[1] and results[0].applied
    assert torch.equal(weights(engine), weights(spared))
    still = [
        torch.equal(weight, first)
        for weight, first in zip(engine.module[0].parameters(), start, strict=True)
    ]
    assert still == [frozen] * 2


class Tied(nn.Module):
    """A table that is also the head, as in a language model with tied weights."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4) / 2)
        self.layer = nn.Linear(4, 4)
        self.gradients = []  # whether any was in memory, at each forward pass

    def forward(self, x):
        self.gradients.append(any(weight.grad is not None for weight in self.parameters()))
        ids = x.float().abs().sum(dim=1).long() % 7
        return torch.tanh(self.layer(self.table[ids] + x)) @ self.table.T


@pytest.mark.parametrize("stage", [0, 1])
def test_bf16_gradients_are_gone_after_each_backward_pass(stage):
    """They are in fp32 by then. Weights and norms are those of an engine that keeps them, to the
    bit, and after steps without an update too."""
    held = {"bf16": {"immediate_grad_update": False}}
    engines = []
    for overlay in ({}, held):
        torch.manual_seed(0)
        engines.append(
            train_engine(
                Tied().bfloat16(), train_config(stage, "bf16", False, 1, 1.0, overlay), SETTINGS
            )
        )
    for step in range(6):
        parts = batches(step, "bf16")
        if step % 2 == 0:
            for bad in (nan_loss, nan_gradient):
                found = [
                    apply(accumulate(engine, parts, bad_in(engine, 1, bad))) for engine in engines
                ]
                # NaN is not equal to NaN
                assert repr(found[0]) == repr(found[1]) and found[0].fault.micro_batch == 1
        results = [apply(accumulate(engine, parts, good(engine))) for engine in engines]
        assert results[0].applied and results[0] == results[1]
        assert torch.equal(*map(weights, engines))
    # two of three micro-batches; the search for a bad gradient repeats them
    of_steps = 2 * (6 + 3 + 2 * 3)
    assert [engine.module.gradients.count(True) for engine in engines] == [0, of_steps]


def test_the_search_for_a_bad_gradient_repeats_dropout_and_draws_nothing():
    engine, seen = engine_of(0), []

    def loss_of(x):
        y = engine(x)
        seen.append(y.detach())
        return nan_gradient(y.sum(), y)

    torch.manual_seed(3)
    result = apply(accumulate(engine, batches(0), loss_of))
    after = torch.rand(2)
    assert result.fault.kind == "gradient" and len(seen) == 6
    assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))
    torch.manual_seed(3)
    for x in batches(0):
        engine(x)
    assert torch.equal(torch.rand(2), after)


@pytest.fixture
def fp16(monkeypatch):
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)


def scale(engine) -> float:
    return engine.optimizer.loss_scaler.cur_scale


def test_an_fp16_overflow_lowers_the_scale_and_is_no_fault_but_at_the_smallest_scale(fp16):
    engine = engine_of(2, "fp16")
    result = apply(accumulate(engine, batches(0, "fp16"), bad_in(engine, 1, nan_gradient)))
    assert (result.applied, result.overflow, result.fault, scale(engine)) == (
        False,
        True,
        None,
        128,
    )
    assert apply(accumulate(engine, batches(1, "fp16"), good(engine))).applied
    engine.optimizer.loss_scaler.cur_scale = smallest = engine.optimizer.loss_scaler.min_scale
    result = apply(accumulate(engine, batches(2, "fp16"), bad_in(engine, 2, nan_gradient)))
    assert (result.overflow, result.fault.kind, result.fault.micro_batch, scale(engine)) == (
        False,
        "gradient",
        2,
        smallest,
    )


def test_one_overflow_skips_the_updates_of_both_engines_and_lowers_only_its_own_scale(fp16):
    engines = engine_of(2, "fp16"), engine_of(2, "fp16")
    before = [weights(engine) for engine in engines]
    losses = good(engines[0]), bad_in(engines[1], 0, nan_gradient)
    parts = [
        accumulate(e, batches(0, "fp16"), loss_of)
        for e, loss_of in zip(engines, losses, strict=True)
    ]
    results = apply_together(parts)
    assert [(result.applied, result.overflow) for result in results] == [
        (False, False),
        (False, True),
    ]
    assert all(
        torch.equal(weights(engine), old) for engine, old in zip(engines, before, strict=True)
    )
    assert [scale(engine) for engine in engines] == [256, 128]
    parts = [accumulate(engine, batches(1, "fp16"), good(engine)) for engine in engines]
    assert [result.applied for result in apply_together(parts)] == [True, True]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_never_waits_for_the_device(stage, monkeypatch):
    """DeepSpeed's throughput timer would, from the third step on, in every forward pass and
    update."""
    waits = []
    engine = engine_of(stage)
    monkeypatch.setattr(type(get_accelerator()), "synchronize", lambda self, *_: waits.append(1))
    for number in range(4):
        assert apply(accumulate(engine, batches(number), good(engine))).applied
    assert waits == []
