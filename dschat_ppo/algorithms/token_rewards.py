"""From scores and KL to per-token rewards, advantages and returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dschat_ppo.algorithms.masked import zero_outside


@dataclass(frozen=True)
class AdvantageInputs:
    """What an advantage estimator may use. B rows are all rows that are compared.

    Attributes:
        rewards: (B, R) fp32, per token: the score on the last token minus the KL penalty of each token, as
            `token_rewards` makes them.
        values: (B, R) fp32, V before each response token; None without a critic.
        response_mask: (B, R) bool; rows may have no True token.
        groups: (B,) int64, number of the row's prompt: any numbers, rows in any order.
        baselines: (B,) fp32, score of the greedy answer to the row's prompt, for remax; None otherwise.
        gamma: discount in [0, 1].
        lam: lambda in [0, 1], for gae.
        normalise_std: divide by the group's standard deviation, in grpo and grpo_pass_at_k.
        epsilon: added to that standard deviation.
        scores: (B,) fp32, the rows' scores before the KL penalty, whose standard deviation it is; None: the sums of
            `rewards`, which then hold no penalty.
    """

    rewards: Tensor
    values: Tensor | None
    response_mask: Tensor
    groups: Tensor
    baselines: Tensor | None
    gamma: float
    lam: float
    normalise_std: bool = True
    epsilon: float = 1e-6
    scores: Tensor | None = None


def token_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, kl_coef: float) -> Tensor:
    """`-kl_coef * kl` on each response token, plus the row's score on its last one.

    Args:
        scores: (B,) fp32.
        kl: (B, R) fp32, per token.
        response_mask: (B, R) bool; tokens that are not the policy's may lie between its own. A row without a True
            keeps no reward at all.
        kl_coef: weight of the penalty.

    Returns:
        (B, R) fp32, 0 outside the mask. (Ouyang et al. 2022, eq. 2, with the score on EOS or on the cut token.)
    """
    is_last = response_mask & (response_mask.cumsum(dim=1) == response_mask.sum(dim=1, keepdim=True))
    rewards = torch.where(is_last, scores.unsqueeze(1), 0.0) - kl_coef * kl
    return zero_outside(rewards, response_mask)


def gae(rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), the episode ending at each row's last token.

    `delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = delta_t + gamma lam A_{t+1}`, with V and A after the last token 0.
    Where the mask has gaps, t + 1 is the row's next True token: what was not the policy's choice is no step of it.

    Args:
        rewards: (B, R) fp32.
        values: (B, R) fp32, V before each response token.
        response_mask: (B, R) bool.
        gamma: discount in [0, 1].
        lam: lambda in [0, 1].

    Returns:
        (advantages, returns), each (B, R) fp32, 0 outside the mask; `returns = advantages + values`.
    """
    rewards, values = (zero_outside(x, response_mask) for x in (rewards, values))
    advantages = torch.zeros_like(rewards)
    next_advantage = rewards.new_zeros(rewards.shape[0])
    next_value = torch.zeros_like(next_advantage)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        inside = response_mask[:, t]
        next_advantage = torch.where(inside, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(inside, values[:, t], next_value)
        advantages[:, t] = torch.where(inside, next_advantage, torch.zeros_like(next_advantage))
    return advantages, advantages + values


def returns_to_go(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """`G_t = r_t + gamma G_{t+1}`, with t + 1 the row's next True token and 0 after the last one.

    Gaps in the mask neither reset the sum nor discount it, so this is `gae` with V = 0 and lambda = 1.

    Args:
        rewards: (B, R) fp32.
        response_mask: (B, R) bool.
        gamma: discount in [0, 1].

    Returns:
        (B, R) fp32, 0 outside the mask.
    """
    return gae(rewards, torch.zeros_like(rewards), response_mask, gamma, 1.0)[0]
