"""Switch the actor between training and generation. Generation is the only time that ZeRO-3 weights are whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from transformers import PreTrainedModel

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.engine.sleep import asleep, training_states, weights_of
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.types import Engine

Merge = Callable[[PreTrainedModel, Collection[nn.Parameter]], AbstractContextManager[Any]]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class HybridEngine:
    """Makes the model of a DeepSpeed training engine available for inference, in `generating()`.

    In that context the model is an ordinary `PreTrainedModel` in eval mode: whole weights on every rank, no DeepSpeed
    hooks, no activation checkpointing, no gradients. Generation needs no collective, so ranks may finish at different
    times. The exit restores training exactly: the same hook objects, the same partitions (the gathered copies are
    dropped, not written back), the same mode.

    Args:
        engine: the actor's DeepSpeed engine.
        pinned: gather ZeRO-3 weights once for the whole context. If False, they stay partitioned, and DeepSpeed's
            hooks gather each layer when it runs. This saves memory and costs one collective per layer; all ranks must
            then run the same number of forward passes (see `max_over_ranks`).
        merge: context manager that merges adapters into the whole weights and restores these on exit. It gets the
            model, and those weights that are dropped after the exit and need not be restored. Requires `pinned`.
        sleeping: engines whose training states move to host memory during the context, and whose weights too, but for
            those that the actor uses.
    """

    def __init__(
        self, engine: Engine, pinned: bool = True, merge: Merge | None = None, sleeping: Sequence[Engine] = ()
    ):
        self.engine = engine
        self._merge = merge
        self.sleeping = sleeping
        self._has_slept = False
        self._collective = not pinned and any(hasattr(parameter, "ds_id") for parameter in self.model.parameters())
        if self._collective and merge is not None:
            raise ValueError("adapters cannot be merged into weights that are gathered layer by layer")

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model inside the engine."""
        module = self.engine.module
        return module.lm if isinstance(module, PolicyModel) else module

    @property
    def max_over_ranks(self) -> Callable[[int], int] | None:
        """If forward passes are collective, a collective that returns the maximum of a number over ranks; else None."""
        if not self._collective:
            return None
        return lambda number: int(dist.all_reduce(torch.tensor([number], device=dist.device()), "max"))

    @contextmanager
    def _asleep(self) -> Iterator[None]:
        """The engines of `sleeping` in host memory. The first time, the log says how much that moves."""
        tensors = [tensor for engine in self.sleeping for tensor in chain(training_states(engine), weights_of(engine))]
        with asleep(tensors, awake=weights_of(self.engine)) as moved:
            if not self._has_slept:
                logger().info(f"--sleep_in_rollout: {moved / 2**30:.2f} GiB of this rank leave the device in rollouts")
                self._has_slept = True
            yield

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """The model, ready for inference. Entry and exit are collective, and so is each forward pass if not pinned."""
        model = self.model
        was_training = model.training
        with ExitStack() as stack:
            if self.sleeping:
                stack.enter_context(self._asleep())
            missing: list[Any] = []
            if not self._collective:
                # small, persistent tensors are whole already
                weights: list[Any] = [weight for weight in model.parameters() if hasattr(weight, "ds_id")]
                missing = [weight for weight in weights if weight.ds_status == ZeroParamStatus.NOT_AVAILABLE]
                stack.enter_context(deepspeed.zero.GatheredParameters(missing, enabled=bool(missing)))
                stack.enter_context(_without_hooks(self.engine.module))
            stack.enter_context(_without_checkpointing(model))
            if self._merge is not None:
                stack.enter_context(self._merge(model, missing))
            stack.enter_context(torch.no_grad())
            model.eval()
            try:
                yield model
            finally:
                model.train(was_training)


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Remove the hooks of every module; the exit restores the same dictionaries."""
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
    """Turn activation checkpointing off: it does not allow a KV cache."""
    checkpointing: list[Any] = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in checkpointing:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in checkpointing:
            module.gradient_checkpointing = True
