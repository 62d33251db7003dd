"""Layers divided over ranks that generate together (over ranks: tests/ranks/test_ranks_hybrid.py);
which models can be divided."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from one_rank import one_rank  # noqa: F401
from tiny_models import new_model
from torch import nn

from dschat_ppo.common import dist
from dschat_ppo.engine.hybrid_engine import HybridEngine
from dschat_ppo.errors import UserError
from dschat_ppo.features.tensor_parallel import layers as layers_module
from dschat_ppo.features.tensor_parallel.generation import check_divided_layers, division_of
from dschat_ppo.features.tensor_parallel.layers import (
    TensorParallel,
    check_tensor_parallel,
    reason_not_to_shard,
    sharded_layers,
)

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(
    ("name", "size", "ranks", "refused"),
    [
        ("llama", 2, 3, "--inference_tp_size 2 must divide the number of ranks, 3"),
        (
            "llama",
            4,
            4,
            "must divide the model's 2 key-value heads: lower it, or use --unpin_actor_parameters",
        ),
        ("gpt-neox", 8, 8, "must divide the model's 4 attention heads"),
        ("gpt2", 2, 3, "--inference_tp_size 2 must divide the number of ranks, 3"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_before_they_are_loaded(
    name, size, ranks, refused
):
    config = new_model(name).config
    check_tensor_parallel(config, 1, ranks)
    if name in ("llama", "gpt2"):  # of GPT-2 no layer is divided
        check_tensor_parallel(config, 2, 4)
    with pytest.raises(UserError, match=refused):
        check_tensor_parallel(config, size, ranks)


def test_layers_are_divided_only_where_transformers_has_a_plan_of_known_parts_and_without_lora():
    reasons = {
        name: reason_not_to_shard(new_model(name).config) for name in ("llama", "gpt2", "mixtral")
    }
    assert reasons == {
        "llama": None,
        "gpt2": "transformers has no tensor-parallel plan for gpt2 models",
        "mixtral": (
            "the plan of mixtral models has moe_tp_experts, packed_colwise, which is not supported"
        ),
    }
    assert reason_not_to_shard(new_model("llama").config, "flags exclude it") == "flags exclude it"


def two(rank: int, layers: int = 8) -> TensorParallel:
    return TensorParallel(group=None, rank=rank, size=2, layers=layers)


def test_two_halves_of_each_layer_hold_the_whole_weight_once():
    """By hand: columns of q are rows of its weight, rows of o are columns of its weight."""
    model = new_model("llama")
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    for layer, along in (
        (attention.q_proj, 0),
        (attention.k_proj, 0),
        (attention.o_proj, 1),
        (mlp.down_proj, 1),
    ):
        whole, halves = layer.weight.detach().clone(), []
        for rank in (0, 1):
            with sharded_layers(model, two(rank)):
                halves.append(layer.weight.detach().clone())
        assert torch.equal(torch.cat(halves, dim=along), whole)
        assert torch.equal(layer.weight, whole)


@pytest.mark.parametrize("layers", [1, 8])
def test_layers_are_gathered_as_many_at_a_time_as_the_flag_says(layers, monkeypatch):
    model, gathered = new_model("llama"), []
    monkeypatch.setattr(layers_module, "is_missing", lambda weight: True)

    def gathering(weights):
        gathered.append(len(weights))
        return nullcontext()

    monkeypatch.setattr(layers_module.deepspeed.zero, "GatheredParameters", gathering)
    with sharded_layers(model, two(0, layers)):
        pass
    assert gathered == {1: [7, 7], 8: [14]}[layers], (
        "seven linear layers in each of two decoder layers"
    )


def test_a_row_wise_bias_is_added_once(monkeypatch):
    model = new_model("gpt-neox")
    dense = model.gpt_neox.layers[0].attention.dense
    nn.init.normal_(dense.bias)
    inputs, parts = torch.randn(3, 32), []
    expected = dense(inputs)
    monkeypatch.setattr(
        dist, "all_reduce", lambda value, group=None: parts.append(value) or sum(parts)
    )
    for rank in (0, 1):
        with sharded_layers(model, two(rank)):
            found = dense(inputs.chunk(2, dim=-1)[rank])
    torch.testing.assert_close(found, expected)


def test_an_error_restores_weights_and_forward_and_a_layer_that_is_not_linear_is_named():
    model = new_model("qwen2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(KeyError), sharded_layers(model, two(1)):
        raise KeyError
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any("forward" in vars(part) for part in model.modules())
    model.model.layers[1].mlp.up_proj = nn.Identity()
    with (
        pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj is a Identity"),
        sharded_layers(model, two(0)),
    ):
        pass


@pytest.mark.parametrize(
    ("way", "said_of"), [("adds up", ""), ("halves", "differ from"), ("raises", "IndexError")]
)
def test_a_division_that_computes_something_else_stops_the_run(way, said_of, monkeypatch, said):
    """In one process: layers compute with their whole weights, or with this rank's half of each sum
    alone."""
    model = new_model("llama")
    whole = {
        id(layer): layer.weight.detach().clone()
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    }

    def forward(layer, style, parallel, inputs):
        if way == "raises":
            raise IndexError("out of range")
        return nn.functional.linear(inputs, whole[id(layer)] if way == "adds up" else layer.weight)

    monkeypatch.setattr(layers_module, "_forward", forward)
    hybrid = HybridEngine(
        SimpleNamespace(module=model, eval=model.eval, train=model.train),
        division=division_of(two(0)),
    )
    if not said_of:
        check_divided_layers(hybrid, 2)
        assert any("divided over 2 ranks agrees" in line for line in said)
        return
    with pytest.raises(UserError, match=f"--inference_tp_size 2: .*LlamaForCausalLM .*{said_of}"):
        check_divided_layers(hybrid, 2)
