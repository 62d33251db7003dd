"""Clipped squared error of the critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dschat_ppo.algorithms.masked import masked_sum, zero_outside


@dataclass(frozen=True)
class ValueLoss:
    """`loss` scalar with gradient; `clipped` (B, R) bool, detached, for metrics."""

    loss: Tensor
    clipped: Tensor


def value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_eps: float
) -> tuple[Tensor, Tensor]:
    """`0.5 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)` for each token.

    The clipping of Schulman's PPO implementation (baselines `ppo2`, 2017), as in Ouyang et al. 2022.

    Args:
        values: (B, R) fp32 of the critic in training, with gradient.
        old_values: (B, R) fp32 when the rollout was scored.
        returns: (B, R) fp32 targets.
        mask: (B, R) bool.
        clip_eps: epsilon; 0 leaves the clipping out.

    Returns:
        (losses, clipped): (B, R) fp32 with gradient, 0 outside the mask; (B, R) bool, detached, True where the clipped
        error is the larger one, so that there is no gradient.
    """
    values, old_values, returns = (zero_outside(x, mask) for x in (values, old_values, returns))
    plain = (values - returns) ** 2
    bounded = plain
    if clip_eps > 0:
        near_old = torch.minimum(torch.maximum(values, old_values - clip_eps), old_values + clip_eps)
        bounded = (near_old - returns) ** 2
    return 0.5 * torch.maximum(plain, bounded), (bounded > plain).detach()


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    clip_eps: float,
    num_tokens: Tensor | float,
) -> ValueLoss:
    """`value_losses` summed over the mask, divided by `num_tokens`.

    Args:
        values: (B, R) fp32 of the critic in training, with gradient.
        old_values: (B, R) fp32 when the rollout was scored.
        returns: (B, R) fp32 targets.
        response_mask: (B, R) bool.
        clip_eps: epsilon; 0 leaves the clipping out.
        num_tokens: valid tokens of the whole optimizer step, over all micro-batches and ranks.
    """
    losses, clipped = value_losses(values, old_values, returns, response_mask, clip_eps)
    return ValueLoss(masked_sum(losses, response_mask) / num_tokens, clipped)
