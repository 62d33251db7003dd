"""Metrics of the experience and the phases of a PPO step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dschat_ppo.algorithms.groups import groups_that_differ
from dschat_ppo.algorithms.kl import kl_k1, kl_k3
from dschat_ppo.common.dist import gather_cat
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.monitor.metric_sums import explained_variance, mean_and_std, read
from dschat_ppo.types import Experience


def experience_metrics(  # noqa: C901
    rows: Experience,
    kl_coef: float,
    sources: Sequence[str],
    data_sources: Sequence[str] = (),
    clip: tuple[Tensor, Tensor] | None = None,
) -> dict[str, float]:
    """Metrics of the experience of all ranks.

    Args:
        sources: names of the reward sources, in the order of `source_scores`; without any there are
            no metrics of scores. The mean of a source is over the rows that it scores; their share
            is reported if it is below 1.
        data_sources: names of the data sets, in the order of their numbers in `data_sources` of the
            rows. With more than one, scores, lengths and KL are also those of each data set that
            has rows.
        clip: scores (B,) before and after they are clipped; None: they are not.
    """
    mask = rows.response_mask
    kept = _real_tokens(mask)
    lengths, ended = mask.sum(dim=1).float(), rows.ended.float().mean()  # (B,) and a scalar
    found: dict[str, Tensor] = {
        "reward/total_mean": rows.rewards.sum(dim=1).mean(),
        "policy/counted_share": rows.loss_mask.sum() / mask.sum().clamp_min(1),
        "policy/loss_weight_mean": mean_and_std(kept(rows.loss_weights))[0],
        "rollout/length_mean": lengths.mean(),
        "rollout/length_max": lengths.max(),
        "rollout/ended_share": ended,
    }
    if sources:
        found |= {"reward/score_min": rows.scores.min(), "reward/score_max": rows.scores.max()}
        found["reward/score_mean"], found["reward/score_std"] = mean_and_std(rows.scores)
    if rows.teachers is not None:
        found["distill/taught_share"] = (rows.teachers >= 0).float().mean()
    if rows.teacher_logprobs is not None:
        if rows.teachers is None:
            taught = mask
        else:
            taught = mask & (rows.teachers >= 0).unsqueeze(1)
        found["distill/kl_k1"] = mean_and_std(
            kl_k1(rows.policy_logprobs, rows.teacher_logprobs)[taught]
        )[0]
    if clip is not None:
        found["reward/clipped_share"] = (clip[0] != clip[1]).double().mean()
        found["reward/clipped_std"] = mean_and_std(clip[1])[1]
    for name, scores in zip(sources, rows.source_scores.T, strict=True):
        scored = ~scores.isnan()  # (B,); other rows are not this source's
        found[f"reward/{name}_share"] = scored.float().mean()
        if len(sources) > 1:
            found[f"reward/{name}_mean"], found[f"reward/{name}_std"] = mean_and_std(scores[scored])
    if rows.ref_logprobs is not None and rows.kl is not None:
        found["reward/kl_penalty"] = (kl_coef * rows.kl * mask).sum(dim=1).mean()
    if rows.values is not None:
        found["value/explained_variance"] = explained_variance(
            kept(rows.values), kept(rows.returns)
        )
    spread = {
        "policy/advantage_": rows.advantages,
        "value/return_": rows.returns,
        "value/": rows.values,
    }
    for name, values in spread.items():
        if values is not None:
            found[f"{name}mean"], found[f"{name}std"] = mean_and_std(kept(values))
    # some prompt has several answers
    if sources and len(torch.unique(rows.groups)) < len(rows.groups):
        differ = groups_that_differ(rows.scores if clip is None else clip[1], rows.groups)
        found["reward/equal_groups_share"] = 1 - differ.float().mean().double()
    for name, own in _rows_by_data_set(rows, data_sources):
        if sources:
            found[f"reward/score_mean/{name}"] = mean_and_std(rows.scores[own])[0]
        found[f"rollout/length_mean/{name}"] = lengths[own].mean()
    metrics = read(found | _kl(rows, data_sources))
    for name in sources:  # the share is of interest where a source does not score all rows
        if metrics[f"reward/{name}_share"] == 1:
            del metrics[f"reward/{name}_share"]
        elif metrics[f"reward/{name}_share"] == 0:
            for statistic in ("mean", "std"):
                metrics.pop(f"reward/{name}_{statistic}", None)
    # rows that differ in a token
    distinct = torch.unique(torch.where(mask, rows.response_ids, -1), dim=0).shape[0]
    return metrics | {
        "rollout/count": len(rows.response_ids),
        "rollout/cut_share": 1 - metrics["rollout/ended_share"],
        "rollout/distinct_share": distinct / rows.response_ids.shape[0],
    }


def _real_tokens(mask: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that selects the values (B, R) where `mask` is True, row after row; their number
    is found once."""
    places = mask.flatten().nonzero().squeeze(1)  # (n,)
    return lambda values: values.flatten()[places]


