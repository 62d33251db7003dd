"""Fewer operations while generating: RMSNorm by two instead of eight, rotary positions on a GPU by four of ten."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.models.probes import unfit

FUNCTION = "apply_rotary_pos_emb"  # of a transformers module: (q, k, cos, sin, unsqueeze_dim=1) -> (q, k)
MOST_ANGLES = 4  # kept at a time: some models have one set for each kind of layer
ROWS = 64  # of the comparison with a model's own layer
DIFFERING_SHARE = 0.01  # of half-precision numbers that may be rounded the other way: the order of a sum differs

Rotate = Callable[..., tuple[Tensor, Tensor]]


def rms_norm(weight: Tensor, eps: float, states: Tensor) -> Tensor:
    """`weight * (x / sqrt(mean(x^2) + eps))`, rounded where transformers' layers round: before and after the weight."""
    if can_run(states, weight) and states.is_contiguous():
        return operations.rms_norm(states, weight, eps)
    return weight * nn.functional.rms_norm(states, weight.shape, None, eps)


@contextmanager
def fused_norms(model: nn.Module) -> Iterator[None]:
    """Make the RMSNorm layers of `model` run `rms_norm`, where that computes what their class computes."""
    layers: list[Any] = [layer for layer in model.modules() if _is_candidate(layer)]
    agreeing: dict[tuple[type, torch.Size], bool] = {}
    try:
        for layer in layers:
            kind = type(layer), layer.weight.shape
            if kind not in agreeing:
                agreeing[kind] = _norm_agrees(layer)
            if agreeing[kind]:
                layer.forward = partial(rms_norm, layer.weight, _epsilon(layer))
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _epsilon(layer: Any) -> Any:
    return getattr(layer, "variance_epsilon", getattr(layer, "eps", None))


def _is_candidate(layer: Any) -> bool:
    weight = layer._parameters.get("weight")  # no buffer of ones, beside states of another width (FalconMamba)
    named = type(layer).__name__.endswith("RMSNorm") and isinstance(_epsilon(layer), float)
    return named and isinstance(weight, Tensor) and weight.dim() == 1 and "forward" not in vars(layer)


@torch.no_grad()
def _norm_agrees(layer: Any) -> bool:
    """Whether `rms_norm` and the layer give the same numbers for random states."""
    weight, generator = layer.weight, torch.Generator().manual_seed(0)
    states = torch.randn(ROWS, 1, len(weight), generator=generator).to(weight)
    try:
        expected, found = layer(states), rms_norm(weight, _epsilon(layer), states)
    except Exception as problem:  # noqa: BLE001  a layer of the same name for other arguments
        unfit(problem)
        return False
    if not torch.allclose(found, expected, rtol=4 * torch.finfo(weight.dtype).eps, atol=0):
        return False
    return weight.dtype == torch.float32 or float((found != expected).float().mean()) <= DIFFERING_SHARE


class FusedRotary:
    """Rotates queries and keys of one new token of each row together; else it calls `original`, the model's function.
    The rotation is `x * cos + rotate_half(x) * sin` (Su et al. 2021, equation 34), as one product of the numbers of `x`
    and the same numbers with the halves exchanged; the sign of `rotate_half` goes to the sine, which is exact. So the
    bits are those of separate operations."""

    def __init__(self, original: Rotate):
        self._original = original
        self._factors: list[tuple[Tensor, tuple[int, int], Tensor, Tensor]] = []  # for the layers of a step

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As the function of the model: q (n, heads, L, d), k (n, kv_heads, L, d), cos and sin (n, L, d)."""
        width = q.shape[3]
        if args or kwargs or q.shape[2] != 1 or cos.dim() != 3 or cos.shape[2] != width or cos.dtype != q.dtype:
            return self._original(q, k, cos, sin, *args, **kwargs)
        factors, exchanged = self._factors_of(cos, sin, q.shape[:2], k.shape[1])
        both = torch.cat([q.reshape(-1, width), k.reshape(-1, width)])  # contiguous queries, then contiguous keys
        products = both.index_select(1, exchanged) * factors
        rotated = products[:, :width] + products[:, width:]
        queries = q.shape[0] * q.shape[1]
        return rotated[:queries].view(q.shape), rotated[queries:].view(k.shape)

    def _factors_of(self, cos: Tensor, sin: Tensor, shape: torch.Size, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of all rows and heads, (n * (heads + kv_heads), 2 d), and the order of numbers."""
        (count, heads), width = shape, cos.shape[2]
        for angles, key, factors, exchanged in self._factors:
            if angles is cos and key == (heads, kv_heads):
                return factors, exchanged
        first, second = sin.chunk(2, dim=2)
        row = torch.cat([cos, -first, second], dim=2)  # (n, 1, 2 d)
        factors = torch.cat([row.expand(count, number, -1).reshape(-1, 2 * width) for number in (heads, kv_heads)])
        order = torch.arange(width, device=cos.device)
        exchanged = torch.cat([order, order.roll(width // 2)])
        self._factors = [*self._factors[1 - MOST_ANGLES :], (cos, (heads, kv_heads), factors, exchanged)]
        return factors, exchanged


@contextmanager
def fused_rotary(model: nn.Module) -> Iterator[None]:
    """Make the attention layers of `model` rotate with `FusedRotary`, where that gives the same bits."""
    weight = next(model.parameters())
    modules = {type(layer).__module__ for layer in model.modules()}
    originals = {
        name: vars(sys.modules[name])[FUNCTION] for name in sorted(modules) if FUNCTION in vars(sys.modules[name])
    }
    try:
        for name, original in originals.items():
            if _rotation_agrees(original, weight.device, weight.dtype):
                setattr(sys.modules[name], FUNCTION, FusedRotary(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(sys.modules[name], FUNCTION, original)


@torch.no_grad()
def _rotation_agrees(original: Rotate, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `FusedRotary` and the function of a model give the same bits for random queries, keys and angles."""
    generator = torch.Generator().manual_seed(0)
    q, k, angles = (torch.randn(shape, generator=generator) for shape in ((3, 6, 1, 16), (3, 2, 1, 16), (3, 1, 16)))
    tensors = [tensor.to(device, dtype) for tensor in (q, k, angles.cos(), angles.sin())]
    try:
        expected = original(*tensors)
        found = FusedRotary(original)(*tensors)
        return len(expected) == 2 and all(map(torch.equal, found, expected))
    except Exception as problem:  # noqa: BLE001  a function of the same name for other arguments
        unfit(problem)
        return False
