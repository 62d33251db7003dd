"""Weights laid out for oneDNN once, instead of in every product: CPU, bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat_ppo.rollout.fused_layers import Product, fused_layers


def can_prepack(model: nn.Module) -> bool:
    """Whether PyTorch has the (private) operators, the processor supports them, and the weights are bf16 on the CPU."""
    weight = next(model.parameters())
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(supported and weight.device.type == "cpu" and weight.dtype == torch.bfloat16)


def packed_product(layers: list[nn.Linear], rows: int) -> Product:
    """A product with a packed copy of the weights of `layers`, whose outputs come one after another."""
    weights, biases = zip(*((layer.weight.detach(), layer.bias) for layer in layers), strict=True)
    whole = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = None
    if any(part is not None for part in biases):
        parts = [w.new_zeros(len(w)) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)]
        bias = torch.cat(parts)
    return partial(packed_linear, torch.ops.mkldnn._reorder_linear_weight(whole, rows), bias)


def packed_linear(weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    """`nn.functional.linear` with a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


@contextmanager
def prepacked(model: PreTrainedModel, rows: int) -> Iterator[None]:
    """Make every plain `nn.Linear` multiply with a packed copy of its weight, which takes the weights' memory again.

    Decoder layers of Llama's form run as `FusedLayer`.

    Args:
        model: whole bfloat16 weights on the CPU; they must not change inside the context.
        rows: typical rows of a product, a hint for the layout.
    """
    replaced: list[Any] = []
    try:
        for layer, forward in fused_layers(model, partial(packed_product, rows=rows)):
            replaced.append(layer)
            replaced[-1].forward = forward
        inside = {id(module) for layer in replaced for module in layer.modules()}
        for module in model.modules():
            if type(module) is nn.Linear and "forward" not in vars(module) and id(module) not in inside:
                replaced.append(module)
                replaced[-1].forward = packed_product([module], rows)
        yield
    finally:
        for layer in replaced:
            vars(layer).pop("forward", None)  # packing may have failed half-way
