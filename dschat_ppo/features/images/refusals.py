"""Flags that do not go with a vision tower or a projector that trains."""

from __future__ import annotations

from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.images.flags import trains_parts

# flag of a feature -> why not
_REASONS = {
    "share_base": "models that share frozen weights cannot each train a part of them",
    "only_optimize_lora": (
        "it trains and saves adapters alone, and the reference would be the actor without its"
        " adapter, but with its trained tower"
    ),
    "ref_sync_interval": "the reference has the tower of before training, which would stay",
    "unsupervised_dataset_name": "its texts have no images, and would pass without the tower",
}


def refuse(config: StepConfig) -> None:
    """Refuse flags with which parts beside the decoder cannot train."""
    if not trains_parts(config):
        return
    asked = "--train_projector"
    if config.value("train_vision_tower"):
        asked = "--train_vision_tower"
    reasons = {name: reason for name, reason in _REASONS.items() if config.value(name)}
    if isinstance(config, PPOConfig) and config.ppo.unpin_actor_parameters:
        reasons["unpin_actor_parameters"] = (
            "ranks that generate together, one layer at a time, have different numbers of images"
        )
    for name, reason in reasons.items():
        raise UserError(f"{asked} does not go with --{name}: {reason}; omit one of the two")
