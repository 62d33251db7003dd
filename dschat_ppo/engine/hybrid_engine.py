"""Switch the actor between training and generation. Generation is the only time that ZeRO-3 weights
are whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from transformers import PreTrainedModel

from dschat_ppo.common import dist
from dschat_ppo.engine.build_engine import whole_weights
from dschat_ppo.models.given_embeddings import GivenSource
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.types import Engine

# (model, weights that need not be restored) -> a context in which what trains beside the weights is
# merged into them
Merge = Callable[[PreTrainedModel, Collection[nn.Parameter]], AbstractContextManager[Any]]
# the same with `originals_on_host`, a keyword
MergeWithHost = Callable[..., AbstractContextManager[Any]]
# () -> a context that surrounds generation
Around = Callable[[], AbstractContextManager[Any]]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Division:
    """How the ranks of a group hold the actor's layers together while they generate.

    Attributes:
        group: the ranks, which then make the same forward passes.
        rank: the place of this rank in the group.
        divided: (model) -> a context in which the model has this rank's shards of its layers;
            forward passes inside are collective over the group.
        check: (hybrid engine) -> raises `UserError` unless divided layers compute what whole ones
            do. Collective.
    """

    group: dist.Group
    rank: int
    divided: Callable[[PreTrainedModel], AbstractContextManager[None]]
    check: Callable[[HybridEngine], None]


@dataclass(frozen=True)
class GenerationChange:
    """What a feature changes while the actor generates.

    Attributes:
        around: a context that surrounds generation; it is entered before weights are gathered.
        originals_on_host: the originals of weights into which others merge wait in host memory.
        by_layer: ZeRO-3 gathers the weights one layer at a time.
        division: divides the layers over ranks.
        merge: merges what trains beside the weights into them.
    """

    around: Around | None = None
    originals_on_host: bool = False
    by_layer: bool = False
    division: Division | None = None
    merge: MergeWithHost | None = None


class HybridEngine:
    """Makes the model of the actor's training engine available for inference, in `generating()`.

    In that context the model is an ordinary `PreTrainedModel` in eval mode (thus without activation
    checkpointing): whole weights on every rank, no DeepSpeed hooks, no gradients. Generation needs
    no collective, so ranks may finish at different times. The exit restores training exactly: the
    same hook objects, the same partitions (the gathered copies are dropped, not written back,
    except those of a small model, which stay until the next update), the same mode.

    Args:
        engine: the actor's training engine.
        pinned: gather ZeRO-3 weights once for the whole context. If False, DeepSpeed's hooks gather
            each layer when it runs: less memory, one collective per layer. All ranks must then run
            the same number of forward passes (see `max_over_ranks`).
        merge: merges what trains beside them into the whole weights, and restores these on exit.
            It gets the model, and those weights that are dropped after the exit and need not be
            restored. Requires `pinned`.
        around: contexts that surround generation; they are entered before weights are gathered.
        division: divide the layers over the ranks of a group, which then generate together; forward
            passes are collective over the group. Requires `pinned`.

    Raises:
        ValueError: `merge` together with weights that are never whole.
    """

    def __init__(
        self,
        engine: Engine,
        pinned: bool = True,
        merge: Merge | None = None,
        around: Sequence[Around] = (),
        division: Division | None = None,
    ):
        self.engine = engine
        self.around = around
        self.division = division
        self._merge = merge
        self._whole_weights = whole_weights(engine)
        is_partitioned = any(map(dist.is_partitioned, self.model.parameters()))
        self._gathers_by_layer = not pinned and is_partitioned and self._whole_weights is None
        if merge is not None and (self._gathers_by_layer or division):
            raise ValueError(
                "nothing can be merged into weights that are divided or gathered layer by layer"
            )

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model inside the engine."""
        module = self.engine.module
        if isinstance(module, PolicyModel):
            return module.lm
        return module

    @property
    def given_source(self) -> GivenSource | None:
        """What the model gets in place of the embeddings of some ids of its prompts; None: of
        none."""
        module = self.engine.module
        if isinstance(module, PolicyModel):
            return module.given_source
        return None

    @property
    def max_over_ranks(self) -> Callable[[int], int] | None:
        """If forward passes are collective, a collective over the same ranks that returns the
        maximum of an integer."""
        group = None
        if self.division is not None:
            group = self.division.group
        elif not self._gathers_by_layer:
            return None

        def maximum(value: int) -> int:
            values = torch.tensor([value], device=dist.device())
            return int(dist.all_reduce(values, "max", group))

        return maximum

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """The model, ready for inference. Entry and exit are collective, and so is each forward
        pass if not pinned."""
        model = self.model
        was_training = model.training
        with ExitStack() as stack:
            for around in self.around:
                stack.enter_context(around())
            if self._whole_weights is not None:
                self._whole_weights.gather()
            if self.division is not None:
                stack.enter_context(self.division.divided(model))
            missing: list[Any] = []
            if not self._gathers_by_layer:
                missing = [
                    weight
                    for weight in model.parameters()
                    if is_missing(weight) and not weight.numel()
                ]
                stack.enter_context(deepspeed.zero.GatheredParameters(missing))
                stack.enter_context(_without_hooks(self.engine.module))
            if self._merge is not None:
                stack.enter_context(self._merge(model, missing))
            stack.enter_context(torch.no_grad())
            model.eval()
            try:
                yield model
            finally:
                model.train(was_training)

    def check_division(self) -> None:
        """Require layers that ranks divide to compute what whole ones do. Collective; called once,
        before the first rollout. `UserError` if they do not."""
        if self.division is not None:
            self.division.check(self)


def is_missing(weight: Any) -> bool:
    """Whether a ZeRO-3 parameter has to be gathered; small ones are whole on every rank."""
    return dist.is_partitioned(weight) and weight.ds_status == ZeroParamStatus.NOT_AVAILABLE


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Remove the hooks of every module; the exit restores the same dictionaries."""
    saved_hooks: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        for name in _HOOKS:
            saved_hooks.append((module, name, getattr(module, name)))
            setattr(module, name, OrderedDict())
    try:
        yield
    finally:
        for module, name, hooks in saved_hooks:
            setattr(module, name, hooks)
