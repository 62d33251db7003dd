"""RMSNorm and SwiGLU layers by kernels, against transformers' layers and fp64."""

import copy

import pytest
import torch
from pretended_gpu import moved, on_gpu, pretended_gpu
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from dschat_ppo.models.fast_layers import use_fast_layers

SIZE = 96


def norm_of(kind, dtype=torch.bfloat16):
    torch.manual_seed(0)
    norm = kind(SIZE, eps=1e-5)
    torch.nn.init.normal_(norm.weight, mean=1.0)
    return norm.to(dtype)


def fast(layer):
    made = copy.deepcopy(layer)
    use_fast_layers(made)
    return made


def output_and_gradients(norm, states, gradient):
    states = states.clone().requires_grad_()
    output = norm(states)
    return output.detach(), *torch.autograd.grad(
        output, [states, norm.weight], gradient.to(output.dtype)
    )


@pytest.mark.parametrize(
    ("kind", "scale"), [(LlamaRMSNorm, 1e-4), (Qwen3RMSNorm, 1.0), (LlamaRMSNorm, 300.0)]
)
def test_norms_are_rounded_alike_and_gradients_as_close_to_fp64_as_autograds(kind, scale):
    plain = norm_of(kind)
    made = fast(plain)
    assert type(made) is not kind
    states, gradient = (
        scale * torch.randn(3, 50, SIZE).bfloat16(),
        torch.randn(3, 50, SIZE).bfloat16(),
    )
    expected, found = (output_and_gradients(norm, states, gradient) for norm in (plain, made))
    # a sum in another order may move a number across a rounding
    differs = (found[0] != expected[0]).float().mean()
    assert differs < 0.002 and torch.allclose(found[0], expected[0], rtol=2**-7, atol=0)
    wide, weight = states.double().requires_grad_(), plain.weight.double().detach().requires_grad_()
    exact = weight * wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + 1e-5)
    truth = torch.autograd.grad(exact, [wide, weight], gradient.double())
    for got, autograds, true in zip(found[1:], expected[1:], truth, strict=True):
        error, of_autograd = (
            (part.double() - true).norm() / true.norm() for part in (got, autograds)
        )
        assert error <= 1.05 * of_autograd + 1e-6
        assert error < 0.01


def test_a_norm_on_a_gpu_is_pytorchs_kernel_and_is_rounded_alike(monkeypatch):
    plain, states, calls, original = (
        norm_of(LlamaRMSNorm),
        torch.randn(3, 50, SIZE).bfloat16(),
        [],
        F.rms_norm,
    )
    monkeypatch.setattr(F, "rms_norm", lambda *a: calls.append(1) or original(*a))
    with pretended_gpu():
        found = moved(fast(plain))(on_gpu(states)).held
    assert calls and torch.equal(found, plain(states))


def mlp_of(kind, dtype=torch.bfloat16, **changes):
    torch.manual_seed(1)
    mlp = kind(LlamaConfig(hidden_size=SIZE, intermediate_size=200, **changes))
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return mlp.to(dtype)


@pytest.mark.parametrize(("kind", "bias"), [(LlamaMLP, True), (Qwen3MLP, False)])
def test_mlps_are_equal_and_gradients_as_close_to_fp64_as_autograds(kind, bias):
    plain = mlp_of(kind, mlp_bias=bias)
    made, exact = fast(plain), copy.deepcopy(plain).double()
    assert type(made) is not kind
    states, gradient = torch.randn(3, 50, SIZE).bfloat16(), torch.randn(3, 50, SIZE).bfloat16()
    outputs, gradients = [], []
    for mlp in (made, plain, exact):
        given = states.to(mlp.up_proj.weight.dtype).requires_grad_()
        outputs.append(mlp(given))
        grads = torch.autograd.grad(
            outputs[-1], [given, *mlp.parameters()], gradient.to(given.dtype)
        )
        gradients.append([part.double() for part in grads])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=2**-6, atol=2**-6)
    for found, autograds, true in zip(*gradients, strict=True):
        error, of_autograd = ((part - true).norm() / true.norm() for part in (found, autograds))
        assert error <= 1.05 * of_autograd + 1e-6
        assert error < 0.02


def test_a_frozen_weight_has_no_gradient():
    norm = fast(norm_of(LlamaRMSNorm))
    norm.weight.requires_grad_(False)
    states = torch.randn(4, SIZE).bfloat16().requires_grad_()
    norm(states).sum().backward()
    assert states.grad is not None and norm.weight.grad is None


def test_layers_that_compute_something_else_stay_as_they_are():
    class Other(LlamaMLP):
        def forward(self, x):
            return 2 * super().forward(x)

    for layer in (norm_of(GemmaRMSNorm), mlp_of(LlamaMLP, hidden_act="gelu"), mlp_of(Other)):
        before = type(layer)
        use_fast_layers(layer)
        assert type(layer) is before
