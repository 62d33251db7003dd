"""RMSNorm by two kernels: the same numbers as the model's own layers, and only where that is so."""

import pytest
import torch
from tiny_models import new_model
from torch import nn

from dschat_ppo.rollout.fused_norms import fused_norms


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
