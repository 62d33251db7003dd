"""The class of reward models and critics of an architecture: that of transformers, or one with this project's head."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dschat_ppo.models.backbone import backbone_of

HEAD = "score"


def classifier_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class with one scalar head, named `score`, over the states of a causal model.

    Where transformers has such a class it is taken, so that plain transformers loads what is saved. Else it is
    `<Architecture>WithScalarHead`, which this project alone loads: the language model's backbone under its own name,
    and a linear head without bias.

    Args:
        config: of an architecture that `check_architecture` lets pass.

    Raises:
        Exception: almost any, where a setting of `config` or the lack of a package keeps transformers from building.
    """
    known: Any = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if known is not None:
        with torch.device("meta"):
            if hasattr(known(config_for(known, config)), HEAD):
                return known
    return _with_scalar_head(config)


def config_for(kind: Any, config: PretrainedConfig) -> PretrainedConfig:
    """`config` with one label; its text part for a class of text models, as in transformers' auto classes."""
    is_text = kind.config_class is config.sub_configs.get("text_config")
    config = config.get_text_config() if is_text else config
    config.num_labels = 1
    return config


def lm_names(config: PretrainedConfig) -> set[str]:
    """Names of the weights of the causal language model that are not its backbone's: its head's."""
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return set()
    lm = _lm_without_weights(config)
    backbone = f"{_backbone_name(lm)}."
    return {name for name in lm.state_dict() if not name.startswith(backbone)}


def _lm_without_weights(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _backbone_name(lm: PreTrainedModel) -> str:
    backbone = backbone_of(lm)
    return next(name for name, module in lm.named_children() if module is backbone)


def _with_scalar_head(config: PretrainedConfig) -> type[PreTrainedModel]:
    """A class made as transformers makes its own: the architecture's base class, a backbone and `score`."""
    lm = _lm_without_weights(config)
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
        "__module__": lm_class.__module__,  # in its source transformers looks up which kernels can be exchanged
    }  # fmt: skip
    return type(f"{stem}WithScalarHead", (base,), members)
