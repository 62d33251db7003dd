"""Dynamic sampling: replace prompts whose answers all have the same score, so advantage 0 (Yu et al. 2025, DAPO)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.group_statistics import groups_that_differ
from dschat_ppo.types import ScoredRollout, concat_rows, record_of, select_rows, tensors_of, to_device


class GroupPool:
    """Collects the rows of a PPO step from several rounds of sampling.

    Every rank holds the rows of all ranks, so every rank makes the same decision. Accepted rows beyond what the step
    needs are kept for the next one.

    Args:
        rows_needed: rows of a PPO step over all ranks, whole groups.
        shaped: raw scores (N,) -> scaled and clipped scores: a group whose clipped scores are equal is dropped too.
        host: hold the rows in host memory (`--experience_on_host`).
    """

    def __init__(self, rows_needed: int, shaped: Callable[[Tensor], Tensor], host: bool = False):
        self.rows_needed = rows_needed
        self.shaped = shaped
        self.host = host
        self.accepted: ScoredRollout | None = None
        self.dropped: ScoredRollout | None = None
        self.sampled = 0  # rows of this step's rounds
        self.kept = 0  # those of them that were accepted

    @property
    def missing(self) -> int:
        """Rows that the step still needs."""
        return max(0, self.rows_needed - (0 if self.accepted is None else len(self.accepted.groups)))

    @property
    def kept_share(self) -> float:
        """Share of the rows of this step's rounds that were accepted; 1 before the first round."""
        return self.kept / self.sampled if self.sampled else 1.0

    def add(self, rows: ScoredRollout) -> None:
        """Sort the rows of a round (whole groups) into accepted and dropped ones."""
        rows = to_device(rows, "cpu") if self.host else rows
        differ = groups_that_differ(self.shaped(rows.scores), rows.groups)  # (N,) bool
        self.sampled += len(differ)
        self.kept += int(differ.sum())
        self.accepted = _appended(self.accepted, rows, differ.nonzero().squeeze(1))
        self.dropped = _appended(self.dropped, rows, (~differ).nonzero().squeeze(1))

    def take(self) -> tuple[ScoredRollout, int]:
        """The rows of the step, and how many of them are dropped ones that fill it up. The next step begins."""
        filled, rows = self.missing, self.accepted
        if filled:
            assert self.dropped is not None
            rows = _appended(rows, self.dropped, torch.arange(filled, device=self.dropped.groups.device))
        assert rows is not None
        places = torch.arange(len(rows.groups), device=rows.groups.device)
        self.accepted = _appended(None, rows, places[self.rows_needed :])
        self.dropped, self.sampled, self.kept = None, 0, 0
        return select_rows(rows, places[: self.rows_needed]), filled

    def state_dict(self) -> dict[str, Any]:
        """The accepted rows kept for the next step; call it between two steps."""
        return {"accepted": None if self.accepted is None else tensors_of(self.accepted)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore `state_dict()` at the beginning of a step, on `device` unless the rows are in host memory."""
        device = torch.device("cpu") if self.host else device
        kept = state["accepted"]
        self.accepted = None if kept is None else to_device(record_of(ScoredRollout, kept), device)
        self.dropped, self.sampled, self.kept = None, 0, 0


def _appended(before: ScoredRollout | None, rows: ScoredRollout, chosen: Tensor) -> ScoredRollout | None:
    """`before`, followed by the rows at `chosen` (n,) int64; None if both are empty."""
    if not len(chosen):
        return before
    new = select_rows(rows, chosen)
    return new if before is None else concat_rows([before, new])
