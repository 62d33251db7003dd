"""Metrics of the experience and the phases of a PPO step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dschat_ppo.algorithms.groups import groups_that_differ
from dschat_ppo.algorithms.kl import kl_k1, kl_k3
from dschat_ppo.common.dist import gather_cat
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.features import hooks
from dschat_ppo.monitor.metric_sums import explained_variance, mean_and_std, read_scalars
from dschat_ppo.types import Experience


def experience_metrics(
    rows: Experience,
    kl_coef: float,
    sources: Sequence[str],
    data_sources: Sequence[str] = (),
    clip: tuple[Tensor, Tensor] | None = None,
    magnitudes: Tensor | None = None,
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
        magnitudes: (B,) fp64, sizes of the numbers that the scores were added up from; None: those
            of the scores.
    """
    mask = rows.response_mask
    tokens = _real_tokens(mask)
    lengths = mask.sum(dim=1).float()  # (B,)
    scalars: dict[str, Tensor] = {
        "reward/total_mean": rows.rewards.sum(dim=1).mean(),
        "policy/counted_share": rows.loss_mask.sum() / mask.sum().clamp_min(1),
        "policy/loss_weight_mean": mean_and_std(rows.loss_weights.flatten()[tokens])[0],
        "rollout/length_mean": lengths.mean(),
        "rollout/length_max": lengths.max(),
        "rollout/ended_share": rows.ended.float().mean(),
    }
    if sources:
        scalars["reward/score_min"] = rows.scores.min()
        scalars["reward/score_max"] = rows.scores.max()
        scalars |= _spread_metrics("reward/score_", rows.scores)
    for scalars_of in hooks("experience_metrics.scalars_of"):  # of features: (rows) -> scalars
        scalars |= scalars_of(rows)
    final_scores = rows.scores
    if clip is not None:
        scores_before, final_scores = clip
        scalars["reward/clipped_share"] = (scores_before != final_scores).double().mean()
        scalars["reward/clipped_std"] = mean_and_std(final_scores)[1]
    scalars |= _source_metrics(rows, sources)
    if rows.ref_logprobs is not None and rows.kl is not None:
        scalars["reward/kl_penalty"] = (kl_coef * rows.kl * mask).sum(dim=1).mean()
    scalars |= _token_metrics(rows, tokens)
    # some prompt has several responses
    if sources and len(torch.unique(rows.groups)) < len(rows.groups):
        differ = groups_that_differ(final_scores, rows.groups, magnitudes)
        scalars["reward/equal_groups_share"] = 1 - differ.float().mean().double()
    for name, members in _rows_by_data_set(rows, data_sources):
        if sources:
            scalars[f"reward/score_mean/{name}"] = mean_and_std(rows.scores[members])[0]
        scalars[f"rollout/length_mean/{name}"] = lengths[members].mean()
    metrics = read_scalars(scalars | _kl(rows, data_sources))
    _keep_partial_sources(metrics, sources)
    # rows that differ in a token
    distinct = torch.unique(torch.where(mask, rows.response_ids, -1), dim=0).shape[0]
    return metrics | {
        "rollout/count": len(rows.response_ids),
        "rollout/cut_share": 1 - metrics["rollout/ended_share"],
        "rollout/distinct_share": distinct / rows.response_ids.shape[0],
    }


def _source_metrics(rows: Experience, sources: Sequence[str]) -> dict[str, Tensor]:
    """The share of the rows that each reward source scores, and with several sources the mean and
    spread of its scores."""
    scalars: dict[str, Tensor] = {}
    for name, scores in zip(sources, rows.source_scores.T, strict=True):
        scored = ~scores.isnan()  # (B,)
        scalars[f"reward/{name}_share"] = scored.float().mean()
        if len(sources) > 1:
            scalars |= _spread_metrics(f"reward/{name}_", scores[scored])
    return scalars


def _keep_partial_sources(metrics: dict[str, float], sources: Sequence[str]) -> None:
    """Remove the share of a source that scores all rows, and mean and spread of one that scores
    none."""
    for name in sources:
        share = metrics[f"reward/{name}_share"]
        if share == 1:
            del metrics[f"reward/{name}_share"]
        elif share == 0:
            metrics.pop(f"reward/{name}_mean", None)
            metrics.pop(f"reward/{name}_std", None)


def _token_metrics(rows: Experience, tokens: Tensor) -> dict[str, Tensor]:
    """Mean and spread of advantages, returns and values over the `tokens` of `_real_tokens`, and
    how well the values predict the returns."""
    scalars: dict[str, Tensor] = {}
    returns = rows.returns.flatten()[tokens]
    if rows.values is not None:
        values = rows.values.flatten()[tokens]
        scalars["value/explained_variance"] = explained_variance(values, returns)
    scalars |= _spread_metrics("policy/advantage_", rows.advantages.flatten()[tokens])
    scalars |= _spread_metrics("value/return_", returns)
    if rows.values is not None:
        scalars |= _spread_metrics("value/", values)
    return scalars


def _spread_metrics(prefix: str, values: Tensor) -> dict[str, Tensor]:
    mean, std = mean_and_std(values)
    return {f"{prefix}mean": mean, f"{prefix}std": std}


def _real_tokens(mask: Tensor) -> Tensor:
    """(n,) int64, where `mask` (B, R) is True, as indices into a flattened (B, R) tensor; the host
    waits for their count once."""
    return mask.flatten().nonzero().squeeze(1)


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
    return read_scalars(_kl(rows, data_sources))


def _kl(rows: Experience, data_sources: Sequence[str]) -> dict[str, Tensor]:
    """`kl_metrics`, still on the device."""
    if rows.ref_logprobs is None:
        return {}
    mask = rows.response_mask
    tokens = _real_tokens(mask)
    logprobs = rows.policy_logprobs
    k1 = kl_k1(logprobs, rows.ref_logprobs)  # (B, R)
    k3 = kl_k3(logprobs, rows.ref_logprobs)
    scalars = {
        "kl/ref_k1": mean_and_std(k1.flatten()[tokens])[0],
        "kl/ref_k3": mean_and_std(k3.flatten()[tokens])[0],
    }
    for name, members in _rows_by_data_set(rows, data_sources):
        scalars[f"kl/ref_k1/{name}"] = mean_and_std(k1[members][mask[members]])[0]
    return scalars


def drift_metrics(rows: Experience) -> dict[str, float]:
    """Distance between the log-probs recorded while sampling and `old_logprobs` from a training
    forward pass."""
    assert rows.old_logprobs is not None
    drift = (rows.rollout_logprobs - rows.old_logprobs)[rows.response_mask].abs()
    largest = torch.zeros((), device=drift.device)
    if drift.numel():
        largest = drift.max()
    mean = mean_and_std(drift)[0]
    return read_scalars({"rollout/logprob_diff_mean": mean, "rollout/logprob_diff_max": largest})


def phase_metrics(clock: PhaseClock, device: torch.device) -> dict[str, float]:
    """By phase: seconds of the slowest rank, tokens per second of all ranks, and peak memory of the
    fullest rank; of a part of a phase (`score/critic`) the seconds alone. With several ranks also
    the imbalance of a phase: seconds, and tokens if they are counted, of the rank with the most
    over the mean of the ranks; 1 means that all have the same. Collective."""
    seconds, tokens, peak = clock.take()
    names = sorted(seconds)
    of_rank = [[seconds[name], peak.get(name, 0.0), tokens.get(name, 0.0)] for name in names]
    # (ranks, phases, 3)
    ranks = gather_cat(torch.tensor([of_rank], dtype=torch.float64, device=device))
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
