"""Sums, means and moments over the tokens of a mask, and token losses as one scalar.

Each mode of `aggregate` divides a sum over this micro-batch by a count over all micro-batches of
all ranks. So a row has the same weight in every micro-batch, and the losses of the micro-batches
add up to the loss of the optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossAggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant"]


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is True and 0 elsewhere, in the gradient too. Values outside the mask
    may be NaN."""
    return torch.where(mask, values, torch.zeros_like(values))


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """(B, R) -> (B,), mean of `values` over each row's True tokens; 0 for a row without one."""
    return zero_outside(values, mask).sum(dim=1) / mask.sum(dim=1).clamp_min(1)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` where `mask` is True, as a scalar. Values outside the mask, NaN too, are
    ignored."""
    return zero_outside(values, mask).sum()


def masked_whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """`(values - mean) / sqrt(var + epsilon)`, with the mean and population variance over the mask
    in fp64. Shape and dtype of `values`; 0 outside the mask (bool, same shape), and everywhere if
    it is empty."""
    exact = values.double()
    count = mask.sum().clamp_min(1)
    centred = exact - masked_sum(exact, mask) / count
    variance = masked_sum(centred**2, mask) / count
    return zero_outside(centred / torch.sqrt(variance + epsilon), mask).to(values.dtype)


@dataclass(frozen=True)
class Denominators:
    """Counts over all micro-batches and ranks of one optimizer step. The caller makes each at least
    1."""

    tokens: float  # True tokens of the mask
    rows: float  # rows with at least one True token
    constant: float  # all rows, empty ones too, times the longest response that is allowed


def aggregate(
    losses: Tensor, mask: Tensor, mode: LossAggregation, denominators: Denominators
) -> Tensor:
    """The part of the optimizer step's loss that this micro-batch contributes: a scalar with
    gradient.

    - token_mean: `sum / tokens`; every token has the same weight (DAPO, Yu et al. 2025).
    - seq_mean_token_sum: `sum / rows`.
    - seq_mean_token_mean: the mean over each row's tokens, summed over rows, `/ rows` (GRPO, Shao
      et al. 2024, eq. 3).
    - constant: `sum / constant`; the weight depends on no row's length (Dr. GRPO, Liu et al. 2025).

    `losses` (B, R) fp32: values outside `mask` (B, R) bool, NaN too, affect neither value nor
    gradient. Rows may have no True token. The denominators are counts over the whole optimizer
    step.
    """
    if mode == "seq_mean_token_mean":
        return row_means(losses, mask).sum() / denominators.rows  # (B, R) -> (B,) -> scalar
    counts = {
        "token_mean": denominators.tokens,
        "seq_mean_token_sum": denominators.rows,
        "constant": denominators.constant,
    }
    return masked_sum(losses, mask) / counts[mode]
