"""RMSNorm and SwiGLU layers by kernels, with backward passes by hand: compiled ones on a CPU,
Triton's on a GPU in half precision. Where these do not run, a GPU's RMSNorm is PyTorch's kernel; so
is that in fp32 without gradients, which is fewer operations.

Autograd keeps the states of a norm in fp32 and runs a dozen operations over them, and it keeps
silu(gate) of an MLP. By hand, with the output y = w n of a norm, n = x r, r = (mean(x^2) +
eps)^-1/2, and the gradient g of y:

    dw = sum(g n) over tokens    dx = r (w g - n mean(w g n))

and with the product y = silu(a) b of an MLP, s = 1 / (1 + exp(-a)), and the gradient g of y:

    da = g b s (1 + a (1 - s))    db = g silu(a)

On a GPU queries and keys are rotated by a kernel too, and their gradients back. All forward passes
round where transformers' layers do.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    rotate_half,
)

from dschat_ppo.algorithms.fused_logprobs import HALF
from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.errors import attempt
from dschat_ppo.models.backbone import unfit

_log = logging.getLogger(__name__)

# of rows that a comparison of the kernels has; those of an MLP may be wider than any norm
WIDEST_NORM = 16384
LARGEST_HEAD = 256
FP32_TOLERANCE = 2.0**-17  # relative difference of sums in fp32

# under the names that `gpu_kernels` gives its own
CPU_KERNELS = SimpleNamespace(
    rms_norm=operations.cpu_rms_norm,
    rms_norm_backward=operations.cpu_rms_norm_backward,
    swiglu=operations.cpu_swiglu,
    swiglu_backward=operations.cpu_swiglu_backward,
    rotate_=operations.rotate_,
)


def kernels_for(*tensors: Tensor) -> Any:
    """The kernels that run these tensors: `CPU_KERNELS`, the module `gpu_kernels`, or None. On the
    meta device, where the planner counts what layers save for their backward pass, those of the
    CPU: Triton's save the same."""
    if can_run(*tensors):
        return CPU_KERNELS
    dtype = tensors[0].dtype
    if all(x.is_meta and x.dtype == dtype for x in tensors):
        return CPU_KERNELS
    if all(x.is_cuda and type(x) in (Tensor, nn.Parameter) and x.dtype in HALF for x in tensors):
        return _triton_kernels(tensors[0].device, dtype, tensors[0].shape[-1])
    return None


@cache
def _triton_kernels(device: torch.device, dtype: torch.dtype, width: int) -> Any:
    """Triton's kernels, if they compute what PyTorch's operations compute on this GPU with rows of
    `width` numbers, as the model's are: how many threads share the sums of a row depends on it.
    Else None, with a warning."""
    return compared_kernels(
        f"rows of {width}",
        lambda kernels: kernel_outputs(kernels, device, dtype, width),
        "layers are slower",
    )


def compared_kernels(
    what: str,
    outputs_of: Callable[[Any], Iterator[tuple[str, Tensor, Tensor]]],
    consequence: str,
) -> Any:
    """The module `gpu_kernels`, if each output of `outputs_of` it, (name, output, expected), is as
    expected; else None, with a warning that they cannot be used for `what`."""
    # the saved tensors of a comparison are not those of a checkpoint around it
    saved_tensors = torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved, lambda saved: saved
    )
    with attempt() as tried, saved_tensors:
        from dschat_ppo import gpu_kernels  # builds of PyTorch for CPUs have no Triton

        for name, output, expected in outputs_of(gpu_kernels):
            expected = expected.detach()
            difference = float((output.double() - expected).norm() / expected.norm())
            if not difference <= max(torch.finfo(output.dtype).eps, FP32_TOLERANCE):
                raise ArithmeticError(f"{name} is off by {difference:.2g}")
    reason = unfit(tried)
    if reason:
        _log.warning(f"Triton's kernels cannot be used for {what}: {reason}; {consequence}")
        return None
    return gpu_kernels


