"""Losses on pairs of answers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    pair_mask: Tensor,
    num_pairs: Tensor | float,
    margin: Tensor | None = None,
) -> Tensor:
    """`sum -log sigmoid(chosen - rejected - margin) / num_pairs` (Bradley & Terry 1952; Ouyang et al. 2022, eq. 1).

    Args:
        chosen_scores: (B,) fp32.
        rejected_scores: (B,) fp32.
        pair_mask: (B,) bool, False on filler pairs.
        num_pairs: real pairs of the whole optimizer step, over all micro-batches and ranks.
        margin: (B,) fp32 by which the chosen answer should lead (Touvron et al. 2023, eq. 2); None for 0.

    Returns:
        Scalar with gradient.
    """
    lead = chosen_scores - rejected_scores
    if margin is not None:
        lead = lead - margin
    return (-F.logsigmoid(lead) * pair_mask).sum() / num_pairs
