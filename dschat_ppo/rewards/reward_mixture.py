"""Several sources of reward and their weights as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.rewards.reward_source import (
    Calls,
    RewardFunctionError,
    RewardRequest,
    RewardServiceError,
    RewardSource,
    raise_on_any_rank,
)
from dschat_ppo.types import Rollout


@runtime_checkable
class HasWorkers(Protocol):
    """A source with processes of its own, whose failures cost rows and are counted.

    `spec` names it as the user did.
    """

    spec: object

    def take_counts(self) -> Calls:
        """What became of this rank's rows since the last time that this was asked."""

    def close(self) -> None:
        """End the processes."""


@dataclass(frozen=True)
class MixedScores:
    """`scores` (B,) fp32, the weighted sum; `by_source` (B, K) fp32, what each source gave, unweighted."""

    scores: Tensor
    by_source: Tensor


class RewardMixture:
    """`scores_i = sum_k w_k r_k(i)` over the sources k.

    Args:
        sources: (source, weight) pairs. A weight of 0 asks the source but leaves it out of the sum, whatever it gives.
    """

    def __init__(self, sources: Sequence[tuple[RewardSource, float]]):
        if not sources:
            raise ValueError("a mixture of rewards needs at least one source")
        self.sources = list(sources)

    @property
    def names(self) -> list[str]:
        """Names of the sources, in order; the second of one name is `name_2`."""
        seen, names = Counter[str](), list[str]()
        for source, _ in self.sources:
            seen[source.name] += 1
            names.append(source.name if seen[source.name] == 1 else f"{source.name}_{seen[source.name]}")
        return names

    def __call__(self, request: RewardRequest, rollout: Rollout) -> MixedScores:
        """Ask every source. Collective: all ranks ask the same sources in the same order.

        Args:
            request: B rows as text.
            rollout: the same rows as tokens; results are on its device.

        Raises:
            RewardServiceError: a source cannot be had on some rank. The others are asked all the same, because they may
                be collective, and then every rank raises.
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
        return MixedScores(scores, torch.stack(columns, dim=1))

    def count_failed_rows(self, refuse_all: bool) -> int:
        """Rows of all ranks that got a function's default score since the last count. Collective.

        Args:
            refuse_all: a function that failed on every row of every rank is an error.

        Raises:
            RewardFunctionError: there is such a function; the same text on every rank, because rank 0 alone prints it.
        """
        functions = [source for source, _ in self.sources if isinstance(source, HasWorkers)]
        ranks = dist.gather_objects([function.take_counts() for function in functions])
        for function, calls in zip(functions, zip(*ranks, strict=True), strict=True):
            rows = sum(on_rank.rows for on_rank in calls)
            if refuse_all and rows and all(on_rank.failed == on_rank.rows for on_rank in calls):
                cause = next(on_rank.cause for on_rank in calls if on_rank.cause)
                raise RewardFunctionError(
                    f"{function.spec}: failed on every one of the first {rows} answers; the first cause: {cause}; "
                    "mend the function, its settings or the columns of the data"
                )
        return sum(on_rank.failed for calls in ranks for on_rank in calls)

    def close(self) -> None:
        """End the processes of all sources."""
        for source, _ in self.sources:
            if isinstance(source, HasWorkers):
                source.close()
