"""Reward sources: request, protocol, failures and their counts; several sources and their weights
as one."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.logging import print_line
from dschat_ppo.errors import StorageError, UserError, attempt
from dschat_ppo.rewards.call_forms import ResponseText
from dschat_ppo.types import Rollout

DATA_SOURCE = "data_source"  # column: the row's own, otherwise the name of its data set
MOST_NAMES = 4  # data sources that a message lists
# `reward/NAME_share` and, with several sources, `reward/NAME_mean` are metrics of the run
TAKEN_ALONE = ("equal_groups", "clipped")
TAKEN = ("equal_groups", "clipped", "score", "total")


@dataclass(frozen=True)
class RewardRequest:
    """B responses to score. `rows`: for each the row of the data set that its prompt comes from,
    with all columns. `groups`: equal for the responses to one prompt, of which there are equally
    many to each. `decode` gives texts once a source reads them: of prompts, and of responses
    without special tokens. `step`: finished PPO steps. `arguments`: for each what features give to
    functions, by the names of arguments (`MadeByWorker`, or the value itself); (): nothing."""

    rows: list[dict[str, Any]]
    groups: list[int]
    decode: Callable[[], tuple[list[str], list[ResponseText]]]
    step: int = 0
    arguments: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(
        cls,
        prompts: list[str],
        responses: list[str],
        rows: list[dict[str, Any]],
        step: int = 0,
        samples: int = 1,
    ) -> RewardRequest:
        """A request whose texts are known, for responses of one turn without thoughts, `samples` to
        a prompt."""
        texts = [ResponseText.of(response) for response in responses]
        groups = [index // samples for index in range(len(rows))]
        return cls(rows, groups, lambda: (prompts, texts), step)

    @cached_property
    def _texts(self) -> tuple[list[str], list[ResponseText]]:
        return self.decode()

    @property
    def prompts(self) -> list[str]:
        """B texts."""
        return self._texts[0]

    @property
    def texts(self) -> list[ResponseText]:
        """The B responses in all of their texts."""
        return self._texts[1]

    @property
    def responses(self) -> list[str]:
        """B texts, of all that the model wrote."""
        return [text.spoken for text in self.texts]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Sequence[int]) -> RewardRequest:
        """The responses at these indices."""
        prompts = [self.prompts[index] for index in indices]
        texts = [self.texts[index] for index in indices]
        rows = [self.rows[index] for index in indices]
        groups = [self.groups[index] for index in indices]
        arguments = [self.arguments[index] for index in indices if self.arguments]
        return RewardRequest(rows, groups, lambda: (prompts, texts), self.step, arguments)


class RewardSource(Protocol):
    """A named function from B responses, given as text and as tokens, to B scores."""

    @property
    def name(self) -> str:
        """The name of the source in metrics."""

    # an attribute `scores_elsewhere = True` says that other processes do the work, and the call is
    # not collective
    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32, on the CPU or the rollout's device. For the meaning of NaN see
        `HasWorkers`."""


class RewardServiceError(UserError):
    """A reward source returned no usable result. The message names the source and the cause."""


class RewardFunctionError(UserError):
    """A reward function failed on every response, or no source scored any. The message names count
    and cause."""


@dataclass(frozen=True)
class CallCounts:
    """How many responses a source had to score, how many of them it failed to, and the cause of the
    first failure."""

    rows: int = 0
    failed: int = 0
    cause: str | None = None

    def plus(self, rows: int, failed: int, cause: str | None) -> CallCounts:
        """With the counts of another call."""
        return CallCounts(self.rows + rows, self.failed + failed, self.cause or cause)


@dataclass(frozen=True)
class FailedRows:
    """Responses without a score of a function, or of any source."""

    faults: int = 0  # of each function: its call failed; they add up over functions
    unscored: int = 0  # every source left them to others: it returned None, or is routed elsewhere

    def plus(self, other: FailedRows) -> FailedRows:
        """With those of another count."""
        return FailedRows(self.faults + other.faults, self.unscored + other.unscored)


def raise_on_any_rank(problem: str | None) -> None:
    """Raise `RewardServiceError` on every rank, for the first problem of any. Collective. Rank 0
    prints it."""
    first = dist.first_problem(problem)
    if first is not None:
        raise RewardServiceError(first)


