"""Merge adapters into whole weights for generation, and restore the weights without rounding."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat_ppo.common.host_memory import freed_memory_returned
from dschat_ppo.models.adapter_weights import MATRICES, merged_weight
from dschat_ppo.models.adapters import adapter_layers


@contextmanager
def merged(
    model: PreTrainedModel, disposable: Collection[nn.Parameter] = (), originals_on_host: bool = False
) -> Iterator[None]:
    """Replace each layer that has adapters by its base layer with the merged weight.

    Inside the context the model consists of the modules of its base, so code that looks for `nn.Linear` finds it. The
    exit restores the layers, and the original weights bit for bit: they are kept, not computed by subtraction. Layers
    with a quantised base keep their adapter unmerged.

    Args:
        model: with whole weights and without hooks. Its weights and adapters must not change inside the context.
        disposable: weights that are dropped after the context (copies gathered by ZeRO-3), so they are merged in place.
            The device holds the other adapted weights twice.
        originals_on_host: keep the originals in host memory instead. This costs two transfers of the adapted weights.
    """
    dropped = set(disposable)
    layers = {layer for layer in adapter_layers(model).values() if layer.get_base_layer().weight.is_floating_point()}
    places = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()]
    with ExitStack() as stack:
        with freed_memory_returned():  # else the heap keeps as much again, from products in fp32
            for parent, name, child in places:
                if child in layers:
                    base: Any = child.get_base_layer()  # type: ignore[union-attr,operator]
                    in_place = base.weight in dropped and not _is_own_partition(base.weight)
                    new = _with_adapters(child, base.weight)
                    stack.enter_context(_weight_replaced(base.weight, new, in_place, originals_on_host))
                    stack.enter_context(_child_replaced(parent, name, base))
        yield


@torch.no_grad()
def _with_adapters(layer: Any, weight: nn.Parameter) -> Tensor:
    """The weight of `layer` with its active adapters merged: computed in fp32, in the dtype and layout of `weight`."""
    whole = weight.detach()
    for name in layer.active_adapters:
        if name in layer.lora_A:
            parts = [getattr(layer, matrix) for matrix in MATRICES]
            matrices: list[Any] = [part[name].weight if name in part else None for part in parts]
            whole = merged_weight(layer, name, whole, *matrices)
    return whole.to(weight.dtype).contiguous()


def _is_own_partition(weight: Any) -> bool:
    """Whether a gathered weight is this rank's partition itself: on one rank ZeRO-3 makes no copy."""
    return weight.untyped_storage().data_ptr() == weight.ds_tensor.untyped_storage().data_ptr()


@contextmanager
def _weight_replaced(weight: nn.Parameter, new: Tensor, in_place: bool, original_on_host: bool) -> Iterator[None]:
    """Give `weight` the values `new`. If `in_place`, the original is lost."""
    if in_place:
        weight.data.copy_(new)
        yield
        return
    original = weight.data.to("cpu", copy=True) if original_on_host else weight.data
    if original_on_host:
        weight.data.copy_(new)
    else:
        weight.data = new
    try:
        yield
    finally:
        if original_on_host:
            weight.data.copy_(original)
        else:
            weight.data = original


@contextmanager
def _child_replaced(parent: nn.Module, name: str, new: nn.Module) -> Iterator[None]:
    """Replace a child of a module. The order of its children stays."""
    original = parent._modules[name]
    parent._modules[name] = new
    try:
        yield
    finally:
        parent._modules[name] = original
