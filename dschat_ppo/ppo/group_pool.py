"""Dynamic sampling: the rows of a PPO step from several rounds of sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.groups import groups_that_differ, groups_within
from dschat_ppo.types import (
    ScoredRollout,
    concat_rows,
    record_of,
    select_rows,
    tensors_of,
    to_device,
)


@dataclass(eq=False)
class GroupPool:
    """Collects the rows of a PPO step from several rounds of sampling: dynamic sampling (Yu et al.
    2025, DAPO).

    It replaces prompts whose answers all have the same score, so advantage 0, those of which fewer
    than two answers have a score, and those whose mean score is not within `score_range`. Every
    rank holds the rows of all ranks, so every rank makes the same decision. Accepted rows beyond
    what the step needs are kept for the next one.
    """

    rows_needed: int  # of a PPO step over all ranks, whole groups
    # (N,) raw -> scaled and clipped scores, which differ in an accepted group
    scale_and_clip: Callable[[Tensor], Tensor]
    score_range: Sequence[float] = ()  # what the mean of its raw scores is between; empty: any
    # the scores of a source with a weight may differ instead; empty: of none
    source_weights: Sequence[float] = ()
    accepted: list[ScoredRollout] = field(default_factory=list)
    dropped: list[ScoredRollout] = field(default_factory=list)
    sampled: int = 0  # rows of this step's rounds
    kept: int = 0  # those of them that were accepted

    @property
    def missing(self) -> int:
        """Rows that the step still needs."""
        return max(0, self.rows_needed - sum(len(rows.groups) for rows in self.accepted))

    @property
    def kept_share(self) -> float:
        """Share of the rows of this step's rounds that were accepted; 1 before the first round."""
        return self.kept / self.sampled if self.sampled else 1.0

    def add(self, rows: ScoredRollout) -> None:
        """Sort the rows of a round (whole groups) into accepted and dropped ones."""
        scored = rows.has_score  # (N,) bool; a group is judged by these answers, and stays whole
        scores, groups = rows.scores[scored], rows.groups[scored]  # (n,) each
        differ = groups_that_differ(self.scale_and_clip(scores), groups)  # (n,) bool
        for weight, column in zip(self.source_weights, rows.source_scores.T, strict=False):
            if weight != 0:
                differ = differ | groups_that_differ(column[scored].nan_to_num(), groups)
        if self.score_range:
            differ = differ & groups_within(scores, groups, *self.score_range)
        kept = torch.isin(rows.groups, groups[differ])  # (N,) bool
        self.sampled += len(kept)
        self.kept += int(kept.sum())
        for parts, chosen in ((self.accepted, kept), (self.dropped, ~kept)):
            if chosen.any():
                parts.append(select_rows(rows, chosen.nonzero().squeeze(1)))

    def take(self) -> tuple[ScoredRollout, int]:
        """The rows of the step, and how many of them are dropped ones that fill it up. The next
        step begins."""
        filled = self.missing
        rows = concat_rows([*self.accepted, *(self.dropped if filled else [])])
        taken, left = torch.arange(len(rows.groups), device=rows.groups.device).tensor_split(
            [self.rows_needed]
        )
        self.accepted = [select_rows(rows, left)] if len(left) and not filled else []
        self.dropped, self.sampled, self.kept = [], 0, 0
        return select_rows(rows, taken), filled

    def state_dict(self) -> dict[str, Any]:
        """The accepted rows kept for the next step; call it between two steps."""
        return {"accepted": tensors_of(self.accepted[0]) if self.accepted else None}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore `state_dict()` at the beginning of a step, on `device`."""
        kept = state["accepted"]
        self.accepted = [] if kept is None else [to_device(record_of(ScoredRollout, kept), device)]
        self.dropped, self.sampled, self.kept = [], 0, 0
