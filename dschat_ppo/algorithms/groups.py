"""Groups of responses to one prompt: their statistics, and which of them say something."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Scores of a group that differ by less than this share of the largest one are equal, and were only
# rounded differently: fp32 is exact to 6e-8, and a score is a sum of some numbers.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Groups:
    """The groups of a batch, one for each prompt, and statistics over them.

    Every statistic has shape (B,): each row gets the value of its group. Rows without a response
    token have no score and take part in none. Values are fp64, so that the order in which a GPU
    adds rows does not show in fp32.
    """

    index: Tensor  # (B,) int64, number of the row's group, counted from 0
    counted: Tensor  # (B,) bool, True for rows with a response token
    sizes: Tensor  # (B,) fp64, counted rows in the row's group

    @classmethod
    def of(cls, prompts: Tensor, response_mask: Tensor) -> Groups:
        """Group the rows by `prompts` (B,) int64, any number for each prompt, in any order."""
        index = torch.unique(prompts, return_inverse=True)[1]
        counted = response_mask.any(dim=1)  # (B, R) -> (B,)
        return cls(index, counted, _sum_by_group(counted.double(), index))

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` (B,) fp64, which must be 0 on rows that are not counted."""
        return _sum_by_group(values, self.index)

    def max(self, values: Tensor) -> Tensor:
        """Maximum of `values` (B,) fp64, which must be -inf on rows that are not counted."""
        return _max_by_group(values, self.index)

    def best(self, scores: Tensor) -> Tensor:
        """Highest of `scores` (B,) fp64; 0 if no row of the group is counted."""
        highest = self.max(scores.masked_fill(~self.counted, -torch.inf))
        return torch.where(self.sizes > 0, highest, 0.0)

    def gaps(self, scores: Tensor, magnitudes: Tensor | None = None) -> Tensor:
        """`score - best score of the group`: 0 or less, 0 on rows that are not counted.

        A shift of a group's scores changes no estimator. Gaps keep small differences of large
        scores exact. They are exactly 0 in a group whose scores are equal but for rounding: no two
        are further apart than `ROUNDING` of the group's largest magnitude. `magnitudes` (B,) fp64
        are those of the numbers that the scores were computed from; None: of the scores.
        """
        gaps = torch.where(self.counted, scores - self.best(scores), 0.0)
        if magnitudes is None:
            magnitudes = scores.abs()
        largest = self.max(torch.where(self.counted, magnitudes, 0.0))
        return torch.where(_beyond_rounding(-_min_by_group(gaps, self.index), largest), gaps, 0.0)

    def mean(self, gaps: Tensor) -> Tensor:
        """Mean of `gaps` (B,) over the counted rows."""
        return self.sum(gaps) / self.sizes.clamp_min(1)

    def std(self, gaps: Tensor) -> Tensor:
        """Unbiased standard deviation (n - 1) of `gaps` (B,) over the counted rows; 0 for a group
        of one."""
        squares = torch.where(self.counted, (gaps - self.mean(gaps)) ** 2, 0.0)
        return torch.sqrt(self.sum(squares) / (self.sizes - 1).clamp_min(1))


def groups_that_differ(scores: Tensor, groups: Tensor, magnitudes: Tensor | None = None) -> Tensor:
    """(B,) bool, True on the rows of a group whose scores are not all equal but for rounding (see
    `Groups.gaps`), or not all finite. `scores` (B,) fp32; `groups` (B,) int64, any number for each
    group, in any order; `magnitudes` (B,) fp64, of the numbers that the scores were added up from,
    where they are larger than the scores."""
    index = torch.unique(groups, return_inverse=True)[1]
    spread = _max_by_group(scores, index) - _min_by_group(scores, index)
    sizes = scores.abs()
    if magnitudes is not None:
        sizes = torch.maximum(sizes.double(), magnitudes)
    return _beyond_rounding(spread, _max_by_group(sizes, index))


def groups_within(scores: Tensor, groups: Tensor, low: float, high: float) -> Tensor:
    """(B,) bool, True on the rows of a group whose mean score is above `low` and below `high`, or
    not finite. Arguments as for `groups_that_differ`."""
    index = torch.unique(groups, return_inverse=True)[1]
    scores = scores.double()
    mean = _sum_by_group(scores, index) / _sum_by_group(torch.ones_like(scores), index)
    return ((mean > low) & (mean < high)) | ~mean.isfinite()


def _beyond_rounding(spread: Tensor, largest: Tensor) -> Tensor:
    """(B,) bool, whether scores of a group that are `spread` apart, the largest of which is
    `largest`, differ by more than rounding, or are not finite; (B,) each."""
    return (spread > ROUNDING * largest) | ~spread.isfinite()


def _sum_by_group(values: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add(0, index, values)[index]


def _max_by_group(values: Tensor, index: Tensor) -> Tensor:
    return torch.full_like(values, -torch.inf).scatter_reduce(0, index, values, "amax")[index]


def _min_by_group(values: Tensor, index: Tensor) -> Tensor:
    return -_max_by_group(-values, index)
