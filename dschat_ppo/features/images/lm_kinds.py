"""Models of images and text as language models that a run trains."""

from __future__ import annotations

from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForImageTextToText,
    PretrainedConfig,
)

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.images.tower import FAMILIES, sees_images, take_out_tower
from dschat_ppo.models.lm_kinds import LMKind

OF_IMAGES = LMKind(sees_images, AutoModelForImageTextToText, take_out_tower)


def kinds_of(config: StepConfig) -> tuple[LMKind, ...]:
    """The kind of these models, in all steps."""
    return (OF_IMAGES,)


def reason_unusable(config: PretrainedConfig) -> str | None:
    """Why a model that sees images cannot be used where no kind of language models matches it; None
    for other models."""
    name = type(config).__name__
    if sees_images(config):
        return (
            f"{name} sees images: the steps train such models, but the tools that generate or score"
            " take models of text"
        )
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        families = ", ".join(FAMILIES)
        return f"{name} sees images in a way that is not supported; supported are {families}"
    return None
