"""The actor's switch between training and generation: the only place that gathers ZeRO-3 weights as a whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from transformers import PreTrainedModel

from dschat_ppo.models.policy import PolicyModel

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class HybridEngine:
    """Wraps a DeepSpeed training engine; `generating()` lends its model for inference.

    Inside the context the model is an ordinary `PreTrainedModel` in eval mode: whole weights on every rank, no
    DeepSpeed hooks, no activation checkpointing, no gradients. Generating then needs no collective, so ranks may
    finish at different times. Leaving it restores training exactly: the same hook objects, the same partitions (the
    gathered copies are dropped, not written back), the same mode.
    """

    def __init__(self, engine: Any):
        self.engine = engine

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped model, as training sees it."""
        module = self.engine.module
        return module.lm if isinstance(module, PolicyModel) else module

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """Enter generation; collective on entry and exit only."""
        model = self.model
        was_training = model.training
        with self._gathered(), _without_hooks(model), _without_checkpointing(model), torch.no_grad():
            model.eval()
            try:
                yield model
            finally:
                model.train(was_training)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Gather what is partitioned, once; what is already whole (small, persistent tensors) is left alone."""
        parameters: list[Any] = list(self.model.parameters())
        partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
        missing = [parameter for parameter in partitioned if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        with deepspeed.zero.GatheredParameters(missing, enabled=bool(missing)):
            yield


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Take every module's hooks away and put the very same dictionaries back."""
    kept = [(module, {name: getattr(module, name) for name in _HOOKS}) for module in model.modules()]
    for module, _ in kept:
        for name in _HOOKS:
            setattr(module, name, OrderedDict())
    try:
        yield
    finally:
        for module, hooks in kept:
            for name, value in hooks.items():
                setattr(module, name, value)


@contextmanager
def _without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Activation checkpointing forbids a key-value cache, so it is off while generating."""
    checkpointing: list[Any] = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in checkpointing:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in checkpointing:
            module.gradient_checkpointing = True
