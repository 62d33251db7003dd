"""Switch the actor between training and generation. Generation is the only time that ZeRO-3 weights are whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any

import deepspeed
import torch
from torch import nn
from transformers import PreTrainedModel

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.engine.sleep import HostMemory, asleep, gradient_buckets, training_states, weights_of
from dschat_ppo.engine.tensor_parallel import TensorParallel, divided, is_missing
from dschat_ppo.engine.whole_weights import whole_weights
from dschat_ppo.errors import UserError
from dschat_ppo.models.forward import vocabulary_size
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.probes import of_any_rank, unfit
from dschat_ppo.types import Engine

Merge = Callable[[PreTrainedModel, Collection[nn.Parameter]], AbstractContextManager[Any]]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class HybridEngine:
    """Makes the model of a DeepSpeed training engine available for inference, in `generating()`.

    In that context the model is an ordinary `PreTrainedModel` in eval mode: whole weights on every rank, no DeepSpeed
    hooks, no activation checkpointing, no gradients. Generation needs no collective, so ranks may finish at different
    times. The exit restores training exactly: the same hook objects, the same partitions (the gathered copies are
    dropped, not written back, except those of a small model, which stay until the next update), the same mode.

    Args:
        engine: the actor's DeepSpeed engine.
        pinned: gather ZeRO-3 weights once for the whole context. If False, DeepSpeed's hooks gather each layer when it
            runs: less memory, one collective per layer. All ranks must then run the same number of forward passes (see
            `max_over_ranks`).
        merge: merges adapters into the whole weights, and restores these on exit. It gets the model, and those weights
            that are dropped after the exit and need not be restored. Requires `pinned`.
        sleeping: engines whose training states, and weights that the actor does not use, move to host memory.
        parallel: divide the layers over the ranks of a group, which then generate together; forward passes are
            collective over the group. Requires `pinned`.
    """

    def __init__(
        self, engine: Engine, pinned: bool = True, merge: Merge | None = None, sleeping: Sequence[Engine] = (),
        parallel: TensorParallel | None = None,
    ):  # fmt: skip
        self.engine = engine
        self._merge = merge
        self.sleeping = sleeping
        self._has_slept = False
        self._host = HostMemory()
        self.parallel = parallel
        self._whole = whole_weights(engine)
        partitioned = self._whole is None and any(hasattr(weight, "ds_id") for weight in self.model.parameters())
        self._collective = not pinned and partitioned
        if (self._collective or parallel) and merge is not None:
            raise ValueError("adapters cannot be merged into weights that are divided or gathered layer by layer")

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model inside the engine."""
        module = self.engine.module
        return module.lm if isinstance(module, PolicyModel) else module

    @property
    def max_over_ranks(self) -> Callable[[int], int] | None:
        """If forward passes are collective, a collective over the same ranks that returns the maximum of a number."""
        group = self.parallel.group if self.parallel else None
        if not self._collective and group is None:
            return None
        return lambda number: int(dist.all_reduce(torch.tensor([number], device=dist.device()), "max", group))

    @contextmanager
    def _asleep(self) -> Iterator[None]:
        """The engines of `sleeping` in host memory. The first time, the log says how much that moves."""
        tensors = [tensor for engine in self.sleeping for tensor in chain(training_states(engine), weights_of(engine))]
        scratch = chain.from_iterable(gradient_buckets(engine) for engine in self.sleeping)
        with asleep(tensors, awake=weights_of(self.engine), scratch=scratch, host=self._host) as moved:
            if not self._has_slept:
                logger().info(f"--sleep_in_rollout: rollouts move {moved / 2**30:.2f} GiB of this rank to host memory")
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
            if self._whole is not None:
                self._whole.gather()
            if self.parallel:
                stack.enter_context(divided(model, self.parallel))
            if not self._collective:
                missing = [weight for weight in model.parameters() if is_missing(weight) and not weight.numel()]
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

    def check_division(self) -> None:
        """Require divided layers to give the log-probs of whole ones, up to rounding. Collective; once, at first."""
        if self.parallel is None:
            return
        model = self.model
        ids = torch.randint(0, vocabulary_size(model), (2, 12), generator=torch.Generator().manual_seed(0))
        ids, was_training = ids.to(dist.device()), model.training
        self.engine.eval()
        with torch.no_grad():
            whole = model(ids, use_cache=False).logits.float().log_softmax(dim=-1)
        self.engine.train(was_training)
        parts, error = torch.full_like(whole, torch.inf), ""
        try:
            with self.generating() as lent:
                parts = lent(ids, use_cache=False).logits.float().log_softmax(dim=-1)
        except Exception as problem:  # noqa: BLE001  see `unfit`
            error = unfit(problem)
        error = of_any_rank(error, ids.device)
        likeliest = whole.argmax(dim=-1, keepdim=True)
        difference = (parts.gather(2, likeliest) - whole.gather(2, likeliest)).abs().mean()
        difference = float(dist.all_reduce(difference, "max"))  # so that all ranks decide alike
        tolerance = 1e-3 if model.dtype == torch.float32 else 0.3
        name, size = type(model).__name__, self.parallel.size
        if error or not difference <= tolerance:
            found = error or f"log-probs differ from those of whole layers by {difference:.2g}"
            flag = f"--inference_tp_size {size}"
            raise UserError(f"{flag}: with divided layers of {name} {found}; use --unpin_actor_parameters")
        logger().info(f"rollout: {name} divided over {size} ranks agrees with the whole layers ({difference:.1e})")


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
