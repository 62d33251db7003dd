"""Sums, means and moments over the tokens that a mask selects."""

from __future__ import annotations

import torch
from torch import Tensor


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is True and 0 elsewhere, in the gradient too. Values outside the mask may be NaN."""
    return torch.where(mask, values, torch.zeros_like(values))


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """(B, R) -> (B,), mean of `values` over each row's True tokens; 0 for a row without one."""
    return zero_outside(values, mask).sum(dim=1) / mask.sum(dim=1).clamp_min(1)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` where `mask` is True, as a scalar. Values outside the mask, NaN too, are ignored."""
    return zero_outside(values, mask).sum()


def masked_whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """`(values - mean) / sqrt(var + epsilon)`, with the mean and population variance over the mask in fp64.

    Args:
        values: any shape, floating.
        mask: same shape, bool.
        epsilon: added to the variance.

    Returns:
        Shape and dtype of `values`; 0 outside the mask, and everywhere if the mask is empty.
    """
    exact, count = values.double(), mask.sum().clamp_min(1)
    centred = exact - masked_sum(exact, mask) / count
    variance = masked_sum(centred**2, mask) / count
    return zero_outside(centred / torch.sqrt(variance + epsilon), mask).to(values.dtype)
