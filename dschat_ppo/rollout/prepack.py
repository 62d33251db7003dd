"""Weights laid out for oneDNN once, instead of in every product: CPU, bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def can_prepack(model: nn.Module) -> bool:
    """Whether PyTorch has the (private) operators, the processor supports them, and the weights are bf16 on the CPU."""
    weight = next(model.parameters())
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(supported and weight.device.type == "cpu" and weight.dtype == torch.bfloat16)


def packed_forward(layer: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    """A forward function for `layer` with a packed copy of its weight."""
    return partial(packed_linear, torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows), layer.bias)


def packed_linear(weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    """`nn.functional.linear` with a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


@contextmanager
def prepacked(model: nn.Module, rows: int) -> Iterator[None]:
    """Make every plain `nn.Linear` multiply with a packed copy of its weight, which takes the weights' memory again.

    Args:
        model: whole bfloat16 weights on the CPU; they must not change inside the context.
        rows: typical rows of a product, a hint for the layout.
    """
    layers: list[Any] = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    try:
        for layer in layers:
            layer.forward = packed_forward(layer, rows)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)  # packing may have failed half-way
