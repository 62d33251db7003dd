"""Apply a function to every row of a data set, divided among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.progress import Progress
from dschat_ppo.data.sampler import optimizer_steps
from dschat_ppo.types import Model


@torch.no_grad()
def score_rows(
    model: Model, rows: Dataset, score: Callable[[Dataset, Sequence[int]], Tensor], batch_size: int, title: str
) -> Tensor:
    """Apply `score` to every row, with the rows divided among the ranks and without dropout. Collective.

    Args:
        model: put into eval mode, and back into training mode at the end.
        rows: at least one.
        score: `(rows, indices)` -> (len(indices), k); the lines of filler rows are ignored.
        batch_size: rows per batch and device.
        title: of the progress line.

    Returns:
        (len(rows), k) on the CPU, in the order of the rows; the same on every rank.
    """
    model.eval()
    batches = list(optimizer_steps(range(len(rows)), batch_size, 1, dist.data_ranks(), dist.data_rank()))
    parts = []
    with Progress(title, len(batches), unit="batch") as progress:
        for [indices] in batches:
            parts.append(dist.gather_data_cat(score(rows, indices)).cpu())
            heartbeat()
            progress.advance()
    model.train()
    return torch.cat(parts)[: len(rows)]  # filler rows are at the end
