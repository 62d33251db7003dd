"""Models of images and text as language models that a run trains."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from transformers import AutoModelForImageTextToText, PretrainedConfig

from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.features.images.flags import trains_parts
from dschat_ppo.features.images.tower import reason_not_supported, sees_images
from dschat_ppo.features.images.trained_tower import keep_parts
from dschat_ppo.models.lm_kinds import LMKind, take_out_parts

OF_IMAGES = LMKind(sees_images, AutoModelForImageTextToText, take_out_parts)
# with those that are language models of text too
OF_IMAGES_OR_TEXT = LMKind(
    partial(sees_images, is_asked=True), AutoModelForImageTextToText, take_out_parts
)


def kinds_of(config: HasFeatures, trains: bool) -> tuple[LMKind, ...]:
    """The kind of these models; of one that `trains`, with the parts that the flags let train."""
    kind = OF_IMAGES
    if config.value("with_images"):
        kind = OF_IMAGES_OR_TEXT
    if trains and trains_parts(config):
        kind = _kind_that_trains(
            kind, config.value("train_vision_tower"), config.value("train_projector")
        )
    return (kind,)


@cache
def _kind_that_trains(kind: LMKind, trains_tower: bool, trains_projector: bool) -> LMKind:
    """The kind of these models with their tower and projector in them."""
    keep = partial(keep_parts, trains_tower=trains_tower, trains_projector=trains_projector)
    return replace(kind, take_apart=keep)


def reason_unusable(config: PretrainedConfig) -> str | None:
    """Why a model that sees images cannot be used where no kind of language models matches it; None
    for other models."""
    name = type(config).__name__
    if sees_images(config):
        return f"{name} sees images, but a model of text is needed here; take another model"
    return reason_not_supported(config)
