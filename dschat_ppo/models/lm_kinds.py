"""Kinds of language models beside those that transformers has as causal ones, which features let a
run train: models with parts beside their decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.features import hooks

_TAKEN_OUT = "_parameters_taken_out"  # an attribute of models


@dataclass(frozen=True)
class LMKind:
    """A kind of language models.

    Attributes:
        matches: Whether a model of a configuration is of this kind.
        auto_class: The auto class of transformers that builds it.
        take_apart: Leaves nothing in a model but its decoder and head, which may be a scalar one,
            and what trains beside them.
    """

    matches: Callable[[PretrainedConfig], bool]
    auto_class: Any
    take_apart: Callable[[PreTrainedModel], None]

    def build(self, config: PretrainedConfig, **settings: Any) -> PreTrainedModel:
        """What `take_apart` leaves of a model, without the weights of a folder. `settings`: of
        `from_config` of transformers."""
        model: PreTrainedModel = self.auto_class.from_config(config, **settings)
        self.take_apart(model)
        return model


def parts_beside_decoder(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The parts of a model beside its decoder and head, by their names in the model without its
    head: a vision tower, a projector. Language models have none."""
    inner: Any = model.base_model
    decoder = inner.get_decoder()
    if decoder is inner:
        return {}
    return {name: child for name, child in inner.named_children() if child is not decoder}


def take_out_parts(model: PreTrainedModel) -> None:
    """Take the parts beside its decoder and head out of a model, which remembers their size."""
    count = 0
    for name, module in parts_beside_decoder(model).items():
        for weight in module.parameters():
            count += getattr(weight, "ds_numel", weight.numel())
        setattr(model.base_model, name, None)
    setattr(model.base_model, _TAKEN_OUT, count)  # which classifiers over it have too


def parameters_taken_out(model: nn.Module) -> int:
    """Of the parts that `take_out_parts` took out of a model, or of one inside it."""
    return sum(getattr(module, _TAKEN_OUT, 0) for module in model.modules())


def leave_whole(model: PreTrainedModel) -> None:
    """A causal language model is its decoder and head."""


CAUSAL = LMKind(lambda config: True, AutoModelForCausalLM, leave_whole)


def further_kinds(features: HasFeatures, trains: bool = False) -> tuple[LMKind, ...]:
    """The kinds of language models that a run or a tool with these flags takes, beside causal ones,
    for a model that `trains` or for another. A feature offers its own as
    `lm_kinds.kinds_of(features, trains)`."""
    kinds = list[LMKind]()
    for kinds_of in hooks("lm_kinds.kinds_of"):
        kinds += kinds_of(features, trains)
    return tuple(kinds)


def kind_of_lm(config: PretrainedConfig, kinds: Sequence[LMKind]) -> LMKind:
    """The first of these kinds that matches, or else that of causal language models."""
    return next((kind for kind in kinds if kind.matches(config)), CAUSAL)


def built_without_weights(config: PretrainedConfig, kinds: Sequence[LMKind]) -> Any:
    """The decoder and the head of a language model, on the meta device."""
    with torch.device("meta"):
        return kind_of_lm(config, kinds).build(config)
