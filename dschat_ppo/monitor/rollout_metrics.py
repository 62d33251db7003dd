"""What a PPO step logs about its experience and its phases."""

from __future__ import annotations

import torch

from dschat_ppo.algorithms.kl import kl_k1, kl_k3
from dschat_ppo.common.dist import all_reduce
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.monitor.metrics import explained_variance, moments
from dschat_ppo.types import Experience


def experience_metrics(rows: Experience, kl_coef: float) -> dict[str, float]:
    """Metrics of the experience of all ranks; means over tokens or rows, as the name says.

    Args:
        rows: B rows of all ranks, as `MiniDataset.collect` gives them.
        kl_coef: weight of the KL penalty in the reward.
    """
    mask = rows.response_mask
    k1 = kl_k1(rows.old_logprobs, rows.ref_logprobs)
    k3 = kl_k3(rows.old_logprobs, rows.ref_logprobs)
    score_mean, score_std = moments(rows.scores)
    metrics = {
        "reward/score_mean": score_mean,
        "reward/score_std": score_std,
        "reward/score_min": float(rows.scores.min()),
        "reward/score_max": float(rows.scores.max()),
        "reward/kl_penalty": float((kl_coef * k1 * mask).sum(dim=1).mean()),
        "reward/total_mean": float(rows.rewards.sum(dim=1).mean()),
        "kl/ref_k1": moments(k1[mask])[0],
        "kl/ref_k3": moments(k3[mask])[0],
        "value/explained_variance": explained_variance(rows.values[mask], rows.returns[mask]),
    }
    for name, values in (("advantage", rows.advantages), ("return", rows.returns), ("value", rows.values)):
        metrics[f"{name}/mean"], metrics[f"{name}/std"] = moments(values[mask])
    return metrics | _answer_metrics(rows)


def drift_metrics(rows: Experience) -> dict[str, float]:
    """Distance of the log-probs seen while sampling from `old_logprobs` of a training forward, over tokens."""
    drift = (rows.rollout_logprobs - rows.old_logprobs)[rows.response_mask].abs()
    return {
        "rollout/logprob_diff_mean": moments(drift)[0],
        "rollout/logprob_diff_max": float(drift.max()) if drift.numel() else 0.0,
    }


def _answer_metrics(rows: Experience) -> dict[str, float]:
    lengths = rows.response_mask.sum(dim=1).float()
    distinct = torch.unique(torch.where(rows.response_mask, rows.response_ids, -1), dim=0).shape[0]
    ended = float(rows.ended.float().mean())
    return {
        "answers/length_mean": float(lengths.mean()),
        "answers/length_max": float(lengths.max()),
        "answers/ended_share": ended,
        "answers/cut_share": 1 - ended,
        "answers/distinct_share": distinct / rows.response_ids.shape[0],
    }


def phase_metrics(clock: PhaseClock, device: torch.device) -> dict[str, float]:
    """Seconds (of the slowest rank), tokens per second (of all ranks) and peak memory (of the fullest) by phase.

    Collective.
    """
    seconds, tokens, peak = clock.take()
    names = sorted(seconds)
    largest = all_reduce(
        torch.tensor([[seconds[name], peak[name]] for name in names], dtype=torch.float64, device=device),
        "max",
    ).tolist()
    total = all_reduce(
        torch.tensor([tokens.get(name, 0.0) for name in names], dtype=torch.float64, device=device)
    ).tolist()
    metrics: dict[str, float] = {}
    for name, (most_seconds, most_gib), count in zip(names, largest, total, strict=True):
        metrics[f"seconds/{name}"] = most_seconds
        metrics[f"peak_memory_gib/{name}"] = most_gib
        metrics[f"tokens_per_second/{name}"] = count / max(most_seconds, 1e-9)
    return metrics
