"""Flags and models that do not go with images, before weights are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.config.supervised_config import PreferenceConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.images.columns import IMAGES
from dschat_ppo.features.images.flags import trains_parts
from dschat_ppo.features.images.step_data import processor_of
from dschat_ppo.features.images.tower import sees_images, trains_with_images
from dschat_ppo.models.loading import load_config
from dschat_ppo.models.tokenizers import read_tokenizer
from dschat_ppo.rewards.reward_source import is_routed_to
from dschat_ppo.run.run_models import PromptReader

_WAYS_OUT = {
    "reward": (
        "train one that sees them (step 2), let other sources alone score these prompts"
        " (--reward_function), or route it to prompts without images (--reward_model_sources)"
    ),
    "critic": (
        "give one that sees them (--critic_model_name_or_path), or an estimator without a critic"
        " (--advantage_estimator grpo)"
    ),
    "reference": "omit the flag, so that the reference is the actor before training",
}
_WAY_OUT_OF_OTHERS = (
    "give one that sees them; in step 3 it may also be for data sources without images alone"
    " (SOURCE=)"
)
# fields of configurations that say how many tokens an image is, and their id
_OF_TOKENS = (
    "image_token_id",
    "patch_size",
    "scale_factor",
    "spatial_merge_size",
    "downsample_ratio",
    "downsample_factor",
    "mm_tokens_per_image",
    "image_seq_length",
    "vision_feature_select_strategy",
)
_USES = ("preference", "unpaired")  # what step 2 reads beside images: pairs and labelled answers
# flags with which prompts come about, or are generated for, in ways that have no images
_WITHOUT_IMAGES = (
    "agent",
    "agent_command",
    "exact_rollout",
    "teacher_prompt_column",
)


def check_trained_model(config: StepConfig, model_config: PretrainedConfig, model: str) -> None:
    """Refuse what cannot be used with a model that sees images."""
    if not trains_with_images(config, model_config):
        return
    reasons = {
        "--streaming": bool(config.value("streaming")),
        "--sequence_parallel_size": config.ranks_of_row > 1,
        "quantised weights (--load_in_4bit, --load_in_8bit)": config.frozen_bits > 0,
        "--resize_vocabulary": config.run.resize_vocabulary,
    }
    for name in _WITHOUT_IMAGES:
        reasons[f"--{name}"] = bool(config.value(name))
    tensor_parallel_size = config.value("inference_tp_size") or 1
    reasons["--inference_tp_size"] = tensor_parallel_size > 1
    if isinstance(config, PreferenceConfig):
        use = config.reward.objective_kind.use
        reasons[f"--objective {config.reward.objective}"] = use not in _USES
    # images of several rows have different sizes, and could not run in one call of the tower
    reasons["--train_vision_tower or --train_projector"] = (
        trains_parts(config) and model_config.model_type == "lfm2_vl"
    )
    _refuse_used(reasons, model_config, model)


def check_answering_model(
    features: HasFeatures, model_config: PretrainedConfig, model: str
) -> None:
    """Refuse what cannot be used with a model that sees images and answers in a tool."""
    if not trains_with_images(features, model_config):
        return
    reasons = {f"--{name}": bool(features.value(name)) for name in _WITHOUT_IMAGES}
    _refuse_used(reasons, model_config, model)


def check_served_model(model_config: PretrainedConfig, folder: str) -> None:
    """Refuse a reward model that sees images, since requests to a server are texts."""
    if sees_images(model_config):
        raise UserError(
            f"--model {folder}: {type(model_config).__name__} sees images, but requests to this"
            " server are texts; let the run itself load it (--reward_model_name_or_path)"
        )


def _refuse_used(reasons: Mapping[str, bool], model_config: PretrainedConfig, model: str) -> None:
    """Refuse a `model` if something is used with which its images do not go."""
    for name, is_used in reasons.items():
        if is_used:
            raise UserError(
                f"{model}: {type(model_config).__name__} sees images, which do not go with {name}"
                " yet; omit it"
            )


def check_readers(
    features: HasFeatures,
    folder: str,
    readers: Sequence[PromptReader],
    prompts: Sequence[Dataset],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Refuse models that would read prompts with images, and do not see these, or see them by other
    tokens than the model in `folder`. Arguments as `run.run_models.check_prompt_readers`."""
    if not readers or not any(_have_images(rows, ()) for rows in prompts):
        return
    first_config = load_config(folder, "model")
    of_first = processor_of(features, first_config, folder, tokenizer)
    for reader in readers:
        if not any(_have_images(rows, reader.sources) for rows in prompts):
            continue
        model = f"{reader.flag} {reader.folder}"
        model_config = load_config(reader.folder, reader.flag)
        if not trains_with_images(features, model_config):
            way_out = _WAYS_OUT.get(reader.role, _WAY_OUT_OF_OTHERS)
            raise UserError(
                f"{model}: {type(model_config).__name__} reads text alone, but prompts have images;"
                f" {way_out}"
            )
        if read_tokenizer(reader.folder, reader.flag).get_vocab() != tokenizer.get_vocab():
            raise UserError(
                f"{model}: its tokenizer differs from that of the model in {folder}, which does not"
                " go with prompts with images yet; train it from the same family"
            )
        of_reader = processor_of(features, model_config, reader.folder, tokenizer, reader.flag)
        if of_reader.identity != of_first.identity:
            other_settings = of_reader.settings_unlike(of_first)
            raise UserError(
                f"{model}: its processor of images has other settings than that in {folder}"
                f" ({'; '.join(other_settings)}), so images would be other tokens; give the same to"
                " both (--image_options)"
            )
        _require_same_tokens(model, model_config, folder, first_config)


def _require_same_tokens(
    model: str, model_config: PretrainedConfig, folder: str, first_config: PretrainedConfig
) -> None:
    """Refuse a `model` whose tower gives an image another number of tokens than that of the model
    in `folder`, or which knows these tokens by another id."""
    fields = _fields(model_config)
    first_fields = _fields(first_config)
    for name in _OF_TOKENS:
        if fields.get(name) != first_fields.get(name):
            raise UserError(
                f"{model}: {name} is {fields.get(name)} in its config.json, and"
                f" {first_fields.get(name)} in that of {folder}, so it does not see an image by the"
                " same tokens; take a model of the same family"
            )


def _fields(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a configuration, and those of its vision tower."""
    fields = config.to_dict()
    return {**(fields.get("vision_config") or {}), **fields}


def _have_images(rows: Dataset, sources: Sequence[str]) -> bool:
    """Whether prompts of these data sources, of all with (), have images."""
    if IMAGES not in rows.column_names:
        return False
    if not sources:
        return any(rows[IMAGES])
    for images, row in zip(rows[IMAGES], rows["row"], strict=True):
        if images and is_routed_to(sources, json.loads(row)):
            return True
    return False
