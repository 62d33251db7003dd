"""Models over one frozen base: module trees with the same parameters, each with its own adapter
and head.

Hooks, training mode and checkpointing of one do not affect another; only the tensors of the base
are shared.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat_ppo.errors import UserError
from dschat_ppo.models.adapters.layers import (
    adapter_layers,
    add_adapter,
    is_adapter_parameter,
    saved_config,
)
from dschat_ppo.models.adapters.settings import AdapterSettings
from dschat_ppo.models.architectures import backbone_of, classifier_class, config_for
from dschat_ppo.models.lm_kinds import LMKind
from dschat_ppo.models.model_folders import SCORE, is_adapter_folder


def model_over_base(model: PreTrainedModel, copies_adapter: bool = False) -> PreTrainedModel:
    """A second model whose base parameters and buffers are those of `model`.

    Args:
        model: it has no hooks, thus no engine, yet.
        copies_adapter: the second model gets copies of the adapters as they are now; else it has
            none.
    """
    shared_tensors: dict[int, Tensor] = {
        id(weight): weight
        for name, weight in model.named_parameters()
        if not is_adapter_parameter(name)
    }
    shared_tensors |= {id(buffer): buffer for buffer in model.buffers()}
    tree = copy.deepcopy(model, shared_tensors)
    if copies_adapter:
        return tree
    for path, layer in adapter_layers(tree).items():
        parent, _, name = path.rpartition(".")
        setattr(tree.get_submodule(parent), name, layer.get_base_layer())
    if hasattr(tree, "peft_config"):
        del tree.peft_config
    return tree


def classifier_over_base(
    base: PreTrainedModel,
    folder: str,
    adapter: AdapterSettings | None = None,
    kinds: Sequence[LMKind] = (),
) -> PreTrainedModel:
    """A one-label classifier over the backbone parameters of `base`, which are shared, not copied,
    and frozen. Its adapter and its head are its own.

    Args:
        base: a causal language model without hooks, thus without an engine; its adapters are left
            out.
        folder: of an adapter: its adapter and head are loaded. Of a model: the adapter is new, and
            the head is zero.
        adapter: settings of the adapter, with `freeze_base`; None: as in `folder`, which must then
            be an adapter's, and for a model that does not train.
        kinds: of language models that the run takes, beside causal ones.

    Raises:
        UserError: transformers' classifier has another backbone than its language model.
    """
    tree = model_over_base(base)
    backbone = backbone_of(tree)
    config = config_for(classifier_class(tree.config, kinds), tree.config)
    classifier_type: Any = classifier_class(config, kinds)
    with torch.device("meta"):
        classifier = classifier_type(config)
    backbone_name = classifier.base_model_prefix
    if type(getattr(classifier, backbone_name)) is not type(backbone):
        raise UserError(
            f"--share_base: {classifier_type.__name__} has another backbone than"
            f" {type(base).__name__}; omit the flag"
        )
    setattr(classifier, backbone_name, backbone)
    hidden_size = config.get_text_config().hidden_size
    head = nn.utils.skip_init(nn.Linear, hidden_size, 1, bias=False, dtype=base.dtype)
    nn.init.zeros_(head.weight)
    setattr(classifier, SCORE, head)
    adapter_folder = None
    if is_adapter_folder(folder):
        adapter_folder = folder
    # loads the head in `adapter_folder` as well
    add_adapter(classifier, adapter or _settings_of(folder), folder=adapter_folder)
    return classifier


def _settings_of(folder: str) -> AdapterSettings:
    """The settings of the adapter in a folder, as it is."""
    config = saved_config(folder)
    return AdapterSettings(
        config.r, config.lora_alpha, 0.0, None, config.use_rslora, config.use_dora, freeze_base=True
    )
