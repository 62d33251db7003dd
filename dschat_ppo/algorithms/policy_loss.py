"""Clipped surrogate of PPO."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dschat_ppo.algorithms.masked import masked_sum


@dataclass(frozen=True)
class PolicyLoss:
    """`loss` scalar with gradient; `ratio` (B, R) fp32 and `clipped` (B, R) bool, detached, for metrics."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_eps: float,
    num_tokens: Tensor | float,
) -> PolicyLoss:
    """`sum max(-A rho, -A clip(rho, 1-eps, 1+eps)) / num_tokens` (Schulman et al. 2017, eq. 7).

    Args:
        logprobs: (B, R) fp32 of the policy in training, with gradient.
        old_logprobs: (B, R) fp32 of the policy that sampled.
        advantages: (B, R) fp32.
        response_mask: (B, R) bool.
        clip_eps: epsilon.
        num_tokens: valid tokens of the whole optimizer step, over all micro-batches and ranks.
    """
    ratio = torch.exp(torch.where(response_mask, logprobs - old_logprobs, torch.zeros_like(logprobs)))
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_eps, 1 + clip_eps)
    loss = masked_sum(torch.maximum(plain, bounded), response_mask) / num_tokens
    return PolicyLoss(loss, ratio.detach(), (bounded > plain).detach())
