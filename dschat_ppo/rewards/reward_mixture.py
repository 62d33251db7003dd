"""Several reward sources and their weights as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.rewards.reward_source import (
    CallCounts,
    RewardFunctionError,
    RewardRequest,
    RewardServiceError,
    RewardSource,
    raise_on_any_rank,
)
from dschat_ppo.types import Rollout


@runtime_checkable
class HasWorkers(Protocol):
    """A reward source with worker processes. A failed call gives its response a default score and is counted.

    `spec` is the source as the user named it.
    """

    spec: object

    def take_counts(self) -> CallCounts:
        """Counts of this rank since the last call of this method."""

    def close(self) -> None:
        """End the worker processes."""


@dataclass(frozen=True)
class MixedScores:
    """`scores` (B,) fp32, the weighted sum; `by_source` (B, K) fp32, the unweighted scores of each source."""

    scores: Tensor
    by_source: Tensor


class RewardMixture:
    """`scores_i = sum_k w_k r_k(i)` over the sources k.

    Args:
        sources: (source, weight) pairs. A source of weight 0 is called and reported, but never enters the sum.
    """

    def __init__(self, sources: Sequence[tuple[RewardSource, float]]):
        if not sources:
            raise ValueError("a mixture of rewards needs at least one source")
        self.sources = list(sources)

    @property
    def names(self) -> list[str]:
        """Names of the sources, in order; the second source of a name is `name_2`."""
        seen, names = Counter[str](), list[str]()
        for source, _ in self.sources:
            seen[source.name] += 1
            names.append(source.name if seen[source.name] == 1 else f"{source.name}_{seen[source.name]}")
        return names

    def __call__(self, request: RewardRequest, rollout: Rollout) -> MixedScores:
        """Call every source. Collective: all ranks call the same sources in the same order.

        Args:
            request: B responses as text.
            rollout: the same responses as tokens; results are on its device.

        Raises:
            RewardServiceError: a source failed on some rank. The remaining sources still run, because they may be
                collective; then every rank raises.
        """
        device, problem = rollout.response_ids.device, None
        columns: list[Tensor] = []
        for source, _ in self.sources:
            try:
                columns.append(source(request, rollout).to(device=device, dtype=torch.float32))
            except RewardServiceError as failure:
                problem = problem or str(failure)
        raise_on_any_rank(problem)
        weighted = [weight * column for (_, weight), column in zip(self.sources, columns, strict=True) if weight != 0]
        scores = torch.stack(weighted).sum(dim=0) if weighted else torch.zeros(len(request), device=device)
        return MixedScores(scores, torch.stack(columns, dim=1))  # (B,), (B, K)

    def count_failed_rows(self, refuse_all: bool) -> int:
        """Responses of all ranks that got a function's default score since the last count. Collective.

        Args:
            refuse_all: raise if a function failed on every response of every rank.

        Raises:
            RewardFunctionError: see `refuse_all`. Every rank raises the same text, because only rank 0 prints it.
        """
        functions = [source for source, _ in self.sources if isinstance(source, HasWorkers)]
        ranks = dist.gather_objects([function.take_counts() for function in functions])
        for function, counts in zip(functions, zip(*ranks, strict=True), strict=True):
            rows = sum(on_rank.rows for on_rank in counts)
            if refuse_all and rows and all(on_rank.failed == on_rank.rows for on_rank in counts):
                cause = next(on_rank.cause for on_rank in counts if on_rank.cause)
                raise RewardFunctionError(
                    f"{function.spec}: failed on every one of the first {rows} answers; the first cause: {cause}; "
                    "correct the function, its settings or the columns of the data"
                )
        return sum(on_rank.failed for counts in ranks for on_rank in counts)

    def close(self) -> None:
        """End the worker processes of all sources."""
        for source, _ in self.sources:
            if isinstance(source, HasWorkers):
                source.close()
