"""What a source of reward is asked, and what a source is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.errors import UserError
from dschat_ppo.types import Rollout


@dataclass(frozen=True)
class RewardRequest:
    """Rows to be scored, as text.

    `prompts` and `responses`: B texts each, special tokens left out of responses. `rows`: B rows of the data set, every
    column of the row that each prompt came from.
    """

    prompts: list[str]
    responses: list[str]
    rows: list[dict[str, Any]]

    def __post_init__(self) -> None:
        if not len(self.prompts) == len(self.responses) == len(self.rows):
            counts = f"{len(self.prompts)} prompts, {len(self.responses)} responses, {len(self.rows)} rows"
            raise ValueError(f"a reward request needs as many of each, got {counts}")

    def __len__(self) -> int:
        return len(self.responses)


class RewardSource(Protocol):
    """Anything with a name that turns the same rows, as text and as tokens, into one score each."""

    @property
    def name(self) -> str:
        """Under which the source's scores are reported."""

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32, on the CPU or the rollout's device."""


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


def raise_on_any_rank(problem: str | None) -> None:
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
