"""A reward that cannot be had stops the run, on all ranks alike."""

from __future__ import annotations

from dschat_ppo.common import dist
from dschat_ppo.errors import UserError


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
    first = dist.first_problem(problem)
    if first is not None:
        raise RewardServiceError(first)
