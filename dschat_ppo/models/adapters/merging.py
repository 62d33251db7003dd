"""Merge LoRA adapters into the weights under them: for good, or for a rollout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat_ppo.common.extras import require_extra
from dschat_ppo.common.host_memory import freed_memory_returned
from dschat_ppo.errors import UserError
from dschat_ppo.models.adapters.folders import ADAPTER
from dschat_ppo.models.adapters.layers import (
    adapter_layers,
    inject_lora,
    is_linear,
    load_adapter_weights,
    saved_config,
)


def load_merged(model: PreTrainedModel, folder: str) -> None:
    """Merge the adapter in `folder` into the weights of `model`: the product in fp32, then rounded.
    In place. `model` is the adapter's base, whole or partitioned by ZeRO-3 (then collective),
    before it gets an engine."""
    require_extra("peft", f"the adapter folder {folder}")
    import deepspeed

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    inject_lora(model, replace(saved_config(folder), init_lora_weights=False), folder)
    weights = load_adapter_weights(model, folder)
    for path, layer in adapter_layers(model).items():
        base = layer.get_base_layer()
        if not is_linear(base):
            raise UserError(
                f"{folder}: its adapter of {path} is not of a linear layer; merge it with peft"
            )
        with deepspeed.zero.GatheredParameters([base.weight], modifier_rank=0), torch.no_grad():
            a, b, magnitude = matrices_of(weights, path)
            base.weight.copy_(merged_weight(layer, base.weight, a, b, magnitude))
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, base)
    del model.peft_config
    for weight in trained:
        weight.requires_grad_(True)


def matrices_of(weights: Mapping[str, Tensor], path: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """A, B and, for DoRA, the magnitudes of the layer at `path`, of weights by their names in the
    model."""
    a = weights[f"{path}.lora_A.{ADAPTER}.weight"]
    b = weights[f"{path}.lora_B.{ADAPTER}.weight"]
    magnitude = weights.get(f"{path}.lora_magnitude_vector.{ADAPTER}.weight")
    return a, b, magnitude


def merged_weight(
    layer: Any, weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None
) -> Tensor:
    """The weight of a layer with its adapter merged, in fp32 and in the layout of `weight`: LoRA `W
    + s B A`; DoRA each row of this divided by its norm and multiplied by its magnitude.

    `weight` (out, in), or (in, out) for GPT-2's `Conv1D`; `a` (rank, in), `b` (out, rank);
    `magnitude` (out,) for DoRA, None for LoRA. peft's `layer` has the scale s and the layout.
    """
    transposed = bool(layer.fan_in_fan_out)
    rows = weight.float()  # (out, in) from here on
    if transposed:
        rows = rows.T
    rows = rows + layer.scaling[ADAPTER] * (b.float() @ a.float())
    if magnitude is not None:
        rows = rows * (magnitude.float() / rows.norm(dim=1)).unsqueeze(1)
    if transposed:
        return rows.T
    return rows


@contextmanager
def adapters_merged(
    model: PreTrainedModel,
    disposable: Collection[nn.Parameter] = (),
    originals_on_host: bool = False,
) -> Iterator[None]:
    """Replace each layer that has adapters by its base layer with the merged weight, so that code
    that looks for `nn.Linear` finds it. Layers with a quantised base keep their adapter unmerged.
    The exit restores layers and original weights bit for bit. The model has whole weights and no
    hooks; its weights and adapters must not change inside the context.

    Args:
        model: in which layers are replaced.
        disposable: weights that are dropped afterwards (copies gathered by ZeRO-3). They are merged
            in place, and their originals are not kept.
        originals_on_host: keep the other original weights in host memory, not on the device.
    """
    dropped = set(disposable)
    children = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
    ]
    mergeable = {
        layer
        for layer in adapter_layers(model).values()
        if layer.get_base_layer().weight.is_floating_point()
    }
    with ExitStack() as stack:
        with freed_memory_returned():  # else the heap keeps as much again, from products in fp32
            for parent, name, child in children:
                if child not in mergeable:
                    continue
                base: Any = child.get_base_layer()  # type: ignore[union-attr,operator]
                in_place = base.weight in dropped and not _is_partition_itself(base.weight)
                merged = _with_adapter(child, base.weight)
                stack.enter_context(
                    _weight_replaced(base.weight, merged, in_place, originals_on_host)
                )
                # the order of children stays
                stack.callback(parent._modules.__setitem__, name, child)
                parent._modules[name] = base
        yield


@torch.no_grad()
def _with_adapter(layer: Any, weight: nn.Parameter) -> Tensor:
    """The weight of `layer` with its adapter merged: computed in fp32, in the dtype and layout of
    `weight`."""
    a, b, magnitude = matrices_of(dict(layer.named_parameters(prefix="layer")), "layer")
    return merged_weight(layer, weight.detach(), a, b, magnitude).to(weight.dtype).contiguous()


def _is_partition_itself(weight: Any) -> bool:
    """Whether a gathered weight is this rank's partition itself: on one rank ZeRO-3 makes no
    copy."""
    return weight.untyped_storage().data_ptr() == weight.ds_tensor.untyped_storage().data_ptr()


@contextmanager
def _weight_replaced(
    weight: nn.Parameter, new: Tensor, in_place: bool, original_on_host: bool
) -> Iterator[None]:
    """Give `weight` the values `new`. If `in_place`, the original is lost."""
    if in_place:
        weight.data.copy_(new)
        yield
        return
    if original_on_host:
        original = weight.data.to("cpu", copy=True)
        weight.data.copy_(new)
    else:
        original = weight.data
        weight.data = new
    try:
        yield
    finally:
        if original_on_host:
            weight.data.copy_(original)
        else:
            weight.data = original
