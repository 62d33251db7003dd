"""From scores and KL to per-token rewards, advantages and returns."""

from __future__ import annotations

import torch
from torch import Tensor


def token_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, kl_coef: float) -> Tensor:
    """`-kl_coef * kl` on each response token, plus the row's score on its last one.

    Args:
        scores: (B,) fp32.
        kl: (B, R) fp32, per token.
        response_mask: (B, R) bool, right-padded. A row without a True keeps no reward at all.
        kl_coef: weight of the penalty.

    Returns:
        (B, R) fp32, 0 outside the mask. (Ouyang et al. 2022, eq. 2, with the score on EOS or on the cut token.)
    """
    columns = torch.arange(kl.shape[1], device=kl.device)
    is_last = response_mask & (columns == response_mask.sum(dim=1, keepdim=True) - 1)
    rewards = torch.where(is_last, scores.unsqueeze(1), 0.0) - kl_coef * kl
    return torch.where(response_mask, rewards, torch.zeros_like(rewards))


def gae(rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), the episode ending at each row's last token.

    `delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = delta_t + gamma lam A_{t+1}`, with V and A after the last token 0.

    Args:
        rewards: (B, R) fp32.
        values: (B, R) fp32, V before each response token.
        response_mask: (B, R) bool.
        gamma: discount in [0, 1].
        lam: lambda in [0, 1].

    Returns:
        (advantages, returns), each (B, R) fp32, 0 outside the mask; `returns = advantages + values`.
    """
    keep = response_mask.to(rewards.dtype)
    rewards, values = (torch.where(response_mask, x, torch.zeros_like(x)) for x in (rewards, values))
    next_advantage = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(next_advantage)
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage) * keep[:, t]
        next_value = values[:, t]
        columns.append(next_advantage)
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages, advantages + values
