"""Watches the metrics of PPO and says, in words, what usually lies behind a bad sign."""

from __future__ import annotations

from collections import deque
from typing import Any

WINDOW = 10
Metrics = dict[str, float]


def step_warnings(now: Metrics) -> list[str]:
    """Warnings that one step's metrics justify by themselves. A run without critic or reference lacks some of them."""
    found = []
    if now.get("kl/ref_k1", 0.0) < -0.02:
        found.append("mean KL to the reference is negative: sampling settings differ from those of scoring?")
    if now.get("policy/clip_fraction", 0.0) > 0.3:
        found.append("more than 30 % of the ratios are clipped: lower the actor's learning rate or --ppo_epochs")
    if now["reward/score_std"] < 1e-3 and now["answers/count"] > 1:
        found.append("all scores are nearly equal: the reward does not tell these answers apart")
    if now["answers/distinct_share"] < 0.5:
        found.append(
            "half of the answers are duplicates: where right answers are not that few and short, the policy is "
            "collapsing; raise --kl_coef or --entropy_coef"
        )
    if now.get("rollout/logprob_diff_mean", 0.0) > 0.1:
        found.append("rollout and training log-probs differ: numbers too coarse, or different models")
    return found


def trend_warnings(past: list[Metrics], now: Metrics) -> list[str]:
    """Warnings that need the last `WINDOW` steps, oldest first."""
    if len(past) < WINDOW:
        return []
    mean = {name: sum(step[name] for step in past) / len(past) for name in now if all(name in step for step in past)}
    found = []
    if "kl/ref_k1" in mean and now["kl/ref_k1"] > max(0.2, 3 * mean["kl/ref_k1"]):
        found.append("KL to the reference jumped: the last update was too large")
    if "policy/entropy" in mean and now["policy/entropy"] < 0.3 * mean["policy/entropy"]:
        found.append("entropy fell to less than a third: the policy is collapsing")
    if now["answers/ended_share"] < mean["answers/ended_share"] - 0.3:
        found.append("far fewer answers end by themselves: raise --missing_eos_penalty or --max_answer_seq_len")
    climbing = ("answers/length_mean", "kl/ref_k1")
    rising = all(name in mean and now[name] > 1.5 * past[0][name] > 0 for name in climbing)
    if rising and now["reward/score_mean"] > past[0]["reward/score_mean"]:
        found.append("score, length and KL all climb: the policy may be exploiting the reward")
    explained = [step.get("value/explained_variance", 1.0) for step in [*past, now]]
    if all(share <= 0 for share in explained):
        found.append("the critic explains nothing of the returns: raise --critic_learning_rate, or check the reward")
    return found


class HealthWatch:
    """Keeps the last steps; a warning is given when it first holds and again only after it went away."""

    def __init__(self) -> None:
        self._past: deque[Metrics] = deque(maxlen=WINDOW)
        self._standing: set[str] = set()

    def check(self, metrics: Metrics) -> list[str]:
        """New warnings for this step's metrics; none for a step without scores, whose updates were left out."""
        if "reward/score_std" not in metrics:
            return []
        found = step_warnings(metrics) + trend_warnings(list(self._past), metrics)
        fresh = [warning for warning in found if warning not in self._standing]
        self._standing = set(found)
        self._past.append(metrics)
        return fresh

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes."""
        return {"past": list(self._past), "standing": sorted(self._standing)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._past, self._standing = deque(state["past"], maxlen=WINDOW), set(state["standing"])
