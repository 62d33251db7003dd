"""Metrics of healthy steps, and a watch over steps that differ from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dschat_ppo.config.health_flags import FitHealthFlags, PPOHealthFlags
from dschat_ppo.monitor.health import Event, HealthWatch

PPO_STEP = {
    "kl/ref_k1": 0.05, "policy/clip_fraction": 0.1, "policy/entropy": 2.0, "policy/first_log_ratio_abs_mean": 0.001,
    "policy/first_log_ratio_abs_max": 0.2, "reward/score_std": 0.8, "reward/score_mean": 1.0,
    "reward/function_faults": 0.0, "rollout/count": 64, "rollout/distinct_share": 0.95, "rollout/ended_share": 0.9,
    "rollout/length_mean": 40.0, "rollout/logprob_diff_mean": 0.002, "value/explained_variance": 0.4,
    "optim/grad_norm/actor": 0.5, "optim/grad_norm/critic": 2.0, "optim/nonfinite_skipped": 0.0,
}  # fmt: skip
FIT_STEP = {"loss": 1.0, "accuracy": 0.8, "grad_norm": 1.0, "optim/nonfinite_skipped": 0.0}
WINDOW = 10


def ppo_watch(*health: str, **flags: Any) -> HealthWatch:
    """A watch of step 3."""
    return HealthWatch(PPOHealthFlags(health=[f"window={WINDOW}", *health], **flags))


def fit_watch(*health: str, **flags: Any) -> HealthWatch:
    """A watch of steps 1 and 2."""
    return HealthWatch(FitHealthFlags(health=[f"window={WINDOW}", *health], **flags))


def events_of(watch: HealthWatch, steps: Sequence[Mapping[str, float]]) -> list[Event]:
    """The events of these steps, numbered from 1 on; a step is a healthy one except for what is given."""
    healthy = PPO_STEP if any(rule.name == "kl_spike" for rule in watch.rules) else FIT_STEP
    return [event for step, changes in enumerate(steps, 1) for event in watch.check(step, {**healthy, **changes})]