def _rows_by_data_set(
    rows: Experience, data_sources: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Name and rows (B,) bool of each data set that has rows, if there are several data sets."""
    if len(data_sources) > 1:
        assert rows.data_sources is not None
        present = set(rows.data_sources.tolist())
        for index, name in enumerate(data_sources):
            if index in present:
                yield name, rows.data_sources == index


def kl_metrics(rows: Experience, data_sources: Sequence[str] = ()) -> dict[str, float]:
    """KL to the reference over the response tokens, and by data set; {} without a reference. Until
    old log-probs are known, those recorded while sampling stand for them."""
    return read(_kl(rows, data_sources))


def _kl(rows: Experience, data_sources: Sequence[str]) -> dict[str, Tensor]:
    if rows.ref_logprobs is None:
        return {}
    mask = rows.response_mask
    logprobs = rows.policy_logprobs
    kept, kl = _real_tokens(mask), kl_k1(logprobs, rows.ref_logprobs)  # kl: (B, R)
    found = {
        "kl/ref_k1": mean_and_std(kept(kl))[0],
        "kl/ref_k3": mean_and_std(kept(kl_k3(logprobs, rows.ref_logprobs)))[0],
    }
    for name, own in _rows_by_data_set(rows, data_sources):
        found[f"kl/ref_k1/{name}"] = mean_and_std(kl[own][mask[own]])[0]
    return found


def drift_metrics(rows: Experience) -> dict[str, float]:
    """Distance between the log-probs recorded while sampling and `old_logprobs` from a training
    forward pass."""
    assert rows.old_logprobs is not None
    drift = (rows.rollout_logprobs - rows.old_logprobs)[rows.response_mask].abs()
    if drift.numel():
        largest = drift.max()
    else:
        largest = torch.zeros((), device=drift.device)
    return read(
        {"rollout/logprob_diff_mean": mean_and_std(drift)[0], "rollout/logprob_diff_max": largest}
    )


def phase_metrics(clock: PhaseClock, device: torch.device) -> dict[str, float]:
    """By phase: seconds of the slowest rank, tokens per second of all ranks, and peak memory of the
    fullest rank; of a part of a phase (`score/critic`) the seconds alone. With several ranks also
    the imbalance of a phase: seconds, and tokens if they are counted, of the rank with the most
    over the mean of the ranks; 1 means that all have the same. Collective."""
    seconds, tokens, peak = clock.take()
    names = sorted(seconds)
    mine = [[seconds[name], peak.get(name, 0.0), tokens.get(name, 0.0)] for name in names]
    # (ranks, phases, 3)
    ranks = gather_cat(torch.tensor([mine], dtype=torch.float64, device=device))
    largest = ranks.amax(dim=0).tolist()
    total = ranks.sum(dim=0).tolist()
    metrics: dict[str, float] = {}
    for name, (most_seconds, most_gib, most_tokens), (all_seconds, _, count) in zip(
        names, largest, total, strict=True
    ):
        metrics[f"time/{name}"] = most_seconds
        if name not in peak:  # a model's part of a phase
            continue
        metrics[f"memory/{name}_peak_gib"] = most_gib
        if count:
            metrics[f"time/{name}_tokens_per_s"] = count / max(most_seconds, 1e-9)
        if len(ranks) > 1:
            metrics[f"time/{name}_imbalance"] = most_seconds * len(ranks) / max(all_seconds, 1e-9)
            if count and name != "train":  # whose tokens are counted as the mean of the ranks
                metrics[f"time/{name}_tokens_imbalance"] = most_tokens * len(ranks) / count
    return metrics
