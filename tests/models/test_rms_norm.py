"""RMSNorm with a backward pass by hand, against transformers' layers and fp64."""

import copy

import pytest
import torch
from tiny_models import new_model
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.rms_norm import quicken_norms

SIZE = 96


def norm_of(kind, dtype=torch.bfloat16):
    torch.manual_seed(0)
    norm = kind(SIZE, eps=1e-5)
    torch.nn.init.normal_(norm.weight, mean=1.0)
    return norm.to(dtype)


def quick(norm):
    made = copy.deepcopy(norm)
    quicken_norms(made)
    return made


def output_and_gradients(norm, states, gradient):
    states = states.clone().requires_grad_()
    output = norm(states)
    return output.detach(), *torch.autograd.grad(output, [states, norm.weight], gradient.to(output.dtype))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_outputs_are_equal_and_gradients_as_close_to_fp64_as_autograds(kind, scale):
    plain = norm_of(kind)
    made = quick(plain)
    assert type(made) is not kind
    states, gradient = scale * torch.randn(3, 50, SIZE).bfloat16(), torch.randn(3, 50, SIZE).bfloat16()
    expected, found = (output_and_gradients(norm, states, gradient) for norm in (plain, made))
    assert torch.equal(found[0], expected[0]), "the forward pass makes the same roundings"
    wide, weight = states.double().requires_grad_(), plain.weight.double().detach().requires_grad_()
    exact = weight * wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + 1e-5)
    truth = torch.autograd.grad(exact, [wide, weight], gradient.double())
    for got, autograds, true in zip(found[1:], expected[1:], truth, strict=True):
        error, of_autograd = ((part.double() - true).norm() / true.norm() for part in (got, autograds))
        assert error <= 1.05 * of_autograd + 1e-6
        assert error < 0.01


def test_a_frozen_weight_has_no_gradient():
    norm = quick(norm_of(LlamaRMSNorm))
    norm.weight.requires_grad_(False)
    states = torch.randn(4, SIZE).bfloat16().requires_grad_()
    norm(states).sum().backward()
    assert states.grad is not None and norm.weight.grad is None


def test_layers_that_compute_something_else_stay_as_they_are():
    norm = norm_of(GemmaRMSNorm)
    quicken_norms(norm)
    assert type(norm) is GemmaRMSNorm


def test_fp32_keeps_the_operations_of_the_layer():
    plain = norm_of(LlamaRMSNorm, torch.float32)
    states, gradient = torch.randn(5, SIZE), torch.randn(5, SIZE)
    for a, b in zip(*(output_and_gradients(norm, states, gradient) for norm in (plain, quick(plain))), strict=True):
        assert torch.equal(a, b)


def test_a_model_is_changed_once_and_its_copies_use_their_own_weights():
    policy = PolicyModel(new_model("llama").bfloat16())
    kind = type(policy.lm.model.norm)
    assert kind is not LlamaRMSNorm and kind.__name__ == "LlamaRMSNorm"
    quicken_norms(policy.lm)
    assert type(policy.lm.model.norm) is kind
    other = copy.deepcopy(policy.lm.model.norm)
    torch.nn.init.zeros_(other.weight)
    assert not other(torch.ones(1, 32).bfloat16()).any() and policy.lm.model.norm(torch.ones(1, 32).bfloat16()).any()
