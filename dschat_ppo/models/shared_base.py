"""Several models over one frozen base: module trees with the same parameters, and with separate adapters and heads.

Each model has its own modules, so hooks, adapters, training mode and checkpointing of one do not affect another.
Only the tensors of the base are shared.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dschat_ppo.errors import UserError
from dschat_ppo.models.adapters import AdapterSettings, adapter_layers, add_adapter, is_adapter_parameter, saved_config
from dschat_ppo.models.architectures import SCORE
from dschat_ppo.models.backbone import backbone_of
from dschat_ppo.models.classifiers import classifier_class, config_for
from dschat_ppo.models.model_folders import is_adapter_folder


def model_over_base(model: PreTrainedModel, copies_adapter: bool = False) -> PreTrainedModel:
    """A second model whose base parameters and buffers are those of `model`, which has no hooks, thus no engine, yet.
    `copies_adapter`: with copies of the adapters as they are now; else it has none."""
    shared = {id(weight): weight for name, weight in model.named_parameters() if not is_adapter_parameter(name)}
    tree = copy.deepcopy(model, {**shared, **{id(buffer): buffer for buffer in model.buffers()}})
    if not copies_adapter:
        for path, layer in adapter_layers(tree).items():
            parent, _, name = path.rpartition(".")
            setattr(tree.get_submodule(parent), name, layer.get_base_layer())
        if hasattr(tree, "peft_config"):
            del tree.peft_config
    return tree


def classifier_over_base(base: PreTrainedModel, folder: str, adapter: AdapterSettings | None = None) -> PreTrainedModel:
    """A one-label classifier whose backbone has the parameters of a causal language model without adapters and hooks.

    `folder`: adapter folder over this base, whose adapter and head the classifier gets; or the base's own folder: then
    both are new. `adapter`: of the classifier; None: as in `folder`. Where transformers' classifier has another
    backbone than its language model, this is a `UserError`.
    """
    tree = model_over_base(base)
    backbone = backbone_of(tree)
    config = config_for(classifier_class(tree.config), tree.config)
    kind: Any = classifier_class(config)
    with torch.device("meta"):
        classifier = kind(config)
    name = classifier.base_model_prefix
    if type(getattr(classifier, name)) is not type(backbone):
        raise UserError(f"--share_base: {kind.__name__} has another backbone than {type(base).__name__}; omit the flag")
    setattr(classifier, name, backbone)
    text = config.get_text_config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())  # the same head on every rank, whatever was drawn before
        head = nn.Linear(text.hidden_size, 1, bias=False, dtype=base.dtype)
        nn.init.normal_(head.weight, std=getattr(text, "initializer_range", 0.02))
    setattr(classifier, SCORE, head)
    add_adapter(classifier, adapter or settings_of(folder), folder=folder if is_adapter_folder(folder) else None)
    return classifier


def settings_of(folder: str) -> AdapterSettings:
    """The settings of the adapter in a folder, as it is."""
    config = saved_config(folder)
    return AdapterSettings(config.r, config.lora_alpha, 0.0, None, config.use_rslora, config.use_dora, freeze_base=True)
