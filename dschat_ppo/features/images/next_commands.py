"""The flags of images that the command after a run needs."""

from __future__ import annotations

from dschat_ppo.config.schema import changed_words
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.images.flags import ImageFlags

_OF_TRAINING = ("train_vision_tower", "train_projector")
_OF_DATA = ("image_column", "image_folder")  # a chat has no data


def words_of(config: StepConfig, command: str) -> list[str]:
    """The flags of the run that are not at their defaults, for a step or "chat"."""
    omitted = list(_OF_TRAINING)
    if command == "chat":
        omitted += _OF_DATA
    return changed_words(config.of(ImageFlags), omitted)
