"""The loss of an optimizer step over all its micro-batches, to which features add terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dschat_ppo.features import hooks
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.types import Engine

# (micro-batch, metrics to add to) -> its share of the loss of the step, a scalar with gradient
MicroBatchLoss = Callable[[Any, MetricSums], Tensor]


@dataclass(frozen=True)
class StepLoss:
    """What an engine minimises in an optimizer step: the sum of the losses of its micro-batches."""

    batches: Sequence[Any]  # micro-batches of this rank, of one type
    of_batch: MicroBatchLoss  # their loss, by one forward pass
    # (micro-batch) -> the sequences of a forward pass that count, and do not only fill the
    # micro-batch: (B,) bool
    rows_of: Callable[[Any], Tensor]
    sums: MetricSums  # the metrics of the step
    metric_prefix: str = ""
    # numbers of the whole step that the loss of a micro-batch needs, by name
    constants: Mapping[str, Any] = field(default_factory=dict)
    # of terms: micro-batches of other types, which follow, and the loss of each type
    further_batches: Sequence[Any] = ()
    of_further_batch: Mapping[type, MicroBatchLoss] = field(default_factory=dict)

    @property
    def all_batches(self) -> list[Any]:
        """All micro-batches of this rank, in their order."""
        return [*self.batches, *self.further_batches]

    def __call__(self, batch: Any) -> Tensor:
        """The loss of a micro-batch; its metrics are added to those of the step."""
        of_batch = self.of_further_batch.get(type(batch), self.of_batch)
        return of_batch(batch, self.sums)


@dataclass(frozen=True)
class StepTerm:
    """A term of the loss of each optimizer step, which a feature adds: it needs all micro-batches
    before the first of them is run, or has micro-batches of its own."""

    name: str
    coef: float  # its weight, which `added_to` applies; for the log
    added_to: Callable[[StepLoss], StepLoss]  # collective; may run forward passes


def step_terms(config: Any, engine: Engine, further_batches: Mapping[str, Any]) -> list[StepTerm]:
    """The terms that the features add to the loss of an engine. A feature offers them as
    `step_terms.step_term_of` with these arguments, a `StepTerm` or None.

    Args:
        config: the flags.
        engine: trains a `PolicyModel` or `ScalarModel`.
        further_batches: the batches of data that features have added to the run, by name.
    """
    terms = [
        step_term_of(config, engine, further_batches)
        for step_term_of in hooks("step_terms.step_term_of")
    ]
    return [term for term in terms if term is not None]


def with_terms(loss: StepLoss, terms: Sequence[StepTerm]) -> StepLoss:
    """The loss with the terms. Collective, if there are some."""
    for term in terms:
        loss = term.added_to(loss)
    return loss
