"""Weights and choices of tokens and rows: rollout-training mismatch, stale rows, entropy, covariance.

Everything here is a constant of the loss: nothing carries a gradient. What stands outside the mask has no part.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from dschat_ppo.algorithms.masked import masked_sum, row_means, zero_outside

LARGEST_LOG_WEIGHT = 20.0


def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    level: Literal["token", "sequence"],
    how: Literal["truncate", "mask"],
    cap: float,
) -> Tensor:
    """Weights that make samples of the generator count as samples of the policy that training evaluates.

    `w = exp(old - rollout)`, for each token or for the sum over the row (the exponent within +-20).

    truncate: `min(w, cap)` (truncated importance sampling, Ionides 2008; Yao et al. 2025). A bound from above limits
    the variance; small weights are kept as they are, because one from below would only add bias. mask: w where
    `1 / cap <= w <= cap`, 0 elsewhere. It has both sides because its aim is to leave out what the two engines disagree
    on, and a token that the generator found far likelier is as much in doubt as one that it found far less likely.

    Args:
        old_logprobs: (B, R) fp32, by the training engine.
        rollout_logprobs: (B, R) fp32, by the generator.
        mask: (B, R) bool.
        level: a weight for each token, or the row's on all of its tokens.
        how: what becomes of large weights.
        cap: at least 1.

    Returns:
        (B, R) fp32, 0 outside the mask.

    Raises:
        ValueError: `level` or `how` is none of the two.
    """
    log_weights = zero_outside(old_logprobs - rollout_logprobs, mask).detach()
    if level == "sequence":
        log_weights = log_weights.sum(dim=1, keepdim=True).expand_as(log_weights)
    elif level != "token":
        raise ValueError(f"no level of importance weights is called {level!r}")
    weights = log_weights.clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT).exp()
    if how == "truncate":
        weights = weights.clamp_max(cap)
    elif how == "mask":
        weights = weights.masked_fill((weights > cap) | (weights < 1 / cap), 0.0)
    else:
        raise ValueError(f"no treatment of importance weights is called {how!r}")
    return zero_outside(weights, mask)


def off_policy_rows(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, delta: float) -> Tensor:
    """Rows to keep: all but those with a negative advantage from which the policy has moved far (DeepSeek-V3.2, 2025).

    Args:
        logprobs: (B, R) fp32 of the policy in training.
        old_logprobs: (B, R) fp32 of the policy that collected the data.
        advantages: (B, R) fp32; the row's mean counts.
        mask: (B, R) bool.
        delta: in nats: the row goes if the mean of `old_logprobs - logprobs` over its tokens is larger.

    Returns:
        (B,) bool, True: keep. Rows without a token are kept.
    """
    moved = row_means((old_logprobs - logprobs).detach(), mask)
    return ~((row_means(advantages, mask) < 0) & (moved > delta))


def high_entropy_tokens(entropies: Tensor, mask: Tensor, share: float) -> Tensor:
    """The `share` of tokens with the highest entropy (Wang et al. 2025, "Beyond the 80/20 rule").

    Tokens at or above the `1 - share` quantile over the mask, so at least one if there is any; ties are all taken.

    Args:
        entropies: (B, R) fp32 of all rows of the optimizer step, because the quantile is over all that is given.
        mask: (B, R) bool.
        share: above 0, at most 1.

    Returns:
        (B, R) bool, False outside the mask.
    """
    values = entropies.detach()[mask]
    if values.numel() == 0:
        return torch.zeros_like(mask)
    # The first value at or above the quantile: torch.quantile takes 2^24 elements at most, and torch.kthvalue is not
    # deterministic on a GPU. The small number absorbs the rounding of 1 - share.
    rank = math.ceil((1 - share) * (values.numel() - 1) - 1e-9)
    threshold = values.sort().values[rank]
    return mask & (entropies >= threshold)


def token_covariances(advantages: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """`(A - mean A) (lp - mean lp)` for each token, means over the mask (Cui et al. 2025).

    Args:
        advantages: (B, R) fp32 of all rows over which the means are meant.
        logprobs: (B, R) fp32.
        mask: (B, R) bool.

    Returns:
        (B, R) fp32, detached, 0 outside the mask.
    """
    count = mask.sum().clamp_min(1)
    advantages, logprobs = (x - masked_sum(x, mask) / count for x in (advantages.detach(), logprobs.detach()))
    return zero_outside(advantages * logprobs, mask)


def clip_cov_tokens(
    covariances: Tensor, mask: Tensor, share: float, low: float, high: float, generator: torch.Generator
) -> Tensor:
    """A random choice among the tokens with `low < covariance < high`, for the clip_cov loss (Cui et al. 2025).

    Args:
        covariances: (B, R) fp32; set tokens that shall not be chosen to -inf.
        mask: (B, R) bool.
        share: of all tokens of the mask, rounded down; at least one is chosen if any is in range, and no more than are.
        low: lower bound.
        high: upper bound.
        generator: on any device; the choice does not depend on that of the tensors, nor on padding.

    Returns:
        (B, R) bool, False outside the mask.
    """
    candidates = (mask & (covariances > low) & (covariances < high)).nonzero()
    order = torch.randperm(len(candidates), generator=generator, device=generator.device).to(mask.device)
    rows, columns = candidates[order[: _number_of(mask, share)]].unbind(dim=1)
    chosen = torch.zeros_like(mask)
    chosen[rows, columns] = True
    return chosen


def kl_cov_tokens(covariances: Tensor, mask: Tensor, share: float) -> Tensor:
    """The `share` of tokens with the highest covariance, for the kl_cov loss (Cui et al. 2025).

    Args:
        covariances: (B, R) fp32.
        mask: (B, R) bool.
        share: of all tokens of the mask, rounded down; at least one is chosen if there is any.

    Returns:
        (B, R) bool, False outside the mask.
    """
    places = mask.nonzero()
    best = torch.topk(covariances[mask], min(len(places), _number_of(mask, share))).indices
    rows, columns = places[best].unbind(dim=1)
    chosen = torch.zeros_like(mask)
    chosen[rows, columns] = True
    return chosen


def _number_of(mask: Tensor, share: float) -> int:
    """`share` of the mask's tokens, rounded down (but for the rounding of the product), at least 1."""
    return max(1, math.floor(share * int(mask.sum()) + 1e-9))
