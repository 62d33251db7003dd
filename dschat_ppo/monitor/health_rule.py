"""What a health rule is, and what it sees: the metrics of the last steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["warning", "error"]
Metrics = Mapping[str, float]
Condition = Callable[[Metrics, Any], str | None]  # (metrics of one step, flags) -> what is wrong with them, or None


@dataclass(frozen=True)
class Seen:
    """What a rule has found. `text`: with the numbers; `since`: the first step of it."""

    text: str
    since: int


@dataclass(frozen=True)
class History:
    """The current step and those before it.

    Attributes:
        step: number of the current step.
        now: its metrics.
        past: (step, metrics) of the last `window` steps before it, oldest first; fewer at the start of a run.
        window: steps that a trend covers.
        start: metric -> mean over the first `window` steps of the run; {} until they are over.
        lowest: metric -> lowest mean of `window` steps in a row so far.
        evaluations: (step, held-out loss, mean training loss since the evaluation before) of the last evaluations and
            of the best one, oldest first.
    """

    step: int
    now: Metrics
    past: Sequence[tuple[int, Metrics]]
    window: int
    start: Metrics
    lowest: Metrics
    evaluations: Sequence[tuple[int, float, float]] = ()

    def mean(self, name: str, above: float = -math.inf) -> float | None:
        """The mean of a metric over the window before this step; None until half of the window has it. Infinity does
        not count (it is the gradient norm of an fp16 overflow), and neither does what is not above the bound."""
        values = [metrics[name] for _, metrics in self.past if above < metrics.get(name, math.nan) < math.inf]
        return sum(values) / len(values) if 2 * len(values) >= self.window else None

    def halves(self, name: str) -> tuple[float, float] | None:
        """The means of a metric over the older and over the newer half of the window and this step, which is in the
        newer one; None before the window is full of it, or if this step does not have it."""
        values = [metrics[name] for metrics in (*(metrics for _, metrics in self.past), self.now) if name in metrics]
        if name not in self.now or len(values) <= self.window:
            return None
        middle = len(values) // 2
        older, newer = values[:middle], values[middle:]
        return sum(older) / len(older), sum(newer) / len(newer)

    @property
    def middle(self) -> int:
        """The first step of the newer half of the window."""
        steps = [*(step for step, _ in self.past), self.step]
        return steps[len(steps) // 2]

    def lasting(self, condition: Condition, flags: Any) -> Seen | None:
        """What `condition` finds in this step, if it also holds in each step of the window before it."""
        text = condition(self.now, flags)
        if text is None or len(self.past) < self.window:
            return None
        if any(condition(metrics, flags) is None for _, metrics in self.past):
            return None
        return Seen(f"{text}, for {len(self.past) + 1} steps", self.past[0][0])


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: of its events.
        level: "error" if training on is likely wasted.
        find: (history, flags) -> what is wrong at the current step, or None.
        cause: the likely cause.
        change: what to change; flags by name.
    """

    name: str
    level: Level
    find: Callable[[History, Any], Seen | None]
    cause: str
    change: str


def above(metric: str, flag: str) -> Condition:
    """The metric exceeds the value of the flag."""

    def condition(metrics: Metrics, flags: Any) -> str | None:
        value, limit = metrics.get(metric, 0.0), getattr(flags, flag)
        return f"{metric} is {value:.3g}, above {limit:g} (--{flag})" if value > limit else None

    return condition


def at_once(condition: Condition) -> Callable[[History, Any], Seen | None]:
    """A rule that looks at the current step only."""

    def find(history: History, flags: Any) -> Seen | None:
        text = condition(history.now, flags)
        return None if text is None else Seen(text, history.step)

    return find


def for_a_window(condition: Condition) -> Callable[[History, Any], Seen | None]:
    """A rule whose condition must hold at this step and at each one of the window before it."""
    return lambda history, flags: history.lasting(condition, flags)
