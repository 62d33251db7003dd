"""The loss of an optimizer step over all its micro-batches, to which features add terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dschat_ppo.features import hooks
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.types import Engine


@dataclass(frozen=True)
class StepLoss:
    """What an engine minimises in an optimizer step: the sum of the losses of its micro-batches."""

    batches: Sequence[Any]  # micro-batches of this rank
    # (micro-batch, metrics to add to) -> its share of the loss of the step, a scalar with
    # gradient, by one forward pass
    loss: Callable[[Any, MetricSums], Tensor]
    # (micro-batch) -> rows that count, (B,) bool, and do not only fill the micro-batch
    rows_of: Callable[[Any], Tensor]
    sums: MetricSums  # the metrics of the step
    metric_prefix: str = ""
    # numbers of the whole step that a replay of a micro-batch needs, by name
    constants: dict[str, Any] = field(default_factory=dict)

    def __call__(self, batch: Any) -> Tensor:
        """The loss of a micro-batch; its metrics are added to those of the step."""
        return self.loss(batch, self.sums)


@dataclass(frozen=True)
class StepTerm:
    """A term of the loss of each optimizer step, which a feature adds."""

    name: str
    coef: float  # its weight
    added_to: Callable[[StepLoss], StepLoss]  # collective; may run forward passes


def step_terms(config: Any, engine: Engine, further_batches: Mapping[str, Any]) -> list[StepTerm]:
    """The terms that the features add to the loss of an engine. A feature offers them as
    `step_terms.term_of` with these arguments, a `StepTerm` or None.

    Args:
        config: the flags.
        engine: trains a `PolicyModel` or `ScalarModel`.
        further_batches: the batches of data that features have added to the run, by name.
    """
    terms = [term_of(config, engine, further_batches) for term_of in hooks("step_terms.term_of")]
    return [term for term in terms if term is not None]


def with_terms(loss: StepLoss, terms: Sequence[StepTerm]) -> StepLoss:
    """The loss with the terms. Collective, if there are some."""
    for term in terms:
        loss = term.added_to(loss)
    return loss