def kernel_outputs(
    kernels: Any, device: torch.device, dtype: torch.dtype, width: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What each of the `kernels` computes from random rows of `width` numbers, and the same by
    PyTorch in fp64: (name, output, expected). Rotations where heads can have that width."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    with torch.enable_grad():
        if width <= WIDEST_NORM:
            yield from _norm_outputs(kernels, random, width)
        yield from _gated_outputs(kernels, random, width)
        if width <= LARGEST_HEAD and width % 2 == 0:
            yield from _rotation_outputs(kernels, random, width)


def _wide(tensor: Tensor) -> Tensor:
    """A copy in fp64 that takes a gradient."""
    return tensor.detach().double().requires_grad_()


def _norm_outputs(
    kernels: Any, random: Callable[..., Tensor], width: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """`kernel_outputs` of RMSNorm and its gradients."""
    states = random(5, width)
    weight = random(width)
    gradient = random(5, width)
    x = _wide(states)
    w = _wide(weight)
    exact = w * x * torch.rsqrt(x.pow(2).mean(dim=1, keepdim=True) + 1e-6)
    yield "a norm", kernels.rms_norm(states, weight, 1e-6), exact
    gradients = kernels.rms_norm_backward(states, weight, gradient, 1e-6)
    expected = torch.autograd.grad(exact, [x, w], gradient.double())
    yield "the gradient of a norm", gradients[0], expected[0]
    yield "the gradient of a norm", gradients[1], expected[1]


def _gated_outputs(
    kernels: Any, random: Callable[..., Tensor], width: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """`kernel_outputs` of SwiGLU and its gradients."""
    gradient = random(5, width)
    gate, up = random(5, 2 * width).chunk(2, dim=1)
    a = _wide(gate)
    b = _wide(up)
    exact = nn.functional.silu(a) * b
    yield "a gated product", kernels.swiglu(gate, up), exact
    gradients = kernels.swiglu_backward(gate.contiguous(), up.contiguous(), gradient)
    expected = torch.autograd.grad(exact, [a, b], gradient.double())
    yield "the gradient of a gated product", gradients[0], expected[0]
    yield "the gradient of a gated product", gradients[1], expected[1]


def _rotation_outputs(
    kernels: Any, random: Callable[..., Tensor], width: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """`kernel_outputs` of Rotations, their gradients, and those of queries and keys together."""
    half = width // 2
    queries = random(2, 5, 3, width)
    gradient = random(2, 5, 3, width)
    angles = random(2, 3, width)
    cos = angles.cos()
    sin = angles.sin()
    # angles of each row, and the same for all; the two halves of a head have different ones
    for rows in (2, 1):
        x = _wide(queries)
        c = cos[:rows, None].double()
        s = sin[:rows, None].double()
        exact = x * c + torch.cat([-x[..., half:], x[..., :half]], dim=3) * s
        yield "a rotation", kernels.rotated(queries, cos[:rows], sin[:rows]), exact
        output = kernels.rotated(gradient, cos[:rows], sin[:rows], back=True)
        [expected] = torch.autograd.grad(exact, x, gradient.double())
        yield "the gradient of a rotation", output, expected
    # (6, 5, width): 3 heads of queries, 1 of keys and 1 of values of each token
    heads = queries.transpose(1, 2).flatten(0, 1)
    rotated = kernels.rotated(queries, cos, sin).transpose(1, 2).flatten(0, 1)
    query_key_value = kernels.rotated_heads(
        heads.contiguous(), cos.flatten(0, 1), sin.flatten(0, 1), 3, 1
    )
    expected = torch.cat([rotated[:, :4], heads[:, 4:]], dim=1)
    yield "a rotation of queries and keys", torch.cat(query_key_value, dim=1), expected


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        states = states.contiguous()
        ctx.save_for_backward(states, weight)
        ctx.kernels = kernels
        ctx.eps = eps
        normal: Tensor = kernels.rms_norm(states, weight, eps)
        return normal

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor | None, None]:
        states, weight = ctx.saved_tensors
        of_states, of_weight = ctx.kernels.rms_norm_backward(
            states, weight, gradient.contiguous(), ctx.eps
        )
        if not ctx.needs_input_grad[2]:
            of_weight = None
        return None, of_states, of_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.contiguous()
        up = up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        product: Tensor = kernels.swiglu(gate, up)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return None, *ctx.kernels.swiglu_backward(gate, up, gradient.contiguous())


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        rotated: Tensor = kernels.rotated(states, cos, sin)
        return rotated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.kernels.rotated(gradient, *ctx.saved_tensors, back=True), None, None


class FastRotary:
    """Rotates queries and keys of a GPU by one kernel each; else it calls `original`, the model's
    function."""

    def __init__(self, original: Any):
        self._original = original

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As the function of the model: q (n, heads, L, d), k (n, kv_heads, L, d), cos and sin (n
        or 1, L, d)."""
        fits = not args and not kwargs and cos.dim() == 3 and cos.shape[2] == q.shape[3]
        kernels = None
        if fits:
            kernels = kernels_for(q, k, cos, sin)
        if not hasattr(kernels, "rotated"):
            rotated: tuple[Tensor, Tensor] = self._original(q, k, cos, sin, *args, **kwargs)
            return rotated
        return _Rotation.apply(kernels, q, cos, sin), _Rotation.apply(kernels, k, cos, sin)


@cache
def _fast_norm(kind: Any) -> Any:
    """The class of norms `kind`, whose code is that of Llama's, with a forward by kernels."""

    def forward(self: Any, states: Tensor) -> Tensor:
        weight = self.weight
        eps = self.variance_epsilon
        takes_gradient = torch.is_grad_enabled()
        kernels = kernels_for(states, weight)
        if kernels and takes_gradient:
            normal: Tensor = _RMSNorm.apply(kernels, states, weight, eps)
        elif kernels:
            normal = kernels.rms_norm(states.contiguous(), weight, eps)
        elif states.is_cuda or (states.dtype == torch.float32 and not takes_gradient):
            # in fp32, with the same bits
            normal = weight * nn.functional.rms_norm(states, weight.shape, None, eps)
        else:
            normal = kind.forward(self, states)
        return normal

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@cache
def _fast_mlp(kind: Any) -> Any:
    """The class of MLPs `kind`, whose code is that of Llama's, with a forward by kernels."""

    def forward(self: Any, states: Tensor) -> Tensor:
        if not kernels_for(states):
            plain: Tensor = kind.forward(self, states)
            return plain
        gate = self.gate_proj(states)
        up = self.up_proj(states)
        kernels = kernels_for(gate, up)
        if kernels:
            product = _SwiGLU.apply(kernels, gate, up)
        else:
            product = self.act_fn(gate) * up
        output: Tensor = self.down_proj(product)
        return output

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def use_fast_layers(model: nn.Module) -> None:
    """Make RMSNorm and MLP layers of `model`, and the rotations of its module, use the kernels,
    where they compute what those of Llama do. transformers copies these into many architectures, so
    the code itself is compared. Gemma's norm, for example, adds 1 to the weight, and stays as it
    is."""
    for layer in model.modules():
        kind: Any = type(layer)
        if kind.__name__.endswith("RMSNorm") and _same_code(kind.forward, LlamaRMSNorm.forward):
            layer.__class__ = _fast_norm(kind)
        activation = getattr(layer, "act_fn", None)
        if isinstance(activation, (nn.SiLU, SiLUActivation)) and _same_code(
            kind.forward, LlamaMLP.forward
        ):
            layer.__class__ = _fast_mlp(kind)
        module: Any = sys.modules[kind.__module__]
        rotate = vars(module).get("apply_rotary_pos_emb")
        half = vars(module).get("rotate_half")
        if _same_code(rotate, apply_rotary_pos_emb) and _same_code(half, rotate_half):
            module.apply_rotary_pos_emb = FastRotary(rotate)


def _same_code(function: Any, known: Any) -> bool:
    """Whether `function`, without its decorators, has the code of the function `known`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return False
    expected = inspect.unwrap(known).__code__
    return (
        code.co_code == expected.co_code
        and code.co_consts == expected.co_consts
        and code.co_names == expected.co_names
        and code.co_varnames == expected.co_varnames
    )
