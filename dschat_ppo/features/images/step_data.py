"""What a step reads of the data for a model that sees images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dschat_ppo.common.extras import require_extra
from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.data.content_marks import mark_of
from dschat_ppo.data.templates import render
from dschat_ppo.errors import UserError, reading
from dschat_ppo.features.images.flags import ImageFlags
from dschat_ppo.features.images.tower import (
    FAMILIES,
    reason_not_supported,
    trains_with_images,
)
from dschat_ppo.models.loading import load_config
from dschat_ppo.models.model_folders import base_folder

_MODEL = "--model_name_or_path"
_MODEL_OF_TOOL = "--model"
_PROBE = "PROBE7f3a"


def model_flag(config: HasFeatures) -> str:
    """The flag of the model whose tokens the data become: that which trains, in step 3 the actor,
    in tools the one that answers."""
    if not isinstance(config, StepConfig):
        return _MODEL_OF_TOOL
    if "actor" in config.models:
        flag, _ = config.models["actor"]
        return flag
    return _MODEL


def read_by_model(
    config: HasFeatures, data: StepData, folder: str, tokenizer: PreTrainedTokenizerBase
) -> StepData:
    """`data` with images, if the model in `folder` sees them. Prompts are then chat messages, also
    those of text alone, unless --apply_chat_template says otherwise."""
    model = model_flag(config)
    model_config = load_config(folder, model)
    if not trains_with_images(config, model_config):
        refuse_flags_of_images(config, model_config, f"{model} {folder}")
        return data
    require_extras(model_config, f"{model} {folder}")
    content = images_of_rows(config, data, model_config, folder, tokenizer)
    require_place_for_images(tokenizer, content.processor.placeholder)
    data_flags = data.flags
    if data_flags.apply_chat_template is None:
        logger().info("data: the model sees images, so prompts that are text become chat messages")
        data_flags = replace(data_flags, apply_chat_template=True)
    return replace(data, flags=data_flags, content=content)


def require_extras(model_config: PretrainedConfig, model: str) -> None:
    """Require what reading images for a `model`, its flag and folder, needs."""
    require_extra("PIL", f"{model} sees images, and")
    if model_config.model_type == "smolvlm":
        require_extra("num2words", f"{model}: SmolVLM's processor")


def refuse_flags_of_images(config: HasFeatures, model_config: PretrainedConfig, model: str) -> None:
    """Refuse flags of images for a `model`, its flag and folder, that is used for text."""
    flags = config.of(ImageFlags)
    name = type(model_config).__name__
    way_out = f"{name} sees no images; omit it, or take another model"
    if model_config.model_type in FAMILIES:
        way_out = "add --with_images True"
        logger().info(
            f"data: {name} sees images too, but reads text here; --with_images True gives it both"
        )
    asked: dict[str, Any] = {"--image_column": flags.image_column}
    for flag_of_images in ("with_images", "train_vision_tower", "train_projector"):
        asked[f"--{flag_of_images}"] = config.value(flag_of_images) or None
    for flag, value in asked.items():
        if value is not None:
            reason = reason_not_supported(model_config) or way_out
            raise UserError(f"{flag} {value}: {model}: {reason}")


def images_of_rows(
    config: HasFeatures,
    data: StepData,
    model_config: PretrainedConfig,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
) -> Any:
    """The `RowImages` of a run."""
    # not at the top: runs without images do not wait for these
    import datasets

    from dschat_ppo.features.images.content import RowImages
    from dschat_ppo.features.images.references import ImagePlaces

    flags = config.of(ImageFlags)
    cache = data.flags.data_output_path or datasets.config.HF_DATASETS_CACHE
    store = Path(cache).expanduser() / "dschat_ppo" / "image_files"
    places = ImagePlaces(flags.image_column, data.flags.ignore_columns, ".", str(store))
    processor = processor_of(config, model_config, folder, tokenizer)
    return RowImages(processor, places, flags.image_max_source_pixels, flags.image_folder)


def processor_of(
    config: HasFeatures,
    model_config: PretrainedConfig,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    flag: str | None = None,
) -> Any:
    """The processor of the model in `folder`, with the settings of the flags. `flag`: that names
    the model, for messages; None: that of the model whose tokens the data become."""
    from dschat_ppo.features.images.processors import load_processor

    flags = config.of(ImageFlags)
    flag = flag or model_flag(config)
    base = base_folder(folder, flag)
    return load_processor(
        model_config, flag, base, tokenizer, flags.options, flags.image_max_pixels
    )


def require_place_for_images(tokenizer: PreTrainedTokenizerBase, placeholder: str) -> None:
    """Require that the chat template writes one placeholder for an image, and the text beside
    it."""
    message = {"role": "user", "content": mark_of(0) + _PROBE}
    with reading("the chat template has no place for an image"):
        text = render(tokenizer, [message], open_answer=True)
    if text.count(placeholder) != 1 or _PROBE not in text:
        raise UserError(
            f"the chat template does not write {placeholder!r} once for an image; give that of the"
            " model (--chat_template)"
        )
