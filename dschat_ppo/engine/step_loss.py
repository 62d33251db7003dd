"""The loss of an optimizer step over all its micro-batches, to which features add terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dschat_ppo.features import hooks
from dschat_ppo.monitor.metric_sums import MetricSums


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


def step_terms(config: Any, model: Any) -> list[StepTerm]:
    """The terms that the features add to the loss of `model`, a `PolicyModel` or `ScalarModel`, in
    a run with these flags. A feature offers them as `step_terms.term_of(config, model)`, a
    `StepTerm` or None."""
    terms = [term_of(config, model) for term_of in hooks("step_terms.term_of")]
    return [term for term in terms if term is not None]


def with_terms(loss: StepLoss, terms: Sequence[StepTerm]) -> StepLoss:
    """The loss with the terms. Collective, if there are some."""
    for term in terms:
        loss = term.added_to(loss)
    return loss
