"""Weights laid out once for oneDNN instead of in every product: CPU, bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def can_prepack(model: nn.Module) -> bool:
    """Whether PyTorch has the operators (private ones), the processor can, and the weights are of their kind."""
    weight = next(model.parameters())
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    able = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(able and weight.device.type == "cpu" and weight.dtype == torch.bfloat16)


def _packed_forward(layer: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    return partial(_linear, torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows), layer.bias)


def _linear(packed: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


@contextmanager
def prepacked(model: nn.Module, rows: int) -> Iterator[None]:
    """Inside, every plain `nn.Linear` multiplies with a packed copy of its weight; it costs the weights' memory again.

    Args:
        model: whole bfloat16 weights on the CPU; they must not change inside.
        rows: typical rows of a product, a hint for the layout.
    """
    layers: list[Any] = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    try:
        for layer in layers:
            layer.forward = _packed_forward(layer, rows)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)  # packing may have failed half-way
