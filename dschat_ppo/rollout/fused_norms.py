"""RMSNorm by one or two operations instead of eight, while generating."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.models.probes import unfit

ROWS = 64  # of the comparison with a model's own layer
DIFFERING_SHARE = 0.01  # of half-precision numbers that may be rounded the other way: the order of a sum differs


def rms_norm(weight: Tensor, eps: float, states: Tensor) -> Tensor:
    """`weight * (x / sqrt(mean(x^2) + eps))`, rounded where transformers' layers round: before and after the weight."""
    if can_run(states, weight) and states.is_contiguous():
        return operations.rms_norm(states, weight, eps)
    return weight * nn.functional.rms_norm(states, weight.shape, None, eps)


@contextmanager
def fused_norms(model: nn.Module) -> Iterator[None]:
    """Make the RMSNorm layers of `model` run `rms_norm`, where that computes what their class computes.

    Args:
        model: whole weights.
    """
    layers: list[Any] = [layer for layer in model.modules() if _is_candidate(layer)]
    agreeing: dict[tuple[type, torch.Size], bool] = {}
    try:
        for layer in layers:
            kind = type(layer), layer.weight.shape
            if kind not in agreeing:
                agreeing[kind] = _agrees(layer)
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
def _agrees(layer: Any) -> bool:
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
