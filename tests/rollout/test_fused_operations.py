"""RMSNorm by two kernels, rotary positions of queries and keys together: the numbers of the models' own functions."""

import sys

import pytest
import torch
from tiny_models import CONTINUOUS, new_model
from torch import nn
from transformers.models.llama import modeling_llama

from dschat_ppo.rollout.attention import RolloutAttention, RolloutCache, installed
from dschat_ppo.rollout.fused_layers import FUNCTION, FusedRotary, fused_norms, fused_rotary
from dschat_ppo.rollout.kv_cache import KVCache, PrefillMetadata


def norms_of(model: nn.Module) -> list:
    return [layer for layer in model.modules() if type(layer).__name__.endswith("RMSNorm")]


def with_random_weights(name: str, dtype: torch.dtype) -> nn.Module:
    model = new_model(name).to(dtype)
    for number, layer in enumerate(norms_of(model)):
        nn.init.normal_(layer.weight, 1.0, 0.3, generator=torch.Generator().manual_seed(number))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_layers_give_the_same_numbers_inside_and_are_restored(name, dtype):
    model = with_random_weights(name, dtype)
    states = [torch.randn(3, 1, len(layer.weight), dtype=dtype) for layer in norms_of(model)]
    expected = [layer(part) for layer, part in zip(norms_of(model), states, strict=True)]
    with fused_norms(model):
        assert all("forward" in vars(layer) for layer in norms_of(model))
        found = [layer(part) for layer, part in zip(norms_of(model), states, strict=True)]
    assert not any("forward" in vars(layer) for layer in norms_of(model))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6 if dtype == torch.float32 else 0, atol=0)


def test_a_layer_whose_weight_is_an_offset_from_1_is_left_alone():
    model = with_random_weights("gemma", torch.float32)
    with fused_norms(model):
        assert norms_of(model) and not any("forward" in vars(layer) for layer in norms_of(model))


class LateRMSNorm(nn.Module):
    """Rounds once, after the weight, unlike transformers' layers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 256).bfloat16())
        self.eps = 1e-6

    def forward(self, states):
        wide = states.float()
        return (self.weight * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(states.dtype)


class NoRMSNorm(nn.Module):
    """Has no epsilon."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


def test_a_layer_that_rounds_elsewhere_and_one_without_an_epsilon_are_left_alone():
    with fused_norms(model := nn.ModuleList([LateRMSNorm(), NoRMSNorm()])):
        assert not any("forward" in vars(layer) for layer in model)


ROTARY = [name for name in CONTINUOUS if name not in ("gpt2", "opt", "opt-350m", "electra")]


def step(model) -> torch.Tensor:
    """Logits of one token in each of three rows, at different positions."""
    attention, rows = RolloutAttention(), torch.arange(3)
    attention.metadata = PrefillMetadata(KVCache(3, 1), rows, rows * 0, rows, rows * 0)
    with installed(model, attention), torch.no_grad():
        return model(
            input_ids=torch.tensor([[5], [9], [20]]), position_ids=torch.tensor([[0], [7], [31]]),
            past_key_values=RolloutCache(), use_cache=True,
        ).logits  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROTARY)
def test_a_step_has_the_same_bits(name, dtype):
    model = new_model(name).to(dtype)
    expected, original = step(model), vars(sys.modules[type(model).__module__])[FUNCTION]
    with fused_rotary(model):
        assert isinstance(vars(sys.modules[type(model).__module__])[FUNCTION], FusedRotary)
        for _ in range(2):
            assert torch.equal(step(model), expected)
    assert vars(sys.modules[type(model).__module__])[FUNCTION] is original


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_angles_are_those_of_the_call(monkeypatch):
    """Two kinds of layers with own angles, other rows in the next step, and memory for a few angles."""
    rotate = FusedRotary(modeling_llama.apply_rotary_pos_emb)
    for count in (3, 3, 5, 2):
        angles = [(random(count, 1, 8).cos(), random(count, 1, 8).sin()), (random(count, 1, 8), random(count, 1, 8))]
        for cos, sin in angles * 3:
            for heads in (2, 4):
                q, k = random(count, 4, 1, 8), random(count, heads, 1, 8)
                expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
                assert all(map(torch.equal, rotate(q, k, cos, sin), expected))
    assert len(rotate._factors) == 4


def test_whole_prompts_and_other_arguments_are_left_to_the_model():
    calls = []

    def original(*args, **kwargs):
        calls.append((len(args), kwargs))
        return args[:2]

    rotate, cos = FusedRotary(original), random(2, 3, 8)
    rotate(random(2, 4, 3, 8), random(2, 2, 3, 8), cos, cos)
    rotate(random(2, 4, 1, 8), random(2, 2, 1, 8), cos[:, :1, :4], cos[:, :1, :4])  # a part of each head
    rotate(random(2, 1, 4, 8), random(2, 1, 2, 8), cos[:, :1], cos[:, :1], unsqueeze_dim=2)
    assert calls == [(4, {}), (4, {}), (4, {"unsqueeze_dim": 2})]


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(x * cos.unsqueeze(1) + x.roll(1, -1) * sin.unsqueeze(1) for x in (q, k))


def other_arguments(q, k, cos, sin, position_ids):
    raise AssertionError


@pytest.mark.parametrize("function", [interleaved, other_arguments])
def test_a_function_that_computes_something_else_is_kept(function, monkeypatch):
    monkeypatch.setattr(modeling_llama, FUNCTION, function)
    with fused_rotary(new_model("llama")):
        assert getattr(modeling_llama, FUNCTION) is function
