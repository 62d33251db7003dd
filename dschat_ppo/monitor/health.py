"""Health warnings: metrics of each step are compared with the rules; what they find is logged and recorded."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from dschat_ppo.common.atomic_files import write_file
from dschat_ppo.common.dist import is_main
from dschat_ppo.common.logging import logger
from dschat_ppo.config.health_flags import FitHealthFlags, Level, PPOHealthFlags, thresholds
from dschat_ppo.monitor.health_rules import History, find
from dschat_ppo.monitor.json_lines import storage_errors

HEALTH = "health.jsonl"
CALM = 3  # steps without a warning after which it is over
COMPLETE = ("reward/score_std", "loss")  # a step without any of them made no update
FROM_THE_START = ("rollout/length_mean",)  # metrics whose first window is kept
LOWEST = ("loss",)


@dataclass(frozen=True)
class Event:
    """A line of `health.jsonl`: an event of a rule, what was `seen`, with numbers, `since` which step, its likely
    cause, and what to change."""

    step: int
    since: int
    name: str
    level: Level
    seen: str
    cause: str
    change: str


class CanStop(Protocol):
    """A `CheckpointManager`, which a layer above defines."""

    def stop_if(self, reason: str | None) -> None:
        """Save a checkpoint and end the run if rank 0 has a reason."""


class HealthWatch:
    """Applies rules to the metrics of each step. A warning that persists is one event; after `CALM` steps without it,
    it is over and would be a new one. A `StorageError` of `health.jsonl` is raised on rank 0 only."""

    def __init__(self, flags: PPOHealthFlags | FitHealthFlags):
        self.window, self.limits, off = thresholds(flags)
        self.rules = [rule for rule in flags.rules if rule.name not in off]
        self.stop = flags.stop_on_health
        self.events: list[Event] = []  # of the whole run
        self._reason_to_stop: str | None = None  # by --stop_on_health, at the last step
        self._past: deque[tuple[int, dict[str, float]]] = deque(maxlen=self.window)
        self._standing: dict[str, int] = {}  # name -> step at which it was last found
        self._start: dict[str, list[float]] = {name: [] for name in FROM_THE_START}
        self._lowest: dict[str, float] = {}
        self._evaluations: list[tuple[int, float, float]] = []
        self._losses = (0.0, 0)  # sum and number of training losses since the last evaluation
        self._file: Path | None = None

    def begin(self, folder: Path) -> None:
        """Write `health.jsonl` with the events so far, so that a resumed run has those up to its checkpoint."""
        self._file = folder / HEALTH
        self._write_events()

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Event]:
        """The new events at a step with these metrics (as in `metrics.jsonl`); they are logged and recorded."""
        now = {name: value for name, value in metrics.items() if not math.isnan(value)}
        self._add_evaluation(step, now)
        window = self.window
        start = {name: sum(values) / len(values) for name, values in self._start.items() if len(values) >= window}
        history = History(step, now, list(self._past), window, start, self._lowest, self._evaluations, self.limits)
        found = {rule.name: seen for rule in self.rules if (seen := find(rule, history)) is not None}
        fresh = [
            Event(step, found[rule.name].since, rule.name, rule.level, found[rule.name].text, rule.cause, rule.change)
            for rule in self.rules if rule.name in found and rule.name not in self._standing
        ]  # fmt: skip
        for event in fresh:
            level = " (error)" if event.level == "error" else ""
            logger().warning(f"health: step {step}{level}: {_described(event)}")
        self._update_standing(step, found)
        if any(name in now for name in COMPLETE):
            self._remember(step, now)
        if fresh:
            self.events += fresh
            self._write_events()
        stops = [event for event in fresh if self.stop in ("warning", event.level)]
        self._reason_to_stop = None
        if stops:
            self._reason_to_stop = f"--stop_on_health {self.stop}: step {step}: {_described(stops[0])}"
        return fresh

    def stop_if_due(self, checkpointer: CanStop) -> None:
        """Give the checkpointer the reason to stop at the last step, unless `--stop_on_health` is off. Collective."""
        if self.stop != "off":
            checkpointer.stop_if(self._reason_to_stop)

    def state_dict(self) -> dict[str, Any]:
        """The state, for `load_state_dict`."""
        return {
            "steps": [step for step, _ in self._past],
            "past": [dict(metrics) for _, metrics in self._past],
            "standing": dict(self._standing),
            "start": {name: list(values) for name, values in self._start.items()},
            "lowest": dict(self._lowest),
            "evaluations": list(self._evaluations),
            "losses": self._losses,
            "events": [asdict(event) for event in self.events],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        self._past.clear()
        self._past.extend(zip(state["steps"], state["past"], strict=True))
        self._standing = dict(state["standing"])
        self._start |= {name: list(values) for name, values in state["start"].items()}
        self._lowest, self._evaluations = dict(state["lowest"]), list(state["evaluations"])
        self._losses = state["losses"]
        self.events = [Event(**event) for event in state["events"]]

    def _update_standing(self, step: int, found: Iterable[str]) -> None:
        """Note the warnings of this step, and log the end of those that were not found for `CALM` steps."""
        self._standing |= dict.fromkeys(found, step)
        for name, last in list(self._standing.items()):
            if step - last >= CALM:
                del self._standing[name]
                logger().info(f"health: step {step}: {name} is over")

    def _add_evaluation(self, step: int, now: Mapping[str, float]) -> None:
        """Add an evaluation of steps 1 and 2, with the mean training loss since the one before."""
        total, count = self._losses
        if "loss" in now:
            total, count = total + now["loss"], count + 1
        if "eval_loss" in now and count:
            self._evaluations.append((step, now["eval_loss"], total / count))
            total, count = 0.0, 0
        self._losses = (total, count)

    def _remember(self, step: int, now: dict[str, float]) -> None:
        """Add the current step to the past steps."""
        window = self.window
        self._past.append((step, now))
        for name, values in self._start.items():
            if name in now and len(values) < window:
                values.append(now[name])
        for name in LOWEST:
            values = [metrics[name] for _, metrics in self._past if name in metrics]
            if len(values) == window:
                self._lowest[name] = min(self._lowest.get(name, math.inf), sum(values) / window)

    def _write_events(self) -> None:
        """Write `health.jsonl` on rank 0, durably: all of it, because events are rare."""
        if self._file is not None and is_main():
            lines = "".join(f"{json.dumps(asdict(event))}\n" for event in self.events)
            with storage_errors(self._file):
                write_file(self._file, lines.encode())


def _described(event: Event) -> str:
    """An event in one line."""
    return f"{event.name}: {event.seen}. Likely cause: {event.cause}. What to change: {event.change}"
