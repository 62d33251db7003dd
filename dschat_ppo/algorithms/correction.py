"""Importance weights and masks: rollout-training mismatch, off-policy rows, high entropy, high
covariance. All results are constants of the loss, without gradient. Values outside the mask are
ignored."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from dschat_ppo.algorithms.aggregation import masked_sum, row_means, zero_outside

LARGEST_LOG_WEIGHT = 20.0


def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    level: Literal["token", "sequence"],
    mode: Literal["truncate", "mask"],
    cap: float,
    floor: float | None = None,
) -> Tensor:
    """Importance weights from the policy as the generator computes it to the policy as the training
    engine does.

    `w = exp(old - rollout)` for each token, or at the `level` "sequence" with the sum over the row
    in the exponent (clamped to +-20). The `mode` says what becomes of large ones:

    - truncate: `min(w, cap)` (Ionides 2008; Yao et al. 2025), which limits the variance; with a
      `floor` at least that.
    - mask: w where `floor <= w <= cap`, 0 elsewhere: drops tokens on which the two engines
      disagree. The floor is `1 / cap` unless given.

    All (B, R): log-probs and weights fp32, `mask` bool; 0 outside the mask. `cap` is at least 1,
    `floor` below it.
    """
    log_weights = zero_outside(old_logprobs - rollout_logprobs, mask).detach()
    if level == "sequence":
        # (B, R) -> (B, 1) -> (B, R)
        log_weights = log_weights.sum(dim=1, keepdim=True).expand_as(log_weights)
    weights = log_weights.clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT).exp()
    if mode == "truncate":
        return zero_outside(weights.clamp(floor, cap), mask)
    if floor is None:
        floor = 1 / cap
    outside = (weights > cap) | (weights < floor)
    return zero_outside(weights.masked_fill(outside, 0.0), mask)


def off_policy_rows(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, delta: float
) -> Tensor:
    """Rows to keep: drops negative advantages on rows that have become far off-policy
    (DeepSeek-V3.2, 2025).

    A row goes if the mean of `advantages` over its tokens is negative and that of `old_logprobs -
    logprobs` above `delta` nats. Arguments (B, R), the mask bool -> (B,) bool, True for rows to
    keep, among them rows without a token.
    """
    kl = row_means((old_logprobs - logprobs).detach(), mask)  # (B, R) -> (B,), k1
    return ~((row_means(advantages, mask) < 0) & (kl > delta))


def high_entropy_tokens(entropies: Tensor, mask: Tensor, share: float) -> Tensor:
    """The `share` of tokens with the highest entropy (Wang et al. 2025, "Beyond the 80/20 rule"),
    (B, R) bool.

    These are the tokens at or above the `1 - share` quantile over the mask: all ties, and at least
    one token. Pass all rows of the PPO step.
    """
    values = entropies.detach()[mask]  # (B, R) -> (tokens,)
    if values.numel() == 0:
        return torch.zeros_like(mask)
    # The first value at or above the quantile, by sorting: torch.quantile takes at most 2^24
    # elements, and torch.kthvalue is not deterministic on a GPU. The 1e-9 absorbs the rounding of 1
    # - share.
    rank = math.ceil((1 - share) * (values.numel() - 1) - 1e-9)
    threshold = values.sort().values[rank]
    return mask & (entropies >= threshold)


def token_covariances(advantages: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """`(A - mean A) (lp - mean lp)` for each token, (B, R) fp32, means over the mask, 0 outside
    (Cui et al. 2025)."""
    count = mask.sum().clamp_min(1)
    advantages = advantages.detach()
    logprobs = logprobs.detach()
    centred_advantages = advantages - masked_sum(advantages, mask) / count
    centred_logprobs = logprobs - masked_sum(logprobs, mask) / count
    return zero_outside(centred_advantages * centred_logprobs, mask)


def clip_cov_tokens(
    covariances: Tensor,
    mask: Tensor,
    share: float,
    low: float,
    high: float,
    generator: torch.Generator,
) -> Tensor:
    """A random sample of the tokens with `low < covariance < high`, (B, R) bool, for clip_cov (Cui
    et al. 2025).

    `share` of all tokens of the mask is sampled, rounded down, at least one; fewer if fewer are in
    range. A covariance of -inf excludes a token. The sample depends neither on the device of the
    tensors nor on padding.
    """
    # (N, 2) row and column
    candidates = (mask & (covariances > low) & (covariances < high)).nonzero()
    order = torch.randperm(len(candidates), generator=generator, device=generator.device)
    order = order.to(mask.device)
    return _true_at(candidates[order[: _token_count(mask, share)]], mask)


def kl_cov_tokens(covariances: Tensor, mask: Tensor, share: float) -> Tensor:
    """The `share` of tokens with the highest covariance, (B, R) bool, for the kl_cov loss (Cui et
    al. 2025). Of the tokens of the mask, rounded down, at least one."""
    tokens = mask.nonzero()  # (N, 2) row and column
    # A stable sort: of equal covariances (all advantages 0) every rank must choose the same tokens.
    order = covariances[mask].sort(descending=True, stable=True).indices  # (N,)
    return _true_at(tokens[order[: _token_count(mask, share)]], mask)


def _true_at(tokens: Tensor, mask: Tensor) -> Tensor:
    """Bool like `mask`, True at the `tokens` (n, 2), each a row and a column."""
    rows, columns = tokens.unbind(dim=1)  # (n, 2) -> (n,) each
    chosen = torch.zeros_like(mask)
    chosen[rows, columns] = True
    return chosen


def _token_count(mask: Tensor, share: float) -> int:
    """`share` of the mask's tokens, rounded down, at least 1; the 1e-9 absorbs the rounding of the
    product."""
    return max(1, math.floor(share * int(mask.sum()) + 1e-9))
