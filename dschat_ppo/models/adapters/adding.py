"""What happens to adapters while a model is loaded: a new one is added, or that of its folder is
trained further or merged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from dschat_ppo.common.logging import logger
from dschat_ppo.models.adapters.folders import adapter_weights
from dschat_ppo.models.adapters.layers import adapter_layers, add_adapter, saved_config
from dschat_ppo.models.adapters.merging import load_merged
from dschat_ppo.models.adapters.settings import AdapterSettings
from dschat_ppo.models.model_folders import SCORE, is_adapter_folder


def check_adapter(
    build: Callable[[], PreTrainedModel], folder: str, adapter: AdapterSettings | None
) -> None:
    """Do what `adapt` does to the model that `build` makes, without weights."""
    if adapter is not None or is_adapter_folder(folder):
        with torch.device("meta"):
            model = build()
        adapt(model, folder, adapter)


def adapt(model: PreTrainedModel, folder: str, adapter: AdapterSettings | None) -> None:
    """Give `model`, loaded from the base of `folder`, an `adapter`: that of an adapter folder, to
    train it further, or a new one. None: that of an adapter folder is merged."""
    if adapter is None:
        if is_adapter_folder(folder):
            load_merged(model, folder)
        return
    continued_folder = None
    if is_adapter_folder(folder):
        continued_folder = folder
    add_adapter(model, adapter, folder=continued_folder)


def report_adapter(model: PreTrainedModel, folder: str, adapter: AdapterSettings | None) -> None:
    """Log what `adapt` has done."""
    if is_adapter_folder(folder):
        use = "is merged into its base model"
        if adapter is not None:
            use = "is trained further with its layers and scale"
            flags = _ignored_flags(folder, adapter)
            if flags:
                use += f"; {', '.join(flags)} without effect"
        logger().info(f"model: the adapter in {folder} {use}")
    if adapter is not None:
        trained = 0
        total = 0
        for weight in model.parameters():
            size = getattr(weight, "ds_numel", weight.numel())
            total += size
            if weight.requires_grad:
                trained += size
        layers = len(adapter_layers(model))
        logger().info(
            f"LoRA: rank {adapter.rank} in {layers} layers; {trained:,} of {total:,} parameters are"
            " trained"
        )


def _ignored_flags(folder: str, settings: AdapterSettings) -> list[str]:
    """Flags of `settings` that differ from what the adapter in `folder` has and keeps."""
    config = saved_config(folder)
    differing = {
        settings.flag: settings.targets is not None,
        "--lora_alpha": settings.alpha_is_given and settings.alpha != config.lora_alpha,
        "--use_rslora": settings.rslora and not config.use_rslora,
    }
    return [flag for flag, differs in differing.items() if differs]


def saves_head(folder: str) -> bool:
    """Whether an adapter folder holds the score head of a reward model or critic."""
    return f"{SCORE}.weight" in adapter_weights(folder)
