"""Metrics of the experience and the phases of a PPO step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dschat_ppo.algorithms.group_statistics import groups_that_differ
from dschat_ppo.algorithms.kl import kl_k1, kl_k3
from dschat_ppo.common.dist import all_reduce
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.monitor.metric_sums import explained_variance, moments
from dschat_ppo.types import Experience


def experience_metrics(
    rows: Experience, kl_coef: float, sources: Sequence[str], data_sources: Sequence[str] = ()
) -> dict[str, float]:
    """Metrics of the experience of all ranks.

    Args:
        rows: the B rows of all ranks.
        kl_coef: weight of the KL penalty in the reward.
        sources: names of the reward sources, in the order of `source_scores`. The mean of a source is over the rows
            that it scores; their share is reported if it is below 1.
        data_sources: names of the data sets, in the order of their numbers in `data_sources` of the rows. With more
            than one, scores, lengths and KL are also those of each data set that has rows.
    """
    mask = rows.response_mask
    score_mean, score_std = moments(rows.scores)
    metrics: dict[str, float] = {
        "reward/score_mean": score_mean,
        "reward/score_std": score_std,
        "reward/score_min": float(rows.scores.min()),
        "reward/score_max": float(rows.scores.max()),
        "reward/total_mean": float(rows.rewards.sum(dim=1).mean()),
        "policy/counted_share": float(rows.loss_mask.sum() / mask.sum().clamp_min(1)),
        "policy/loss_weight_mean": moments(rows.loss_weights[mask])[0],
    }
    for name, scores in zip(sources, rows.source_scores.T, strict=True):
        scored = ~scores.isnan()  # (B,); other rows are not this source's
        if len(sources) > 1 and bool(scored.any()):
            metrics[f"reward/{name}_mean"] = float(scores[scored].mean())
        if not bool(scored.all()):
            metrics[f"reward/{name}_share"] = float(scored.float().mean())
    if rows.ref_logprobs is not None and rows.kl is not None:
        metrics["reward/kl_penalty"] = float((kl_coef * rows.kl * mask).sum(dim=1).mean())
    if rows.values is not None:
        metrics["value/explained_variance"] = explained_variance(rows.values[mask], rows.returns[mask])
    for name, values in (("advantage", rows.advantages), ("return", rows.returns), ("value", rows.values)):
        if values is not None:
            metrics[f"{name}/mean"], metrics[f"{name}/std"] = moments(values[mask])
    lengths = mask.sum(dim=1).float()  # (B, R) -> (B,)
    distinct = torch.unique(torch.where(mask, rows.response_ids, -1), dim=0).shape[0]  # rows that differ in a token
    ended = float(rows.ended.float().mean())
    metrics |= {
        "answers/count": len(rows.response_ids),
        "answers/length_mean": float(lengths.mean()),
        "answers/length_max": float(lengths.max()),
        "answers/ended_share": ended,
        "answers/cut_share": 1 - ended,
        "answers/distinct_share": distinct / rows.response_ids.shape[0],
    }
    if len(torch.unique(rows.groups)) < len(rows.groups):  # some prompt has several answers
        differ = groups_that_differ(rows.scores, rows.groups)
        metrics["reward/equal_groups_share"] = 1 - float(differ.float().mean())
    for number, name in enumerate(data_sources if len(data_sources) > 1 else ()):
        assert rows.data_sources is not None
        own = rows.data_sources == number  # (B,)
        if bool(own.any()):
            metrics[f"reward/score_mean/{name}"] = moments(rows.scores[own])[0]
            metrics[f"answers/length_mean/{name}"] = float(lengths[own].mean())
    return metrics | kl_metrics(rows, data_sources)


def kl_metrics(rows: Experience, data_sources: Sequence[str] = ()) -> dict[str, float]:
    """KL to the reference over the response tokens, and by data set; {} without a reference.

    Until old log-probs are known, those recorded while sampling stand for them. Arguments as in `experience_metrics`.
    """
    if rows.ref_logprobs is None:
        return {}
    mask, logprobs = rows.response_mask, rows.policy_logprobs
    kl = kl_k1(logprobs, rows.ref_logprobs)  # (B, R)
    metrics = {"kl/ref_k1": moments(kl[mask])[0], "kl/ref_k3": moments(kl_k3(logprobs, rows.ref_logprobs)[mask])[0]}
    for number, name in enumerate(data_sources if len(data_sources) > 1 else ()):
        assert rows.data_sources is not None
        own = rows.data_sources == number  # (B,)
        if bool(own.any()):
            metrics[f"kl/ref_k1/{name}"] = moments(kl[own][mask[own]])[0]
    return metrics


def drift_metrics(rows: Experience) -> dict[str, float]:
    """Distance between the log-probs recorded while sampling and `old_logprobs` from a training forward pass."""
    assert rows.old_logprobs is not None
    drift = (rows.rollout_logprobs - rows.old_logprobs)[rows.response_mask].abs()
    return {
        "rollout/logprob_diff_mean": moments(drift)[0],
        "rollout/logprob_diff_max": float(drift.max()) if drift.numel() else 0.0,
    }


def phase_metrics(clock: PhaseClock, device: torch.device) -> dict[str, float]:
    """By phase: seconds of the slowest rank, tokens per second of all ranks, and peak memory of the fullest rank.

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
        if count:
            metrics[f"tokens_per_second/{name}"] = count / max(most_seconds, 1e-9)
    return metrics | _allocator_metrics(device)


def _allocator_metrics(device: torch.device) -> dict[str, float]:
    """Of GPUs: memory that the fullest rank's allocator holds, and how often the most pressed one emptied its cache to
    find memory, since the start. Far more held than the peak in use means fragments. Collective."""
    if not torch.cuda.is_available():
        return {}
    found = torch.cuda.memory_stats()
    mine = [found["reserved_bytes.all.current"] / 2**30, found["num_alloc_retries"]]
    held, retries = all_reduce(torch.tensor(mine, dtype=torch.float64, device=device), "max").tolist()
    return {"memory/reserved_gib": held, "memory/alloc_retries": retries}
