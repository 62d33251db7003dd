"""Process reward models: the loss of step scores, and one score for an answer from those of its steps."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat_ppo.algorithms.aggregation import zero_outside

StepAggregation = Literal["min", "mean", "last", "product"]


def step_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """`-y log sigmoid(s) - (1 - y) log sigmoid(-s)` of each step: binary cross-entropy (Wang et al. 2024, eq. 2).
    `scores` (N,), s; `labels` (N,) in [0, 1], y: a number between them is the probability that the step is right."""
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="none")


def aggregate_steps(scores: Tensor, step_mask: Tensor, how: StepAggregation) -> Tensor:
    """One score in [0, 1] for each answer, (B,) fp32, from the probabilities `sigmoid(s)` of its steps.

    "min" and "product" are the two of Lightman et al. 2023 (appendix F) and Wang et al. 2024. `scores` (B, T), s;
    `step_mask` (B, T) bool, True at the ends of steps, at least one in each row.
    """
    steps = zero_outside(scores.float(), step_mask)
    if how == "product":
        return zero_outside(F.logsigmoid(steps), step_mask).sum(dim=1).exp()
    probabilities = torch.sigmoid(steps)
    if how == "mean":
        return zero_outside(probabilities, step_mask).sum(dim=1) / step_mask.sum(dim=1)
    if how == "min":
        return probabilities.masked_fill(~step_mask, 1.0).amin(dim=1)
    columns = torch.arange(scores.shape[1], device=scores.device)
    last = torch.where(step_mask, columns, -1).amax(dim=1, keepdim=True)  # (B, 1)
    return probabilities.gather(1, last).squeeze(1)
