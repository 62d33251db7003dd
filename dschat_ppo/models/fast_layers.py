"""RMSNorm and SwiGLU layers by compiled kernels, with backward passes by hand: bf16 on a CPU. On a GPU, RMSNorm by
PyTorch's kernel; without gradients in fp32 by its function, which is fewer operations.

Autograd keeps the states of a norm in fp32 and runs a dozen operations over them, and it keeps silu(gate) of an MLP.
By hand, with the output y = w n of a norm, n = x r, r = (mean(x^2) + eps)^-1/2, and the gradient g of y:

    dw = sum(g n) over tokens    dx = r (w g - n mean(w g n))

and with the product y = silu(a) b of an MLP, s = 1 / (1 + exp(-a)), and the gradient g of y:

    da = g b s (1 + a (1 - s))    db = g silu(a)

Both forward passes round where transformers' layers do.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        states = states.contiguous()
        ctx.save_for_backward(states, weight)
        ctx.eps = eps
        return operations.rms_norm(states, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        states, weight = ctx.saved_tensors
        of_states, of_weight = operations.rms_norm_backward(states, weight, gradient.contiguous(), ctx.eps)
        return of_states, of_weight if ctx.needs_input_grad[1] else None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return operations.swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return operations.swiglu_backward(gate, up, gradient.contiguous())


def _can_run(*tensors: Tensor) -> bool:
    """As `can_run`; on the meta device too, where the planner counts what layers save for their backward pass."""
    return can_run(*tensors) or all(x.is_meta and x.dtype == torch.bfloat16 for x in tensors)


@cache
def _fast_norm(kind: Any) -> Any:
    def forward(self: Any, states: Tensor) -> Tensor:
        weight, eps, trains = self.weight, self.variance_epsilon, torch.is_grad_enabled()
        if _can_run(states, weight):
            found: Tensor = (
                _RMSNorm.apply(states, weight, eps) if trains else operations.rms_norm(states.contiguous(), weight, eps)
            )
        elif states.is_cuda or (states.dtype == torch.float32 and not trains):  # in fp32, with the same bits
            found = weight * nn.functional.rms_norm(states, weight.shape, None, eps)
        else:
            found = kind.forward(self, states)
        return found

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@cache
def _fast_mlp(kind: Any) -> Any:
    def forward(self: Any, states: Tensor) -> Tensor:
        if not _can_run(states):
            plain: Tensor = kind.forward(self, states)
            return plain
        gate, up = self.gate_proj(states), self.up_proj(states)
        found: Tensor = self.down_proj(_SwiGLU.apply(gate, up) if _can_run(gate, up) else self.act_fn(gate) * up)
        return found

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def use_fast_layers(model: nn.Module) -> None:
    """Make RMSNorm and MLP layers of `model` use the kernels, where they compute what those of Llama do. transformers
    copies these layers into many architectures, so the code itself is compared. Gemma's norm, for example, adds 1 to
    the weight, and stays as it is."""
    for layer in model.modules():
        kind: Any = type(layer)
        if kind.__name__.endswith("RMSNorm") and _same_code(kind, LlamaRMSNorm):
            layer.__class__ = _fast_norm(kind)
        activation = getattr(layer, "act_fn", None)
        if isinstance(activation, (nn.SiLU, SiLUActivation)) and _same_code(kind, LlamaMLP):
            layer.__class__ = _fast_mlp(kind)


def _same_code(kind: Any, known: Any) -> bool:
    """Whether the forward functions of two classes are the same instructions, inside decorators."""
    codes = [getattr(inspect.unwrap(x.forward), "__code__", None) for x in (kind, known)]
    found, expected = ((c.co_code, c.co_consts, c.co_names, c.co_varnames) if c else None for c in codes)
    return found == expected
