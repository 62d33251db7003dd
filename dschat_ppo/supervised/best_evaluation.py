"""The best evaluation of a run of step 1 or 2 (`--metric_for_best`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dschat_ppo.common.logging import logger
from dschat_ppo.config.supervised_flags import LOWEST_LOSS, BestMetric
from dschat_ppo.errors import UserError


class BestEvaluation:
    """Remembers the best evaluation during training; the one before the first step does not count.
    Of equal values the first is the best; NaN and infinity never are."""

    def __init__(self, metric: BestMetric = LOWEST_LOSS):
        self.metric = metric
        # value of the metric, and optimizer steps done; None: no evaluation yet
        self.value_and_step: tuple[float, int] | None = None

    def require_metric(self, names: Mapping[str, float]) -> None:
        """Check that evaluations have the metric; `names` is {} where there are none."""
        if names and self.metric.name not in names:
            raise UserError(
                f"--metric_for_best: the evaluation has no {self.metric.name}; it has"
                f" {', '.join(sorted(names))}"
            )

    def consider(self, metrics: Mapping[str, float], step: int) -> None:
        """Compare the evaluation after `step` steps."""
        value = metrics.get(self.metric.name, math.nan)
        if not math.isfinite(value):
            return
        best = self.value_and_step
        if best is None or self.metric.is_better(value, best[0]):
            self.value_and_step = (value, step)

    def result(self) -> dict[str, float]:
        """For `result.json`."""
        if self.value_and_step is None:
            return {}
        value, step = self.value_and_step
        return {f"best_{self.metric.name}": value, "best_step": step}

    def state_dict(self) -> dict[str, Any]:
        """Entries of a checkpoint."""
        return {
            "best": self.value_and_step,
            "best_metric": self.metric.name,
            "best_higher": self.metric.higher,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the entries of a checkpoint, unless they are about another metric."""
        name = state.get("best_metric", LOWEST_LOSS.name)
        if BestMetric(name, state.get("best_higher", self.metric.higher)) != self.metric:
            logger().info(
                f"--metric_for_best: the run looks for the best {self.metric.name} from here on"
            )
            return
        self.value_and_step = None
        if state["best"] is not None:
            value, step = state["best"]
            self.value_and_step = (value, step)
