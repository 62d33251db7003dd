"""Sums, means and moments over the tokens that a mask selects."""

from __future__ import annotations

import torch
from torch import Tensor


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is True and 0 elsewhere, in the gradient too; what stands there may be NaN."""
    return torch.where(mask, values, torch.zeros_like(values))


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """(B,) mean of `values` (B, R) over each row's True tokens; 0 for a row without one."""
    return zero_outside(values, mask).sum(dim=1) / mask.sum(dim=1).clamp_min(1)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` where `mask` is True, as a scalar. What stands elsewhere (NaN too) has no part in it."""
    return zero_outside(values, mask).sum()


def masked_whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """`(values - mean) / sqrt(var + epsilon)` with mean and population variance over the masked tokens, in fp64.

    Args:
        values: any shape, floating.
        mask: same shape, bool.
        epsilon: added to the variance.

    Returns:
        Shape and dtype of `values`; 0 outside the mask, and everywhere if the mask is empty.
    """
    wide, count = values.double(), mask.sum().clamp_min(1)
    apart = wide - masked_sum(wide, mask) / count
    variance = masked_sum(apart**2, mask) / count
    return zero_outside(apart / torch.sqrt(variance + epsilon), mask).to(values.dtype)
