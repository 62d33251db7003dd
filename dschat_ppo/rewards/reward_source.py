"""Reward sources: request, protocol, failures and their counts; several sources and their weights as one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger, print_line
from dschat_ppo.errors import UserError
from dschat_ppo.types import Rollout

DATA_SOURCE = "data_source"  # column: the row's own, otherwise the name of its data set


@dataclass(frozen=True)
class RewardRequest:
    """B responses to score.

    `rows`: for each the row of the data set that its prompt comes from, with all columns. `decode` gives their texts,
    once a source reads them: the prompts, and the responses without special tokens. `step`: number of finished PPO
    steps.
    """

    rows: list[dict[str, Any]]
    decode: Callable[[], tuple[list[str], list[str]]]
    step: int = 0

    @classmethod
    def of(cls, prompts: list[str], responses: list[str], rows: list[dict[str, Any]], step: int = 0) -> RewardRequest:
        """A request whose texts are known."""
        if not len(prompts) == len(responses) == len(rows):
            counts = f"{len(prompts)} prompts, {len(responses)} responses, {len(rows)} rows"
            raise ValueError(f"a reward request needs equally many of each, got {counts}")
        return cls(rows, lambda: (prompts, responses), step)

    @cached_property
    def _texts(self) -> tuple[list[str], list[str]]:
        return self.decode()

    @property
    def prompts(self) -> list[str]:
        """B texts."""
        return self._texts[0]

    @property
    def responses(self) -> list[str]:
        """B texts."""
        return self._texts[1]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, numbers: Sequence[int]) -> RewardRequest:
        """The responses with these numbers."""
        return RewardRequest.of(
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
        """(B,) fp32, on the CPU or the rollout's device. For the meaning of NaN see `HasWorkers`."""


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


MOST_NAMES = 4  # data sources that a message lists


@runtime_checkable
class HasWorkers(Protocol):
    """A reward source with worker processes. A failed call gives its response a default score and is counted.

    NaN in its scores means that it does not score the response. From any other source NaN is a numerical fault.

    `spec` is the source as the user named it; `numbers` are other numbers of its last call, see `Scores`.
    """

    spec: object
    numbers: dict[str, Tensor]

    def take_counts(self) -> CallCounts:
        """Counts of this rank since the last call of this method."""

    def close(self) -> None:
        """End the worker processes."""


@dataclass(frozen=True)
class Scores:
    """Scores of B responses, on the device of the rollout."""

    total: Tensor  # (B,) fp32, the weighted sum of the sources
    by_source: Tensor  # (B, K) fp32, unweighted; NaN where the source does not score the response
    baselines: Tensor | None = None  # (B,) fp32, the score of the greedy answer to the same prompt (ReMax)
    # "SOURCE/NAME" -> (B,) fp64 on the CPU, other numbers that functions returned; NaN where they returned none
    numbers: dict[str, Tensor] = field(default_factory=dict)


