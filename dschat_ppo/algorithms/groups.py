"""Comparing the answers to one prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def groups_that_differ(scores: Tensor, groups: Tensor) -> Tensor:
    """(B,) bool, True on rows of a group whose scores are not all equal, or not all finite.

    Args:
        scores: (B,) fp32.
        groups: (B,) int64, any number for each group, rows in any order.
    """
    names, number = torch.unique(groups, return_inverse=True)
    largest = scores.new_full((len(names),), -torch.inf).scatter_reduce(0, number, scores, "amax")
    smallest = scores.new_full((len(names),), torch.inf).scatter_reduce(0, number, scores, "amin")
    return ((largest > smallest) | ~(largest - smallest).isfinite())[number]
