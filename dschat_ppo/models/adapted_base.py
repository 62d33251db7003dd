"""A base model and its adapter: a new one, the one of an adapter folder, or that one merged into the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from dschat_ppo.common.logging import logger
from dschat_ppo.models.adapters import (
    AdapterSettings,
    adapter_layers,
    add_adapter,
    ignored_flags,
    is_linear,
    load_merged,
    lora_targets,
)
from dschat_ppo.models.model_folders import is_adapter_folder
from dschat_ppo.models.quantisation import quantised_loading


def adapted(model: PreTrainedModel, folder: str, adapter: AdapterSettings | None) -> PreTrainedModel:
    """`model`, loaded from the base of `folder`, with its adapter, in place.

    `adapter`: add such an adapter, or train that of an adapter folder further; None: merge that of the folder.
    """
    _adapt(model, folder, adapter)
    if is_adapter_folder(folder):
        ignored = [] if adapter is None else ignored_flags(folder, adapter)
        done = "is merged into its base model" if adapter is None else "is trained further with its layers and scale"
        note = f"; {', '.join(ignored)} without effect" if ignored else ""
        logger().info(f"model: the adapter in {folder} {done}{note}")
    if adapter is not None:
        sizes = [(weight.requires_grad, getattr(weight, "ds_numel", weight.numel())) for weight in model.parameters()]
        trained, total = sum(size for trains, size in sizes if trains), sum(size for _, size in sizes)
        layers = len(adapter_layers(model))
        logger().info(f"LoRA: rank {adapter.rank} in {layers} layers; {trained:,} of {total:,} parameters are trained")
    return model


def check_adapter(build: Callable[[], PreTrainedModel], folder: str, adapter: AdapterSettings | None) -> None:
    """Do what `adapted` does to the model that `build` makes, without weights."""
    if adapter is not None or is_adapter_folder(folder):
        _adapt(_without_weights(build), folder, adapter)


def quantised_base(
    build: Callable[[], PreTrainedModel],
    adapter: AdapterSettings | None,
    dtype: torch.dtype,
    ds_config: dict[str, Any] | None,
) -> dict[str, Any]:
    """Arguments of `from_pretrained` that quantise the linear layers of the blocks; {} if the adapter does not ask."""
    if adapter is None or adapter.quantise is None:
        return {}
    model = _without_weights(build)
    layers = lora_targets(model, None)
    skipped = [name for name, layer in model.named_modules() if is_linear(layer) and name not in layers]
    return quantised_loading(adapter.quantise, dtype, layers, skipped, ds_config)


def _adapt(model: PreTrainedModel, folder: str, adapter: AdapterSettings | None) -> None:
    is_adapter = is_adapter_folder(folder)
    if adapter is not None:
        add_adapter(model, adapter, folder=folder if is_adapter else None)
    elif is_adapter:
        load_merged(model, folder)


def _without_weights(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    with torch.device("meta"):
        return build()
