"""`--early_stop_patience`: the end of a run whose evaluations improve no more."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dschat_ppo.common.logging import logger
from dschat_ppo.config.supervised_flags import LOWEST_LOSS, BestMetric
from dschat_ppo.errors import counted

Item = TypeVar("Item")


@dataclass
class EarlyStop:
    """Counts the evaluations since the score has last improved. Every rank keeps the same count,
    because the metrics of an evaluation are equal on all of them.

    Attributes:
        patience: evaluations without an improvement after which the run ends; None: it does not.
        min_delta: what the score must improve by, more than that.
        metric: the score, which also decides which model is the best.
        best: the score that is to be improved, and the step of its evaluation; None: no evaluation
            gave a finite one.
        misses: evaluations since then.
        last_step: the step of the last evaluation.
    """

    patience: int | None = None
    min_delta: float = 0.0
    metric: BestMetric = LOWEST_LOSS
    best: tuple[float, int] | None = None
    misses: int = 0
    last_step: int = 0

    def consider(self, metrics: Mapping[str, float], step: int) -> None:
        """Count the evaluation after `step`."""
        self.last_step = step
        value = metrics.get(self.metric.name, math.nan)
        improves = math.isfinite(value)
        if improves and self.best is not None:
            improves = self.metric.is_better(value, self.best[0], self.min_delta)
        if improves:
            self.best = (value, step)
            self.misses = 0
        else:
            self.misses += 1

    @property
    def is_due(self) -> bool:
        """Whether the run ends after the last evaluation."""
        return self.patience is not None and self.misses >= self.patience

    def until_due(self, steps: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of `steps`, each of which is the work of one step, until the end is due;
        a line says so if steps are left then. A run that resumes after its last evaluation gets
        none."""
        for step in steps:
            if self.is_due:
                logger().info(self.reason)
                return
            yield step

    @property
    def reason(self) -> str:
        """Why the run ends early, for the log and `result.json`."""
        improvement = "improved"
        if self.min_delta > 0:
            improvement += f" by more than {self.min_delta:g}"
        since = "was never finite"
        if self.best is not None:
            value, step = self.best
            since = f"was {value:.4g} after step {step} and has not {improvement} since"
        return (
            f"--early_stop_patience {self.patience}: the run ends after step {self.last_step}:"
            f" {self.metric.name} {since}, in {counted(self.misses, 'evaluation')}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The count, for a checkpoint."""
        return {
            "metric": [self.metric.name, self.metric.higher],
            "best": self.best,
            "misses": self.misses,
            "last_step": self.last_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the count of a checkpoint, unless it is about another metric."""
        if state["metric"] != [self.metric.name, self.metric.higher]:
            return
        self.best = None
        if state["best"] is not None:
            value, step = state["best"]
            self.best = (value, step)
        self.misses = state["misses"]
        self.last_step = state["last_step"]


def warn_of_few_evaluations(patience: int | None, evaluations: int) -> None:
    """Warn if a run ends before its patience does. `evaluations`: those before its last step that
    can be without an improvement."""
    if patience is not None and evaluations < patience:
        logger().warning(
            f"--early_stop_patience {patience} has no effect: this run makes"
            f" {counted(evaluations, 'evaluation')} to compare before its last step; lower it, or"
            " evaluate more often (--eval_interval)"
        )
