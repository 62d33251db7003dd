"""The flags of images that the command after a run needs."""

from __future__ import annotations

from dataclasses import fields

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.images.flags import ImageFlags

_OF_DATA = ("image_column", "image_folder")  # a chat has no data


def words_of(config: StepConfig, command: str) -> list[str]:
    """The flags of the run that are not at their defaults, for a step or "chat"."""
    flags = config.of(ImageFlags)
    words = list[str]()
    for field in fields(ImageFlags):
        value = getattr(flags, field.name)
        if command == "chat" and field.name in _OF_DATA:
            continue
        if isinstance(value, list):
            if value:
                words += [f"--{field.name}", *value]
        elif value != field.default:
            words.append(f"--{field.name}={value}")
    return words
