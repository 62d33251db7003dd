"""The interfaces between a trainer and its checkpoints: which state is saved, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dschat_ppo.common.logging import logger
from dschat_ppo.types import Engine


@dataclass(frozen=True)
class RankStates:
    """The `rank_state` of each rank of the saved run; the files may be large.

    `own`: of this rank; None if the run was saved on another number of ranks. `read_all` reads those of all ranks that
    saved, from rank 0 on, one at a time, so that the ranks of now can divide them again.
    """

    own: dict[str, Any] | None
    read_all: Callable[[], Iterator[dict[str, Any]]]


def load_saved(flag: str, state: Any, load: Callable[[Any], object]) -> None:
    """Restore a part of a trainer that is on now, by `flag`, from its saved state. If it was off when the checkpoint
    was saved (`--resume_force`), the state is None or empty: the part stays as it was built, and a line is logged."""
    if state:
        load(state)
    else:
        log_starts_from_scratch(flag)


def log_starts_from_scratch(flag: str) -> None:
    """Log that the checkpoint holds no state of the part that this flag turns on."""
    logger().info(f"{flag}: was off when the checkpoint was saved, so it starts from scratch")


class Resumable(Protocol):
    """A trainer whose state is saved between two optimizer steps."""

    @property
    def engines_to_save(self) -> Mapping[str, Engine]:
        """Role -> DeepSpeed engine that trains."""

    @property
    def position(self) -> tuple[int, int]:
        """(steps done, updates done of the step in progress: 0 between two steps)."""

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation, at this position, is the best so far."""

    def shared_state(self) -> dict[str, Any]:
        """The state that is equal on all ranks, as nested dicts and lists of tensors, texts and numbers."""

    def rank_state(self) -> dict[str, Any]:
        """The state of this rank, in the same form."""

    def load_state(self, shared: dict[str, Any], ranks: RankStates) -> None:
        """Restore the state: `shared_state` of rank 0 of the saved run, and `rank_state` of its ranks."""


class Checkpointer(Protocol):
    """What a trainer calls where its state can be saved. Collective."""

    def save_if_due(self) -> None:
        """Save a checkpoint if one is due. If a stop was requested, save the state and raise `StopRequested`."""

    def stop_requested(self) -> bool:
        """Whether any rank received a stop request."""

    def stop_if(self, reason: str | None) -> None:
        """Save a checkpoint and end the run by `UnhealthyRun` if rank 0 has a reason."""


class _NoCheckpoints:
    """Saves nothing and never stops."""

    def save_if_due(self) -> None:
        """Does nothing."""

    def stop_requested(self) -> bool:
        """Always False."""
        return False

    def stop_if(self, reason: str | None) -> None:
        """Does nothing."""


NO_CHECKPOINTS: Checkpointer = _NoCheckpoints()