def is_routed_to(sources: Sequence[str], row: dict[str, Any]) -> bool:
    """Whether a source with the route `sources` scores responses to this data row. An empty route
    leads everywhere. A data source that is a number has the name that it is written with."""
    return not sources or str(row.get(DATA_SOURCE)) in sources


@runtime_checkable
class HasWorkers(Protocol):
    """A reward source with worker processes, whose calls may fail.

    NaN in its scores means that it leaves the response to other sources, which it does not count,
    or that its call failed, which it does. From any other source NaN is a numerical fault.
    """

    spec: object  # the source as the user named it
    kind: str  # what it is, for messages: "the function"
    failed: Tensor  # (B,) bool, on the CPU: the responses on which its last call failed
    numbers: dict[str, Tensor]  # other numbers of its last call, see `Scores`
    counts: CallCounts  # of this rank; whoever reads them resets them

    def close(self) -> None:
        """End the worker processes."""


@runtime_checkable
class Measures(Protocol):
    """A reward source with metrics of its own."""

    def take_metrics(self, name: str) -> dict[str, float]:
        """Metrics of all ranks since the last call; `name`: of the source in the run.
        Collective."""


@runtime_checkable
class AddsColumns(Protocol):
    """A reward source that adds columns to the rows that it scores."""

    # of features (`FEATURE_COLUMNS`) -> (B, K) on the CPU, of its last call; those of several
    # sources are side by side
    columns: dict[str, Tensor]


@dataclass(frozen=True)
class Scores:
    """Scores of B responses, on the device of the rollout."""

    total: Tensor  # (B,) fp32, the weighted sum of the sources; NaN for rows that left
    by_source: Tensor  # (B, K) fp32, unweighted; NaN where the source does not score the response
    # (B,) fp32, the score of the greedy answer to the same prompt (ReMax)
    baselines: Tensor | None = None
    # "SOURCE/NAME" -> (B,) fp64 on the CPU, other numbers that functions returned; NaN where they
    # returned none
    numbers: dict[str, Tensor] = field(default_factory=dict)
    left_group: Tensor | None = None  # (B,) bool, the rows without a score; None: there are none
    # of features, added to the rows: (B, ...)
    columns: dict[str, Tensor] = field(default_factory=dict)


def _in_thread(call: Callable[[], Tensor]) -> Future[Tensor]:
    """The result of a call in a thread that does not keep the process alive."""
    future: Future[Tensor] = Future()

    def run() -> None:
        with attempt() as tried:
            future.set_result(call())
        if tried.problem is not None:
            future.set_exception(tried.problem)

    threading.Thread(target=run, name="reward source", daemon=True).start()
    return future


def _scores_of_sources(calls: Mapping[str, Callable[[], Tensor]]) -> dict[str, Tensor]:
    """What each source scores, by its name. All are called, because they may be collective; if one
    fails on some rank, every rank raises its `RewardServiceError`, or the `StorageError` of its
    journal. Collective."""
    problem: UserError | None = None
    results = dict[str, Tensor]()
    for name, call in calls.items():
        try:
            results[name] = call()
        except (RewardServiceError, StorageError) as failure:
            problem = problem or failure
    first = next(filter(None, dist.gather_objects(problem)), None)
    if first is not None:
        raise first
    return results


