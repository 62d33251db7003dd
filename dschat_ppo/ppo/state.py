"""Position of step 3 in its run, and everything of a PPO step in flight that a resumed run cannot compute again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dschat_ppo.common import dist
from dschat_ppo.common.phases import announce_step
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo.update import Outcome
from dschat_ppo.types import Experience, record_of, tensors_of, to_device


@dataclass
class PPOState:
    """Position and step in flight. It changes in the methods below alone."""

    steps: int = 0  # finished PPO steps
    updates: int = 0  # optimizer steps of the PPO step in flight
    applied: int = 0  # those of them that moved the actor
    ended: bool = False  # a limit ended the updates of the PPO step in flight
    experience: Experience | None = None  # rows of all ranks; None between two PPO steps, or where not finite
    metrics: dict[str, float] = field(default_factory=dict)  # of the PPO step in flight, known so far
    sums: MetricSums = field(default_factory=MetricSums)  # this rank's part of what the updates measured
    evaluated: dict[str, float] | None = None  # evaluation before the first PPO step; None: not made yet
    first: dict[str, float] = field(default_factory=dict)  # metrics of the first finished PPO step
    last: dict[str, float] = field(default_factory=dict)  # of the last one

    def steps_left(self, total: int) -> Iterator[int]:
        """Numbers, from 1 on, of the PPO steps up to `total` that are not finished."""
        while self.steps < total:
            announce_step(self.steps + 1)
            yield self.steps + 1

    def begin_updates(self, experience: Experience | None, metrics: dict[str, float]) -> None:
        """Start the updates of a PPO step; without experience there are none."""
        self.experience, self.metrics, self.sums = experience, metrics, MetricSums()
        self.updates, self.applied, self.ended = 0, 0, False

    def count_update(self, outcome: Outcome) -> None:
        """Count an optimizer step and its metrics. Collective in the first one of a PPO step."""
        for sums in outcome.sums:
            self.sums.merge(sums)
        device = dist.device()
        once = torch.tensor([dist.is_main()], device=device)  # every rank knows the norm; only one counts it
        for role, norm in outcome.grad_norms.items():
            self.sums.add_mean(f"grad_norm/{role}", torch.tensor([norm], device=device), once)
        if self.updates == 0:
            first = self.sums.reduce()
            for name in ("mean", "max"):
                if f"policy/log_ratio_abs_{name}" in first:
                    self.metrics[f"policy/first_log_ratio_abs_{name}"] = first[f"policy/log_ratio_abs_{name}"]
        self.updates += 1
        self.applied += "actor" in outcome.grad_norms
        self.ended = outcome.ends_step

    def finish_step(self, metrics: dict[str, float]) -> None:
        """Count the PPO step in flight as finished."""
        self.steps += 1
        self.first, self.last = self.first or metrics, metrics
        self.begin_updates(None, {})

    def state_dict(self) -> dict[str, Any]:
        """The part that all ranks have in common; `sums` are not in it."""
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
        """Restore `state_dict()`, with this rank's part of the sums."""
        self.steps, self.updates = state["steps"], state["updates"]
        self.applied, self.ended = state["applied"], state["ended"]
        self.metrics, self.evaluated = state["metrics"], state["evaluated"]
        self.first, self.last = state["first"], state["last"]
        self.sums = sums
        self.experience = None
        if state["experience"] is not None:
            self.experience = to_device(record_of(Experience, state["experience"]), device)