class RewardMixture:
    """`scores_i = sum_k w_k r_k(i)` over the sources k that score response i, else `default`. `sources`: (source,
    weight). A source of weight 0 is called and reported, but never enters the sum. The second source of a name is
    `name_2`."""

    def __init__(self, sources: Sequence[tuple[RewardSource, float]], default: float = 0.0):
        if not sources:
            raise ValueError("a mixture of rewards needs at least one source")
        self.sources = list(sources)
        self.default = default
        self.unscored = CallCounts()  # responses since the last count, and those that no source scored
        self.names, seen = list[str](), Counter[str]()
        for source, _ in self.sources:
            seen[source.name] += 1
            self.names.append(source.name if seen[source.name] == 1 else f"{source.name}_{seen[source.name]}")

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Scores:
        """Scores of B responses, given as text and as tokens, on the device of `rollout`, by every source. Collective.
        All ranks call the same sources in the same order. If a source fails on some rank, the others still run, because
        they may be collective; then every rank raises `RewardServiceError`."""
        device, problem = rollout.response_ids.device, None
        columns: list[Tensor] = []
        present: list[Tensor] = []  # (B,) bool each
        numbers: dict[str, Tensor] = {}
        for name, (source, _) in zip(self.names, self.sources, strict=True):
            try:
                column = source(request, rollout).to(device=device, dtype=torch.float32)
            except RewardServiceError as failure:
                problem = problem or str(failure)
                continue
            columns.append(column)
            present.append(torch.ones_like(column, dtype=torch.bool))
            if isinstance(source, Routed):
                own = [is_routed_to(source.sources, row) for row in request.rows]
                present[-1] = torch.tensor(own, dtype=torch.bool, device=device)
                columns[-1] = column.where(present[-1], torch.nan)
            elif isinstance(source, HasWorkers):
                present[-1] = ~column.isnan()
                numbers |= {f"{name}/{key}": values for key, values in source.numbers.items()}
        raise_on_any_rank(problem)
        weighted = [(weight * column).where(own, 0.0) for (_, weight), column, own
                    in zip(self.sources, columns, present, strict=True) if weight != 0]  # fmt: skip
        scores = torch.stack(weighted).sum(dim=0) if weighted else torch.zeros(len(request), device=device)
        counted = [own for (_, weight), own in zip(self.sources, present, strict=True) if weight != 0 or not weighted]
        scored = torch.stack(counted).any(dim=0)  # (B,) bool
        rows = [row for row, is_scored in zip(request.rows, scored.tolist(), strict=True) if not is_scored]
        before, cause = self.unscored, self.unscored.cause
        if rows:
            where = ", ".join(sorted({repr(row.get("data_source")) for row in rows})[:MOST_NAMES])
            cause = cause or f"data_source {where}"
            print_line(
                f"warning: rank {dist.rank()}: no reward source scored {len(rows)} of {len(request)} responses "
                f"(data_source {where}); their score is {self.default:g} (--reward_default)"
            )
        self.unscored = CallCounts(before.rows + len(request), before.failed + len(rows), cause)
        total, by_source = scores.where(scored, self.default), torch.stack(columns, dim=1)
        return Scores(total, by_source, numbers=numbers)

    def count_failed_rows(self, refuse_all: bool) -> int:
        """Responses of all ranks that got the default score since the last count, because a function failed or no
        source scored them. Collective. With `refuse_all` every rank raises `RewardFunctionError` if a function failed
        on every response that it did not leave to other sources, or if no source scored any."""
        functions = [source for source, _ in self.sources if isinstance(source, HasWorkers)]
        unscored, self.unscored = self.unscored, CallCounts()
        ranks = dist.gather_objects([*(function.take_counts() for function in functions), unscored])
        *by_function, unscored_on = zip(*ranks, strict=True)
        for function, counts in zip(functions, by_function, strict=True):
            rows = sum(on_rank.rows - on_rank.left for on_rank in counts)
            if refuse_all and rows and sum(on_rank.failed for on_rank in counts) == rows:
                cause = next(on_rank.cause for on_rank in counts if on_rank.cause)
                raise RewardFunctionError(
                    f"{function.spec}: failed on every one of the first {rows} answers; the first cause: {cause}; "
                    "correct the function, its settings or the columns of the data"
                )
            left = sum(on_rank.left for on_rank in counts)
            if refuse_all and left and not rows:
                logger().warning(f"{function.spec}: returned None for each of the first {left} answers")
        rows = sum(on_rank.rows for on_rank in unscored_on)
        if refuse_all and rows and all(on_rank.failed == on_rank.rows for on_rank in unscored_on):
            where = next(on_rank.cause for on_rank in unscored_on if on_rank.cause)
            raise RewardFunctionError(
                f"no reward source scored any of the first {rows} answers ({where}): every function returned None or "
                f"is routed to other data; correct --reward_function or the data_source of the rows"
            )
        return sum(on_rank.failed for counts in ranks for on_rank in counts)

    def close(self) -> None:
        """End the worker processes of all sources."""
        for source, _ in self.sources:
            if isinstance(source, HasWorkers):
                source.close()


class NumberMeans:
    """Accumulates this rank's numbers by name; ranks may have different names."""

    def __init__(self) -> None:
        self._parts: dict[str, list[float]] = {}  # name -> numbers of this rank

    def add(self, numbers: dict[str, Tensor]) -> None:
        """Add "SOURCE/NAME" -> (B,) fp64; NaN marks responses without this number."""
        for name, values in numbers.items():
            self._parts.setdefault(name, []).extend(values[~values.isnan()].tolist())

    def reduce(self) -> dict[str, float]:
        """Name -> mean over the responses of all ranks that have the number. Collective."""
        own = {name: (math.fsum(values), len(values)) for name, values in self._parts.items()}
        ranks = dist.gather_objects(own)
        means = {}
        for name in sorted({name for part in ranks for name in part}):
            sums, counts = zip(*(part[name] for part in ranks if name in part), strict=True)
            if sum(counts):
                means[name] = math.fsum(sums) / sum(counts)
        return means