class RewardMixture:
    """`scores_i = sum_k w_k r_k(i)` over the sources k that score response i. `sources`: (source,
    weight). A source of weight 0 is called and reported, but never enters the sum. The second
    source of a name is `name_2`, as is the first one of a name that the run's own metrics have.
    `routes`: its own name -> the data sources of which it scores rows, for sources without workers.

    With `default` None, a response has no score if no source scores it, if a source with a weight
    failed on it, or if it `failed` in a feature: a sum without one part is no fair rival of others.
    With a number, a source gives that to a response on which it failed, and a response that no
    source scores has it in place of the sum."""

    def __init__(
        self,
        sources: Sequence[tuple[RewardSource, float]],
        default: float | None = None,
        routes: Mapping[str, Sequence[str]] | None = None,
    ):
        self.sources = list(sources)
        self.default = default
        self.routes = routes or {}
        self.unscored = CallCounts()  # `failed`: the responses that no source scored
        self.names = list[str]()
        counts = Counter(TAKEN_ALONE)
        if len(sources) > 1:
            counts = Counter(TAKEN)
        for source, _ in self.sources:
            counts[source.name] += 1
            name = source.name
            if counts[name] > 1:
                name = f"{name}_{counts[name]}"
            self.names.append(name)

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Scores:
        """Scores of B responses, given as text and as tokens, on the device of `rollout`, by every
        source. Collective. All ranks call the same sources in the same order. If a source fails on
        some rank, the others still run, because they may be collective; then every rank raises
        `RewardServiceError`."""
        return self.begin(request, rollout)()

    def begin(self, request: RewardRequest, rollout: Rollout) -> Callable[[], Scores]:
        """Let the sources that score in other processes begin, each in a thread. The function that
        is returned calls the others, waits, and gives what a call gives. It is collective; models
        may run meanwhile.
        """
        elsewhere = dict[str, Callable[[], Tensor]]()
        here = dict[str, Callable[[], Tensor]]()
        for name, (source, _) in zip(self.names, self.sources, strict=True):
            if getattr(source, "scores_elsewhere", False):
                _ = request.prompts  # decoded once, before several threads read them
                elsewhere[name] = _in_thread(partial(source, request, rollout)).result
            else:
                here[name] = partial(source, request, rollout)
        return partial(self._scores, request, rollout, here | elsewhere)

    def _scores(
        self, request: RewardRequest, rollout: Rollout, calls: Mapping[str, Callable[[], Tensor]]
    ) -> Scores:
        device = rollout.response_ids.device
        left_group = self._failed_before(request, rollout)
        if not self.sources:  # the run learns from something else
            no_scores = torch.zeros(len(request), 0, device=device)
            return Scores(
                torch.zeros(len(request), device=device), no_scores, left_group=left_group
            )
        results = _scores_of_sources(calls)
        columns: list[Tensor] = []  # (B,) fp32 each; NaN where the source gives no score
        weighted: list[Tensor] = []  # (B,) fp32 each; 0 where the source gives no score
        scored = torch.zeros_like(left_group)  # by a source with a weight, if one has any
        metrics: dict[str, Tensor] = {}  # "SOURCE/NAME" -> (B,)
        any_weight = any(weight != 0 for _, weight in self.sources)
        for name, (source, weight) in zip(self.names, self.sources, strict=True):
            column = results[name].to(device=device, dtype=torch.float32)
            if isinstance(source, HasWorkers):
                failed = source.failed.to(device)  # (B,) bool
                if self.default is not None:
                    column = column.masked_fill(failed, self.default)
                elif weight != 0:
                    left_group |= failed
                has_score = ~column.isnan()  # (B,) bool
                metrics |= {f"{name}/{key}": values for key, values in source.numbers.items()}
            else:
                route = self.routes.get(source.name, ())
                routed = [is_routed_to(route, row) for row in request.rows]
                has_score = torch.tensor(routed, dtype=torch.bool, device=device)
            columns.append(column.where(has_score, torch.nan))
            if weight != 0:
                weighted.append((weight * column).where(has_score, 0.0))
            if weight != 0 or not any_weight:
                scored |= has_score
        self._count_unscored(request, ~(scored | left_group))
        if not weighted:  # every source has weight 0
            weighted.append(torch.zeros(len(request), device=device))
        total = torch.stack(weighted).sum(dim=0)
        if self.default is None:
            left_group |= ~scored
            total = total.masked_fill(left_group, torch.nan)
        else:
            total = total.where(scored, self.default)
        by_source = torch.stack(columns, dim=1)
        further = self._columns_of_features(device)
        return Scores(total, by_source, None, metrics, left_group, further)

    def _failed_before(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) bool, the rows that have no score because they `failed` in a feature."""
        if "failed" in rollout.extra and self.default is None:
            return rollout.extra["failed"].clone()
        device = rollout.response_ids.device
        return torch.zeros(len(request), dtype=torch.bool, device=device)

    def _columns_of_features(self, device: torch.device) -> dict[str, Tensor]:
        """The columns that sources add to the rows, on this device."""
        columns: defaultdict[str, list[Tensor]] = defaultdict(list)
        for source, _ in self.sources:
            if isinstance(source, AddsColumns):
                for name, column in source.columns.items():
                    columns[name].append(column)
        return {
            name: torch.cat(of_sources, dim=1).to(device) for name, of_sources in columns.items()
        }

    def _count_unscored(self, request: RewardRequest, unscored: Tensor) -> None:
        """Count the responses that no source scored, (B,) bool, and warn of them."""
        flags = zip(request.rows, unscored.tolist(), strict=True)
        rows = [row for row, is_unscored in flags if is_unscored]
        cause = None
        if rows:
            names = sorted({repr(row.get(DATA_SOURCE)) for row in rows})[:MOST_NAMES]
            cause = f"data_source {', '.join(names)}"
            consequence = "they leave their groups"
            if self.default is not None:
                consequence = f"their score is {self.default:g}"
            print_line(
                f"warning: rank {dist.rank()}: no reward source scored {len(rows)} of"
                f" {len(request)} responses ({cause}); {consequence} (--reward_default)"
            )
        self.unscored = self.unscored.plus(len(request), len(rows), cause)

    def count_failed_rows(self, refuse_all: bool) -> FailedRows:
        """The responses of all ranks since the last count that functions failed on, or that no
        source scored. Collective. With `refuse_all` every rank raises
        `RewardFunctionError` if a function failed on every response that it did not leave to other
        sources, or if no source scored any."""
        functions = [source for source, _ in self.sources if isinstance(source, HasWorkers)]
        ranks = dist.gather_objects([*(function.counts for function in functions), self.unscored])
        for function in functions:
            function.counts = CallCounts()
        self.unscored = CallCounts()
        *counts_of_functions, counts_of_unscored = zip(*ranks, strict=True)
        faults = 0
        for function, counts in zip(functions, counts_of_functions, strict=True):
            rows, failed, cause = _sum_of_ranks(counts)
            faults += failed
            if refuse_all and rows and failed == rows:
                raise RewardFunctionError(
                    f"{function.spec}: failed on every one of the first {rows} answers;"
                    f" the first cause: {cause}; correct {function.kind}, its settings or the"
                    " columns of the data"
                )
        rows, unscored, cause = _sum_of_ranks(counts_of_unscored)
        if refuse_all and rows and unscored == rows:
            raise RewardFunctionError(
                f"no reward source scored any of the first {rows} answers ({cause}): every"
                " source left them to others (it returned None, or is routed to other data);"
                " correct the sources, their routes or the data_source of the rows"
            )
        return FailedRows(faults, unscored)

    def take_metrics(self) -> dict[str, float]:
        """What sources measured since the last call, of all ranks. Collective."""
        metrics = dict[str, float]()
        for name, (source, _) in zip(self.names, self.sources, strict=True):
            if isinstance(source, Measures):
                metrics |= source.take_metrics(name)
        return metrics

    def close(self) -> None:
        """End the worker processes of all sources."""
        for source, _ in self.sources:
            if isinstance(source, HasWorkers):
                source.close()


def _sum_of_ranks(counts_of_ranks: Sequence[CallCounts]) -> tuple[int, int, str | None]:
    """The rows and failed rows of all ranks, and the first cause of any."""
    rows = sum(counts.rows for counts in counts_of_ranks)
    failed = sum(counts.failed for counts in counts_of_ranks)
    cause = next((counts.cause for counts in counts_of_ranks if counts.cause), None)
    return rows, failed, cause


def number_means(rounds: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """ "SOURCE/NAME" -> mean over all responses, of all ranks, that have it. `rounds`: the
    `Scores.numbers` of each round of this rank; NaN where a response has none. Collective."""
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for columns_of_round in rounds:
        for name, column in columns_of_round.items():
            columns[name] += column[~column.isnan()].tolist()
    sums = {name: (math.fsum(column), len(column)) for name, column in columns.items() if column}
    totals: defaultdict[str, list[float]] = defaultdict(list)
    counts: defaultdict[str, int] = defaultdict(int)
    for sums_of_rank in dist.gather_objects(sums):
        for name, (total, count) in sums_of_rank.items():
            totals[name].append(total)
            counts[name] += count
    return {name: math.fsum(totals[name]) / counts[name] for name in sorted(totals)}
