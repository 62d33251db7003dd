"""Clipped squared error of the critic."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat_ppo.algorithms.masked import zero_outside


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
        clip_eps: epsilon; 0 turns clipping off.

    Returns:
        (losses, clipped). losses: (B, R) fp32 with gradient, 0 outside the mask. clipped: (B, R) bool, detached, True
        where the clipped error is the larger one, so the token has no gradient.
    """
    values, old_values, returns = (zero_outside(x, mask) for x in (values, old_values, returns))  # (B, R) each
    error = (values - returns) ** 2
    clipped_error = error
    if clip_eps > 0:
        clipped_values = torch.minimum(torch.maximum(values, old_values - clip_eps), old_values + clip_eps)
        clipped_error = (clipped_values - returns) ** 2
    return 0.5 * torch.maximum(error, clipped_error), (clipped_error > error).detach()
