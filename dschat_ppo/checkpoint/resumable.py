"""What can be saved and gone on from, and when it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dschat_ppo.common.logging import logger
from dschat_ppo.types import Engine


@dataclass(frozen=True)
class RankStates:
    """What `rank_state` gave on each rank of the saved run; files that may be large.

    `own` is this rank's, or None where the run was saved on another number of ranks. `read_all` reads those of all its
    ranks, from rank 0 on, one at a time: for whoever has to divide anew what was divided among them.
    """

    own: dict[str, Any] | None
    read_all: Callable[[], Iterator[dict[str, Any]]]


def load_saved(what: str, state: Any, load: Callable[[Any], object]) -> None:
    """Let a part of a trainer that is on now go on from its saved state.

    It has none where it was off when the checkpoint was saved (`--resume_force`); then it stays as it was built, and
    that is said.

    Args:
        what: the flag that turns it on.
        state: None or empty where there is none.
        load: takes the state.
    """
    if state:
        load(state)
    else:
        say_it_begins_anew(what)


def say_it_begins_anew(what: str) -> None:
    """Log that the checkpoint knows nothing of what this flag turns on."""
    logger().info(f"{what}: was off when the checkpoint was saved, so it begins anew")


class Resumable(Protocol):
    """A trainer whose state is saved between two optimizer steps."""

    @property
    def engines_to_save(self) -> Mapping[str, Engine]:
        """Role -> DeepSpeed engine that trains."""

    @property
    def position(self) -> tuple[int, int]:
        """Steps done, and updates done of the step in flight (0 between two steps)."""

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation, at this position, is the best so far."""

    def shared_state(self) -> dict[str, Any]:
        """What all ranks have in common, as nested dicts and lists of tensors, texts and numbers."""

    def rank_state(self) -> dict[str, Any]:
        """What this rank alone has."""

    def load_state(self, shared: dict[str, Any], ranks: RankStates) -> None:
        """Go on from what the ranks of the saved run gave: `shared_state` of rank 0, `rank_state` of each."""


class Checkpointer(Protocol):
    """What a trainer calls where its state can be saved. Collective."""

    def save_if_due(self) -> None:
        """Save if it is time; stop the run if it is asked to.

        Raises:
            StopRequested: the state is saved and the run is to end.
        """

    def stop_requested(self) -> bool:
        """Whether any rank was asked to stop."""


class _NoBoundary:
    """Nothing is saved, nothing stops."""

    def save_if_due(self) -> None:
        """Go on."""

    def stop_requested(self) -> bool:
        """Never."""
        return False


NO_CHECKPOINTS: Checkpointer = _NoBoundary()
