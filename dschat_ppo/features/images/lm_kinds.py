"""Models of images and text as language models that a run trains."""

from __future__ import annotations

from functools import partial

from transformers import AutoModelForImageTextToText, PretrainedConfig

from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.features.images.tower import reason_not_supported, sees_images, take_out_tower
from dschat_ppo.models.lm_kinds import LMKind

OF_IMAGES = LMKind(sees_images, AutoModelForImageTextToText, take_out_tower)
# with those that are language models of text too
OF_IMAGES_OR_TEXT = LMKind(
    partial(sees_images, is_asked=True), AutoModelForImageTextToText, take_out_tower
)


def kinds_of(config: HasFeatures) -> tuple[LMKind, ...]:
    """The kind of these models."""
    if config.value("with_images"):
        return (OF_IMAGES_OR_TEXT,)
    return (OF_IMAGES,)


def reason_unusable(config: PretrainedConfig) -> str | None:
    """Why a model that sees images cannot be used where no kind of language models matches it; None
    for other models."""
    name = type(config).__name__
    if sees_images(config):
        return f"{name} sees images, but a model of text is needed here; take another model"
    return reason_not_supported(config)
