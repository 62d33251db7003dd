"""Statistics over the answers to one prompt, for the estimators that compare them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """The groups of a batch, one for each prompt, and statistics over them.

    Every statistic has shape (B,): each row gets the value of its group. Rows without a response token have no score
    and take part in none. Values are fp64, so that the order in which a GPU adds rows does not show in fp32.
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
        return torch.where(self.sizes > 0, self.max(scores.masked_fill(~self.counted, -torch.inf)), 0.0)

    def gaps(self, scores: Tensor) -> Tensor:
        """`score - best score of the group`: 0 or less, 0 on rows that are not counted.

        A shift of a group's scores changes no estimator. Gaps keep small differences of large scores exact, and equal
        scores have gaps of exactly 0.
        """
        return torch.where(self.counted, scores - self.best(scores), 0.0)

    def mean(self, gaps: Tensor) -> Tensor:
        """Mean of `gaps` (B,) over the counted rows."""
        return self.sum(gaps) / self.sizes.clamp_min(1)

    def std(self, gaps: Tensor) -> Tensor:
        """Unbiased standard deviation (n - 1) of `gaps` (B,) over the counted rows; 0 for a group of one."""
        squares = torch.where(self.counted, (gaps - self.mean(gaps)) ** 2, 0.0)
        return torch.sqrt(self.sum(squares) / (self.sizes - 1).clamp_min(1))


def groups_that_differ(scores: Tensor, groups: Tensor) -> Tensor:
    """(B,) bool, True on the rows of a group whose scores are not all equal, or not all finite. `scores` (B,) fp32;
    `groups` (B,) int64, any number for each group, in any order."""
    index = torch.unique(groups, return_inverse=True)[1]
    spread = _max_by_group(scores, index) + _max_by_group(-scores, index)  # max - min
    return (spread > 0) | ~spread.isfinite()


def _sum_by_group(values: Tensor, index: Tensor) -> Tensor:
    """(B,) -> (B,), each row's group's sum of `values`."""
    return torch.zeros_like(values).index_add(0, index, values)[index]


def _max_by_group(values: Tensor, index: Tensor) -> Tensor:
    """(B,) -> (B,), each row's group's maximum of `values`."""
    return torch.full_like(values, -torch.inf).scatter_reduce(0, index, values, "amax")[index]
