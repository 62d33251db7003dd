"""The class of reward models and critics: transformers' classifier, or the backbone with a head made here."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.architectures import SCORE, check_architecture
from dschat_ppo.models.backbone import backbone_of

# A step asks for each model when it checks and when it loads it, and each answer takes a model without weights. Keys:
# class, configuration as JSON.
_HAS_SCORE: dict[tuple[Any, str], bool] = {}
_HEAD_NAMES: dict[tuple[Any, str], Set[str]] = {}


def check_classifier_config(config: PretrainedConfig, folder: str) -> None:
    """Check from the configuration alone that a model can be a reward model or a critic. The scalar head reads the
    state of every token, so the model must be causal. A classifier must have one label and a head named `score`. Other
    models get a new head, or must have the layout of DeepSpeed-Chat."""
    check_architecture(config, folder, needs_lm=False)
    if not any(str(name).endswith("ForSequenceClassification") for name in config.architectures or []):
        return
    if config.num_labels != 1:
        raise UserError(f"{folder}: the classifier has {config.num_labels} labels; a reward model or critic has one")
    with reading(f"{folder}: no reward model can be built from its config.json"):
        known = _transformers_classifier(config)
        usable = known is None or _has_score(known, config)
    if known is not None and not usable:
        raise UserError(
            f"{folder}: {known.__name__} has no head named '{SCORE}' that scores every token; take the one-label "
            "classifier of a decoder, such as LlamaForSequenceClassification, or train a reward model (step 2)"
        )


def classifier_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class with one scalar head, named `score`, over the states of a causal model.

    If transformers has such a class it is used, so that plain transformers loads the saved model. Else it is
    `<Architecture>WithScalarHead`, which only this project loads: the base class and backbone of the language model,
    and a linear head without bias. A setting of `config` may keep transformers from building: almost any exception.
    """
    known = _transformers_classifier(config)
    if known is not None and _has_score(known, config):
        return known
    lm = lm_without_weights(config)
    lm_class, name = type(lm), _backbone_name(lm)
    base: Any = [c for c in lm_class.__mro__ if issubclass(c, PreTrainedModel) and c is not PreTrainedModel][-1]

    def init(self: Any, config: PretrainedConfig) -> None:
        base.__init__(self, config)
        setattr(self, name, backbone_of(lm_class(config)))  # as the language model builds it, without a pooler
        self.score = nn.Linear(config.get_text_config().hidden_size, 1, bias=False)
        self.post_init()

    stem = lm_class.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    members = {
        "__init__": init, "base_model_prefix": name, "config_class": lm_class.config_class,
        "__module__": lm_class.__module__,  # transformers reads its source to find which kernels can be replaced
    }  # fmt: skip
    return type(f"{stem}WithScalarHead", (base,), members)


def config_for(kind: Any, config: PretrainedConfig) -> PretrainedConfig:
    """`config` with one label; its text part for a class of text models, as in transformers' auto classes."""
    is_text = kind.config_class is config.sub_configs.get("text_config")
    config = config.get_text_config() if is_text else config
    config.num_labels = 1
    return config


def lm_head_names(config: PretrainedConfig) -> Set[str]:
    """Names of the weights of the causal language model outside its backbone."""
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return frozenset()
    key = (type(config), config.to_json_string(use_diff=False))
    if key not in _HEAD_NAMES:
        lm = lm_without_weights(config)
        backbone = f"{_backbone_name(lm)}."
        _HEAD_NAMES[key] = frozenset(name for name in lm.state_dict() if not name.startswith(backbone))
    return _HEAD_NAMES[key]


def _transformers_classifier(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    known: Any = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    return known


def _has_score(kind: Any, config: PretrainedConfig) -> bool:
    config = config_for(kind, config)
    key = (kind, config.to_json_string(use_diff=False))
    if key not in _HAS_SCORE:
        with torch.device("meta"):
            _HAS_SCORE[key] = hasattr(kind(config), SCORE)
    return _HAS_SCORE[key]


def lm_without_weights(config: PretrainedConfig) -> Any:
    """The causal language model of a configuration, on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _backbone_name(lm: PreTrainedModel) -> str:
    backbone = backbone_of(lm)
    return next(name for name, module in lm.named_children() if module is backbone)
