"""Metrics of the experience of a PPO step."""

from __future__ import annotations

from torch import Tensor

from dschat_ppo.algorithms.kl import kl_k1
from dschat_ppo.monitor.metric_sums import mean_and_std
from dschat_ppo.types import Experience


def scalars_of(rows: Experience) -> dict[str, Tensor]:
    """The share of the rows that a teacher teaches, and the KL from it over their tokens."""
    scalars: dict[str, Tensor] = {}
    taught_tokens = rows.response_mask
    if "teachers" in rows.extra:
        taught_rows = rows.extra["teachers"] >= 0
        scalars["distill/taught_share"] = taught_rows.float().mean()
        taught_tokens = taught_tokens & taught_rows.unsqueeze(1)
    if "teacher_logprobs" in rows.extra:
        kl = kl_k1(rows.policy_logprobs, rows.extra["teacher_logprobs"])  # (B, R)
        scalars["distill/kl_k1"] = mean_and_std(kl[taught_tokens])[0]
    return scalars
