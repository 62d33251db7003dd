"""Dynamic sampling: prompts whose answers all score alike teach nothing and are replaced (Yu et al. 2025, DAPO)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.group_statistics import groups_that_differ
from dschat_ppo.types import ScoredRollout, concat_rows, record_of, select_rows, tensors_of, to_device


class GroupPool:
    """Collects the rows of a PPO step from several rounds of sampling.

    Every rank holds the rows of all ranks, so every rank comes to the same decisions. Accepted rows beyond what the
    step needs wait for the next one.

    Args:
        rows_needed: rows of a PPO step over all ranks, whole groups.
        shaped: raw scores (B,) -> scores as the baseline sees them: answers that score alike once clipped teach as
            little as those that did before.
    """

    def __init__(self, rows_needed: int, shaped: Callable[[Tensor], Tensor]):
        self.rows_needed = rows_needed
        self.shaped = shaped
        self.accepted: ScoredRollout | None = None
        self.dropped: ScoredRollout | None = None
        self.sampled = 0
        self.kept = 0

    def add(self, rows: ScoredRollout) -> None:
        """Sort the rows of a round (whole groups) into accepted and dropped ones."""
        differ = groups_that_differ(self.shaped(rows.scores), rows.groups)
        self.sampled += len(differ)
        self.kept += int(differ.sum())
        self.accepted = _joined(self.accepted, rows, differ)
        self.dropped = _joined(self.dropped, rows, ~differ)

    @property
    def missing(self) -> int:
        """Rows that are not there yet."""
        return max(0, self.rows_needed - _count(self.accepted))

    @property
    def kept_share(self) -> float:
        """Share of the rows of this step's rounds that were accepted; 1 before the first round."""
        return self.kept / self.sampled if self.sampled else 1.0

    def take(self) -> tuple[ScoredRollout, int]:
        """The rows of the step, and how many of them are dropped ones that fill it up; begins the next step."""
        filled, rows = self.missing, self.accepted
        if filled:
            assert self.dropped is not None
            rows = _joined(rows, select_rows(self.dropped, torch.arange(filled, device=self.dropped.groups.device)))
        assert rows is not None
        places = torch.arange(len(rows.groups), device=rows.groups.device)
        self.accepted = _part(rows, places[self.rows_needed :])
        self.dropped, self.sampled, self.kept = None, 0, 0
        return select_rows(rows, places[: self.rows_needed]), filled

    def state_dict(self) -> dict[str, Any]:
        """The accepted rows that wait for the next step; to be taken between two steps."""
        return {"accepted": None if self.accepted is None else tensors_of(self.accepted)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from what `state_dict` gave, at the beginning of a step."""
        kept = state["accepted"]
        self.accepted = None if kept is None else to_device(record_of(ScoredRollout, kept), device)
        self.dropped, self.sampled, self.kept = None, 0, 0


def _count(rows: ScoredRollout | None) -> int:
    return 0 if rows is None else len(rows.groups)


def _part(rows: ScoredRollout, places: Tensor) -> ScoredRollout | None:
    return select_rows(rows, places) if len(places) else None


def _joined(before: ScoredRollout | None, rows: ScoredRollout, chosen: Tensor | None = None) -> ScoredRollout | None:
    new = rows if chosen is None else _part(rows, chosen.nonzero().squeeze(1))
    parts = [part for part in (before, new) if part is not None]
    return concat_rows(parts) if parts else None
