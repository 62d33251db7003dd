"""Health warnings: metrics of PPO that indicate a problem, with the usual cause."""

from __future__ import annotations

from collections import deque
from typing import Any

WINDOW = 10  # PPO steps
Metrics = dict[str, float]


def step_warnings(now: Metrics) -> list[str]:
    """Warnings from the metrics of one step. A run without a critic or a reference has no metrics for some of them."""
    found = []
    if now.get("kl/ref_k1", 0.0) < -0.02:
        found.append("mean KL to the reference is negative: sampling and scoring may use different settings")
    if now.get("policy/clip_fraction", 0.0) > 0.3:
        found.append("more than 30 % of the ratios are clipped: lower the actor's learning rate or --ppo_epochs")
    if now["reward/score_std"] < 1e-3 and now["rollout/count"] > 1:
        found.append("all scores are nearly equal: the reward does not distinguish the answers")
    if now["rollout/distinct_share"] < 0.5:
        found.append(
            "more than half of the answers are duplicates: unless there are only a few short correct answers, the "
            "policy is collapsing; raise --kl_coef or --entropy_coef"
        )
    if now.get("rollout/logprob_diff_mean", 0.0) > 0.1:
        found.append("rollout and training log-probs differ: the precision is too low, or the models differ")
    return found


def trend_warnings(past: list[Metrics], now: Metrics) -> list[str]:
    """Warnings from a comparison with `past`, the last `WINDOW` steps, oldest first; none before the window is full."""
    if len(past) < WINDOW:
        return []
    mean = {name: sum(step[name] for step in past) / len(past) for name in now if all(name in step for step in past)}
    found = []
    if "kl/ref_k1" in mean and now["kl/ref_k1"] > max(0.2, 3 * mean["kl/ref_k1"]):
        found.append("KL to the reference jumped: the last updates were too large")
    if "policy/entropy" in mean and now["policy/entropy"] < 0.3 * mean["policy/entropy"]:
        found.append("entropy fell below 30 % of its mean over the last steps: the policy is collapsing")
    if now["rollout/ended_share"] < mean["rollout/ended_share"] - 0.3:
        found.append("far fewer answers end by themselves: raise --missing_eos_penalty or --max_answer_seq_len")
    names = ("rollout/length_mean", "kl/ref_k1")
    rising = all(name in mean and now[name] > 1.5 * past[0][name] > 0 for name in names)
    if rising and now["reward/score_mean"] > past[0]["reward/score_mean"]:
        found.append("score, length and KL all rise: the policy may be exploiting the reward")
    explained = [step.get("value/explained_variance", 1.0) for step in [*past, now]]
    if all(share <= 0 for share in explained):
        found.append(
            "the critic explains no variance of the returns: raise --critic_learning_rate, or check the reward"
        )
    return found


class HealthWatch:
    """Checks the metrics of each step and returns new warnings: a warning that persists is returned only once."""

    def __init__(self) -> None:
        self._past: deque[Metrics] = deque(maxlen=WINDOW)
        self._standing: set[str] = set()  # warnings of the last step

    def check(self, metrics: Metrics) -> list[str]:
        """New warnings for the metrics of a step; none for a step without scores, whose updates were skipped."""
        if "reward/score_std" not in metrics:
            return []
        found = step_warnings(metrics) + trend_warnings(list(self._past), metrics)
        fresh = [warning for warning in found if warning not in self._standing]
        self._standing = set(found)
        self._past.append(metrics)
        return fresh

    def state_dict(self) -> dict[str, Any]:
        """The state, for `load_state_dict`."""
        return {"past": list(self._past), "standing": sorted(self._standing)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._past, self._standing = deque(state["past"], maxlen=WINDOW), set(state["standing"])
