"""Histograms of a PPO step for trackers."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from dschat_ppo.monitor.trackers import Histogram
from dschat_ppo.types import Experience

RATIO = "policy/ratio"
# Of the policy ratio: narrow around 1, where most ratios are; the last bucket also holds those above it.
RATIO_EDGES = (
    0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 1.001, 1.002, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5,
    2.0, 10.0,
)  # fmt: skip
_BUCKETS = 50


@cache
def _on_device(edges: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The edges as a tensor: copying numbers to a GPU waits for it, so that it happens once."""
    return torch.tensor(edges, dtype=dtype, device=device)


def bucket_counts(values: Tensor, mask: Tensor, edges: tuple[float, ...]) -> Tensor:
    """How many `values` are in each bucket, fp64 (n,), on their device. Only the first call waits for it.

    Args:
        values: of any shape; those below the first edge and above the last one are in the outer buckets.
        mask: the same shape, bool; values count where it is True.
        edges: n + 1 ascending numbers; bucket i is `[edges[i], edges[i + 1])`.
    """
    buckets = torch.bucketize(values.detach(), _on_device(edges[1:-1], values.dtype, values.device), right=True)
    counts = torch.zeros(len(edges) - 1, dtype=torch.float64, device=values.device)
    return counts.index_add_(0, buckets.flatten(), mask.flatten().double())


def experience_histograms(rows: Experience) -> dict[str, Histogram]:
    """Advantages of the tokens that the policy loss counts, and response lengths in tokens, of all B rows."""
    return {
        "policy/advantage": _histogram(rows.advantages[rows.loss_mask]),
        "rollout/length": _histogram(rows.response_mask.sum(dim=1)),
    }


def _histogram(values: Tensor) -> Histogram:
    """50 buckets of equal width from the least to the greatest of the values (n,)."""
    counts, edges = np.histogram(values.double().cpu().numpy(), bins=_BUCKETS)
    return Histogram(edges.tolist(), counts.tolist())
