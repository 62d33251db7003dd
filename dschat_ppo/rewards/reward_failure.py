"""A reward that cannot be had stops the run, on all ranks alike."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.common import dist
from dschat_ppo.errors import UserError


class RewardServiceError(UserError):
    """A source of reward gave no usable answer. The message names the source and the cause."""


class RewardFunctionError(UserError):
    """A reward function failed on every row that it was given. The message names it, the rows and the first cause."""


@dataclass(frozen=True)
class Calls:
    """What became of the rows that a function was given: how many, how many it failed on, and the first cause."""

    rows: int = 0
    failed: int = 0
    cause: str | None = None


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
