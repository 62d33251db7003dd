"""The actor's switch between training and generation: the only place that gathers ZeRO-3 weights as a whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from transformers import PreTrainedModel

from dschat_ppo.common import dist
from dschat_ppo.models.policy_model import PolicyModel

Merge = Callable[[PreTrainedModel], AbstractContextManager[Any]]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class HybridEngine:
    """Wraps a DeepSpeed training engine; `generating()` lends its model for inference.

    Inside the context the model is an ordinary `PreTrainedModel` in eval mode: whole weights on every rank, no
    DeepSpeed hooks, no activation checkpointing, no gradients. Generating then needs no collective, so ranks may
    finish at different times. Leaving it restores training exactly: the same hook objects, the same partitions (the
    gathered copies are dropped, not written back), the same mode.

    Args:
        engine: the actor's DeepSpeed engine.
        pinned: gather ZeRO-3 weights once for the whole context. False: they stay partitioned and DeepSpeed's hooks
            gather each layer when it runs, which saves their memory and costs a collective a layer; every rank must
            then make the same forward passes, which `agree` is for.
        merge: entered while weights are whole, to fold adapters into them and to take them out again.
            Not with `pinned` False.
        sleeping: ZeRO-3 training engines whose optimizer states and fp32 weights go to host memory meanwhile.
    """

    def __init__(self, engine: Any, pinned: bool = True, merge: Merge = nullcontext, sleeping: Sequence[Any] = ()):
        self.engine = engine
        self._merge = merge
        self._sleeping = sleeping
        self._collective = not pinned and any(hasattr(parameter, "ds_id") for parameter in self.model.parameters())
        if self._collective and merge is not nullcontext:
            raise ValueError("adapters cannot be merged into weights that are gathered layer by layer")

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped model, as training sees it."""
        module = self.engine.module
        return module.lm if isinstance(module, PolicyModel) else module

    @property
    def agree(self) -> Callable[[int], int] | None:
        """This rank's number -> the largest of all ranks, where forward passes are collective; else None."""
        return _largest if self._collective else None

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """Enter generation; collective on entry and exit (and in each forward pass if not pinned)."""
        model = self.model
        was_training = model.training
        with ExitStack() as stack:
            for engine in self._sleeping:
                stack.enter_context(_asleep(engine))
            if not self._collective:
                stack.enter_context(self._gathered())
                stack.enter_context(_without_hooks(self.engine.module))
            stack.enter_context(_without_checkpointing(model))
            stack.enter_context(self._merge(model))
            stack.enter_context(torch.no_grad())
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


def _largest(number: int) -> int:
    return int(dist.all_reduce(torch.tensor([number], device=dist.device()), "max"))


@contextmanager
def _asleep(engine: Any) -> Iterator[None]:
    """Inside, what only the optimizer needs is in host memory: fp32 weights and optimizer states of this rank's shard.

    DeepSpeed's own `offload_states` knows its CUDA Adam only.
    """
    zero = engine.optimizer
    states = [value for state in zero.optimizer.state.values() for value in state.values()]
    held = [*zero.fp32_partitioned_groups_flat, *(value for value in states if isinstance(value, torch.Tensor))]
    homes = [tensor.device for tensor in held]
    for tensor in held:
        tensor.data = tensor.data.to("cpu")
    try:
        yield
    finally:
        for tensor, home in zip(held, homes, strict=True):
            tensor.data = tensor.data.to(home)


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
