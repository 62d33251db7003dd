"""A reward source that scores only the rows of some data sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from dschat_ppo.rewards.reward_source import RewardRequest, RewardSource
from dschat_ppo.types import Rollout

DATA_SOURCE = "data_source"  # column: the row's own, otherwise the name of its data set


@runtime_checkable
class Routed(Protocol):
    """A source with a route. Its scores of other rows have no meaning."""

    sources: Sequence[str]


def is_routed_to(sources: Sequence[str], row: dict[str, Any]) -> bool:
    """Whether a source with the route `sources` scores responses to this data row. An empty route leads everywhere.

    A data source that is a number has the name that it is written with.
    """
    return not sources or str(row.get(DATA_SOURCE)) in sources


class RoutedReward:
    """The learned reward with a route. It is called for all rows, because it is collective.

    Args:
        source: the learned reward.
        sources: data sources whose rows it scores.
    """

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
