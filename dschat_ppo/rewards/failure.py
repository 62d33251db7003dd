"""A reward that cannot be had stops the run, on all ranks alike."""

from __future__ import annotations

import torch

from dschat_ppo.common import dist
from dschat_ppo.errors import UserError

_MESSAGE_BYTES = 2000


class RewardServiceError(UserError):
    """A reward service gave no usable answer. The message names it, the attempts and the last cause."""


def agree_on_failure(problem: str | None) -> None:
    """Raise on every rank if any rank has a problem. Collective.

    Args:
        problem: what went wrong on this rank; None: nothing.

    Raises:
        RewardServiceError: with the problem of the first rank that has one, the same text on every rank, because rank 0
            alone prints it.
    """
    if dist.world_size() == 1:
        if problem is not None:
            raise RewardServiceError(problem)
        return
    text = (problem or "").encode()[:_MESSAGE_BYTES]
    mine = torch.zeros(1, _MESSAGE_BYTES, dtype=torch.uint8)
    mine[0, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    for row in dist.gather_cat(mine.to(dist.device())).cpu():
        message = bytes(row[row > 0].tolist()).decode(errors="replace")
        if message:
            raise RewardServiceError(message)
