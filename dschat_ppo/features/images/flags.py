"""Flags of prompts with images."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dschat_ppo.config.feature_flags import FlagNotes, HasFeatures
from dschat_ppo.config.schema import check_values, flag, not_negative, positive, require


def parse_options(words: list[str]) -> dict[str, Any]:
    """`--image_options`: NAME=VALUE, with values in JSON; a value that is none is text."""
    options = dict[str, Any]()
    for word in words:
        name, equals, text = word.partition("=")
        require(
            bool(name and equals),
            f"--image_options {word}: give NAME=VALUE, such as do_image_splitting=false",
        )
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options


@dataclass(frozen=True)
class ImageFlags:
    """Images in prompts, for models that see them."""

    image_column: str | None = flag(
        None,
        "column of the images of a row, a path or a list of paths; not given: `image` or `images`",
    )
    with_images: bool = flag(
        False,
        "use a model that is a language model of text too, such as Qwen3.5, with the images of"
        " the rows; the other models that see images always do",
    )
    image_folder: str | None = flag(
        None,
        "folder to which paths of images are relative, and which they may not leave; not given:"
        " that of the data file",
    )
    image_options: list[str] = flag(
        [],
        "settings of the model's processor of images, NAME=VALUE with values in JSON, such as"
        " do_image_splitting=false; they are saved with the model",
        check=parse_options,
    )
    image_max_pixels: int | None = positive(
        None,
        "most pixels that a model of Qwen's families sees of an image; larger ones are made"
        " smaller. Not given: 1048576, or what the model's own settings say if that is less",
    )
    image_max_source_pixels: int = positive(
        64_000_000, "most pixels of an image file; a row with a larger one is a bad row"
    )
    image_cache_gb: float = not_negative(
        2.0,
        "memory of each rank for what the vision tower made of images, in GB; images that do not"
        " fit are run again in each epoch. If the tower or the projector trains, for their pixels",
    )

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def options(self) -> dict[str, Any]:
        """`--image_options` as a dict."""
        return parse_options(self.image_options)


@dataclass(frozen=True)
class TrainedImageFlags(ImageFlags):
    """The same in a step, which may train the parts that see images."""

    train_vision_tower: bool = flag(
        False,
        "train the vision tower too. Each model that trains then has its own, which runs in its"
        " forward passes",
    )
    train_projector: bool = flag(
        False,
        "train the projector between the vision tower and the decoder too; without"
        " --train_vision_tower, the tower stays frozen",
    )


def trains_parts(features: HasFeatures) -> bool:
    """Whether a part beside the decoder trains."""
    return bool(features.value("train_vision_tower") or features.value("train_projector"))


FLAGS = {
    **dict.fromkeys(("sft", "reward", "ppo"), TrainedImageFlags),
    **dict.fromkeys(("evaluate", "chat"), ImageFlags),
}
NOTES = FlagNotes(
    their_names={"image_column": "image_key", "image_folder": "media_dir"},
    harmless=("image_cache_gb",),
    not_on_cards=("image_cache_gb", "image_folder"),
    without_effect={
        "chat": dict.fromkeys(
            ("image_column", "image_folder"),
            "has no effect here, where /image PATH adds a picture; omit it",
        )
    },
)
