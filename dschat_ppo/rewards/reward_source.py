"""The interface of reward sources: request, protocol, failures and their counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.errors import UserError
from dschat_ppo.types import Rollout

DATA_SOURCE = "data_source"  # column: the row's own, otherwise the name of its data set


@dataclass(frozen=True)
class RewardRequest:
    """B responses to score, as text.

    `prompts` and `responses`: B texts each; responses without special tokens. `rows`: for each prompt the row of the
    data set that it comes from, with all columns. `step`: number of finished PPO steps.
    """

    prompts: list[str]
    responses: list[str]
    rows: list[dict[str, Any]]
    step: int = 0

    def __post_init__(self) -> None:
        if not len(self.prompts) == len(self.responses) == len(self.rows):
            counts = f"{len(self.prompts)} prompts, {len(self.responses)} responses, {len(self.rows)} rows"
            raise ValueError(f"a reward request needs equally many of each, got {counts}")

    def __len__(self) -> int:
        return len(self.responses)

    def select(self, numbers: Sequence[int]) -> RewardRequest:
        """The responses with these numbers."""
        return RewardRequest(
            [self.prompts[number] for number in numbers],
            [self.responses[number] for number in numbers],
            [self.rows[number] for number in numbers],
            self.step,
        )


class RewardSource(Protocol):
    """A named function from B responses, given as text and as tokens, to B scores."""

    @property
    def name(self) -> str:
        """The name of the source in metrics."""

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32, on the CPU or the rollout's device. For the meaning of NaN see `reward_mixture.HasWorkers`."""


class RewardServiceError(UserError):
    """A reward source returned no usable result. The message names the source and the cause."""


class RewardFunctionError(UserError):
    """A reward function failed on every response, or no source scored any. The message names count and cause."""


@dataclass(frozen=True)
class CallCounts:
    """How many responses a function was called for, how many of these calls failed, the cause of the first, and how
    many responses it left to other sources by returning None."""

    rows: int = 0
    failed: int = 0
    cause: str | None = None
    left: int = 0


def raise_on_any_rank(problem: str | None) -> None:
    """Raise `RewardServiceError` on every rank, with the text of the first rank that has a problem, if any. Collective.
    The texts are the same because only rank 0 prints it."""
    first = dist.first_problem(problem)
    if first is not None:
        raise RewardServiceError(first)


@runtime_checkable
class Routed(Protocol):
    """A source with a route. Its scores of other rows have no meaning."""

    sources: Sequence[str]


def is_routed_to(sources: Sequence[str], row: dict[str, Any]) -> bool:
    """Whether a source with the route `sources` scores responses to this data row. An empty route leads everywhere. A
    data source that is a number has the name that it is written with."""
    return not sources or str(row.get(DATA_SOURCE)) in sources


class RoutedReward:
    """The learned reward for the rows of `sources` only. It is called for all rows, because it is collective."""

    def __init__(self, source: RewardSource, sources: Sequence[str]):
        self.source = source
        self.sources = sources

    @property
    def name(self) -> str:
        """The name of the source."""
        return self.source.name

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32. Collective."""
        return self.source(request, rollout)
