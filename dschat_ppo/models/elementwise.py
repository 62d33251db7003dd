"""Which kernels run the norms, rotations and gated products of layers: compiled ones on a CPU, Triton's on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.models.probes import unfit

_log = logging.getLogger(__name__)

_PLAIN = (Tensor, nn.Parameter)  # classes of tensors that have their numbers in memory
_EPS = 1e-6  # of the norm that is checked


def kernels_for(*tensors: Tensor) -> Any:
    """`cpu_kernels.operations` or `gpu_kernels`, which have the same functions; None if neither runs these
    tensors. On the meta device, where the planner counts what layers save for their backward pass, the CPU's."""
    if can_run(*tensors) or all(x.is_meta and x.dtype == torch.bfloat16 for x in tensors):
        return operations
    if all(x.is_cuda and type(x) in _PLAIN and x.dtype in (torch.float16, torch.bfloat16) for x in tensors):
        return _triton_kernels(tensors[0].device, tensors[0].dtype)
    return None


@cache
def _triton_kernels(device: torch.device, dtype: torch.dtype) -> Any:
    """Triton's kernels, if they compute what PyTorch's operations compute on this GPU; else None, with a warning."""
    try:
        from dschat_ppo import gpu_kernels  # builds of PyTorch for CPUs have no Triton

        for name, found, expected in compared(gpu_kernels, device, dtype):
            expected = expected.detach()
            difference = float((found.double() - expected).norm() / expected.norm())
            if not difference <= torch.finfo(dtype).eps:
                raise ArithmeticError(f"{name} is off by {difference:.2g}")
    except Exception as problem:  # noqa: BLE001  see `unfit`
        _log.warning(f"Triton's kernels cannot be used: {unfit(problem)}; layers are slower")
        return None
    return gpu_kernels


def compared(kernels: Any, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What each kernel computes from random numbers, and the same by PyTorch in fp64: (name, found, expected)."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def wide(*parts: Tensor) -> list[Tensor]:
        return [part.detach().double().requires_grad_() for part in parts]

    with torch.enable_grad():
        states, weight, gradient = random(5, 96), random(96), random(5, 96)
        x, w = wide(states, weight)
        exact = w * x * torch.rsqrt(x.pow(2).mean(dim=1, keepdim=True) + _EPS)
        yield "a norm", kernels.rms_norm(states, weight, _EPS), exact
        found = kernels.rms_norm_backward(states, weight, gradient, _EPS)
        for part, true in zip(found, torch.autograd.grad(exact, [x, w], gradient.double()), strict=True):
            yield "the gradient of a norm", part, true
        gate, up = random(5, 192).chunk(2, dim=1)
        a, b = wide(gate, up)
        exact = nn.functional.silu(a) * b
        yield "a gated product", kernels.swiglu(gate, up), exact
        found = kernels.swiglu_backward(gate.contiguous(), up.contiguous(), gradient)
        for part, true in zip(found, torch.autograd.grad(exact, [a, b], gradient.double()), strict=True):
            yield "the gradient of a gated product", part, true
        queries, of_queries, angles = random(2, 5, 3, 24), random(2, 5, 3, 24), random(2, 3, 12).repeat(1, 1, 2)
        cos, sin = angles.cos(), angles.sin()
        for rows in (2, 1):  # angles of each row, and the same for all
            [x] = wide(queries)
            c, s = cos[:rows, None].double(), sin[:rows, None].double()
            exact = x * c + torch.cat([-x[..., 12:], x[..., :12]], dim=3) * s
            yield "a rotation", kernels.rotated(queries, cos[:rows], sin[:rows]), exact
            found = kernels.rotated(of_queries, cos[:rows], sin[:rows], back=True)
            yield "the gradient of a rotation", found, torch.autograd.grad(exact, x, of_queries.double())[0]
        lines = queries.transpose(1, 2).flatten(0, 1).contiguous()  # of 3 heads, and 1 of keys and of values
        found = kernels.rotated_parts(lines, cos.flatten(0, 1), sin.flatten(0, 1), 3, 1)
        lines, c, s = (part.flatten(0, -3).double() for part in (lines, cos[:, :, None], sin[:, :, None]))
        turned = lines * c + torch.cat([-lines[..., 12:], lines[..., :12]], dim=2) * s
        for part, true in zip(found, (turned[:, :3], turned[:, 3:4], lines[:, 4:]), strict=True):
            yield "a part of a rotation", part, true
