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

    It replaces prompts whose responses all have the same score, so advantage 0, those of which
    fewer than two responses have a score, and those whose mean score is not within `score_range`.
    Every rank holds the rows of all ranks, so every rank makes the same decision. Accepted rows
    beyond what the step needs are kept for the next one.
    """

    rows_needed: int  # of a PPO step over all ranks, whole groups
    # (N,) raw -> scaled and clipped scores, which differ in an accepted group
    scale_and_clip: Callable[[Tensor], Tensor]
    score_range: Sequence[float] = ()  # what the mean of its raw scores is between; empty: any
    # the scores of a source with a weight may differ instead; empty: of none
    source_weights: Sequence[float] = ()
    # (rows) -> (N,) fp64, sizes of the numbers that their scores were added up from, after scaling;
    # None: those of the scores
    magnitudes_of: Callable[[ScoredRollout], Tensor] | None = None
    accepted: list[ScoredRollout] = field(default_factory=list)
    dropped: list[ScoredRollout] = field(default_factory=list)
    sampled_count: int = 0  # rows of this step's rounds
    accepted_count: int = 0  # those of them that were accepted

    @property
    def missing(self) -> int:
        """Rows that the step still needs."""
        return max(0, self.rows_needed - sum(len(rows.groups) for rows in self.accepted))

    @property
    def kept_share(self) -> float:
        """Share of the rows of this step's rounds that were accepted; 1 before the first round."""
        if self.sampled_count == 0:
            return 1.0
        return self.accepted_count / self.sampled_count

    def add(self, rows: ScoredRollout) -> None:
        """Sort the rows of a round (whole groups) into accepted and dropped ones."""
        # (N,) bool; a group is judged by the responses that have a score, and stays whole
        scored = rows.has_score
        scores = rows.scores[scored]  # (n,)
        groups = rows.groups[scored]  # (n,)
        magnitudes = None
        if self.magnitudes_of is not None:
            magnitudes = self.magnitudes_of(rows)[scored]  # (n,)
        differ = groups_that_differ(self.scale_and_clip(scores), groups, magnitudes)  # (n,) bool
        for weight, column in zip(self.source_weights, rows.source_scores.T, strict=False):
            if weight != 0:
                differ = differ | groups_that_differ(column[scored].nan_to_num(), groups)
        if self.score_range:
            differ = differ & groups_within(scores, groups, *self.score_range)
        is_accepted = torch.isin(rows.groups, groups[differ])  # (N,) bool
        self.sampled_count += len(is_accepted)
        self.accepted_count += int(is_accepted.sum())
        if is_accepted.any():
            self.accepted.append(select_rows(rows, is_accepted.nonzero().squeeze(1)))
        if not is_accepted.all():
            self.dropped.append(select_rows(rows, (~is_accepted).nonzero().squeeze(1)))

    def take(self) -> tuple[ScoredRollout, int]:
        """The rows of the step, and how many of them are dropped ones that fill it up. Accepted
        rows beyond them stay for the next step, which begins."""
        filled = self.missing
        batches = self.accepted
        if filled:
            batches = self.accepted + self.dropped
        rows = concat_rows(batches)
        row_indices = torch.arange(len(rows.groups), device=rows.groups.device)
        step_indices = row_indices[: self.rows_needed]
        later_indices = row_indices[self.rows_needed :]
        self._begin_step()
        if len(later_indices) and not filled:
            self.accepted.append(select_rows(rows, later_indices))
        return select_rows(rows, step_indices), filled

    def _begin_step(self) -> None:
        self.accepted = []
        self.dropped = []
        self.sampled_count = 0
        self.accepted_count = 0

    def state_dict(self) -> dict[str, Any]:
        """The accepted rows that stay for the next step; call it between two steps."""
        accepted = None
        if self.accepted:
            accepted = tensors_of(self.accepted[0])
        return {"accepted": accepted}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore `state_dict()` at the beginning of a step, on `device`."""
        self._begin_step()
        if state["accepted"] is not None:
            rows = record_of(ScoredRollout, state["accepted"])
            self.accepted.append(to_device(rows, device))
