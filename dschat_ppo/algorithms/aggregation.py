"""From losses of tokens to one scalar, with denominators of the whole optimizer step.

Every form is a sum over this micro-batch divided by a count that all micro-batches of all ranks share. So a row weighs
the same wherever it is put, and micro-batches add up to the loss of the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dschat_ppo.algorithms.masked import masked_sum, row_means

LossAggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant"]


@dataclass(frozen=True)
class Denominators:
    """Counts of one whole optimizer step, over all micro-batches and ranks; each at least 1, which the caller sees to.

    Attributes:
        tokens: True tokens of the mask.
        rows: rows with at least one of them.
        constant: all rows, empty ones too, times the longest answer that is allowed.
    """

    tokens: float
    rows: float
    constant: float


def aggregate(losses: Tensor, mask: Tensor, how: LossAggregation, over: Denominators) -> Tensor:
    """This micro-batch's share of the loss of the optimizer step.

    token_mean: `sum / tokens`, each token weighs the same (DAPO, Yu et al. 2025). seq_mean_token_sum:
    `sum / rows`. seq_mean_token_mean: the mean over each row's tokens, summed over rows, `/ rows` (GRPO, Shao et al.
    2024, eq. 3). constant: `sum / constant`, so that neither a row's length nor that of its companions matters
    (Dr. GRPO, Liu et al. 2025).

    Args:
        losses: (B, R) fp32, with gradient. What stands outside the mask, NaN too, has no part in value or gradient.
        mask: (B, R) bool; rows may have no True token.
        how: the form.
        over: counts of the whole optimizer step.

    Returns:
        Scalar with gradient.

    Raises:
        ValueError: `how` is none of the four.
    """
    if how == "token_mean":
        return masked_sum(losses, mask) / over.tokens
    if how == "seq_mean_token_sum":
        return masked_sum(losses, mask) / over.rows
    if how == "seq_mean_token_mean":
        return row_means(losses, mask).sum() / over.rows
    if how == "constant":
        return masked_sum(losses, mask) / over.constant
    raise ValueError(f"no loss aggregation is called {how!r}")
