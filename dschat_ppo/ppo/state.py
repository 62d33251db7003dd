"""Where step 3 stands: everything about a PPO step in flight that a resumed run cannot make again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.types import Experience, record_of, tensors_of, to_device


@dataclass
class PPOState:
    """Steps done, and the PPO step in flight.

    `steps` and `updates` count finished PPO steps and the optimizer steps of the one in flight, `applied` those that
    moved the actor; `ended`: a limit ends the updates of the step. `experience` holds the rows of all ranks that it
    trains on, None between two PPO steps; `metrics` are those known so far, `sums` this rank's part of what the updates
    measured. `evaluated` are the metrics before the first PPO step (None: not measured yet), `first` and `last` those
    of the first and the last finished one.
    """

    steps: int = 0
    updates: int = 0
    applied: int = 0
    ended: bool = False
    experience: Experience | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    sums: MetricSums = field(default_factory=MetricSums)
    evaluated: dict[str, float] | None = None
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)

    def begin_step(self, experience: Experience | None, metrics: dict[str, float]) -> None:
        """Train on `experience` from here on; None: this step makes no update."""
        self.experience, self.metrics, self.sums = experience, metrics, MetricSums()
        self.updates, self.applied, self.ended = 0, 0, False

    def end_step(self, metrics: dict[str, float]) -> None:
        """The PPO step is done, with these metrics."""
        self.steps += 1
        self.first, self.last = self.first or metrics, metrics
        self.begin_step(None, {})

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have in common."""
        return {
            "steps": self.steps,
            "updates": self.updates,
            "applied": self.applied,
            "ended": self.ended,
            "experience": None if self.experience is None else tensors_of(self.experience),
            "metrics": dict(self.metrics),
            "evaluated": self.evaluated,
            "first": dict(self.first),
            "last": dict(self.last),
        }

    def load_state_dict(self, state: dict[str, Any], sums: MetricSums, device: torch.device) -> None:
        """Go on from `state_dict()`, with this rank's part of the sums."""
        self.steps, self.updates = state["steps"], state["updates"]
        self.applied, self.ended = state["applied"], state["ended"]
        self.metrics, self.evaluated = state["metrics"], state["evaluated"]
        self.first, self.last = state["first"], state["last"]
        self.sums = sums
        self.experience = None
        if state["experience"] is not None:
            self.experience = to_device(record_of(Experience, state["experience"]), device)
