"""Policy losses by name: each gives a loss for every token, which `aggregation.aggregate` makes a scalar.

In all of them A is the advantage, lp the log-probability of the policy in training and lp_old that of the policy that
collected the data. Log-ratios are held within +-20 before they are exponentiated. What stands outside the mask, NaN
too, has no part in values or gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat_ppo.algorithms.masked import row_means, zero_outside

LARGEST_LOG_RATIO = 20.0  # exp(20) is 5e8: far beyond every clip, and still finite when squared in fp32


@dataclass(frozen=True)
class PolicyTerms:
    """What a policy loss is made of.

    Attributes:
        logprobs: (B, R) fp32 of the policy in training, with gradient.
        old_logprobs: (B, R) fp32 of the policy that collected the data.
        advantages: (B, R) fp32.
        mask: (B, R) bool; rows may have no True token.
        selected: (B, R) bool, the tokens that clip_cov and kl_cov treat in their own way (`algorithms/correction.py`
            picks them); None for the other losses.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    selected: Tensor | None = None


@dataclass(frozen=True)
class PolicyLossSettings:
    """Constants of the losses.

    Attributes:
        clip_eps_low: in ppo, gspo, cispo and clip_cov the ratio is clipped at `1 - clip_eps_low`; in gmpo the log-ratio
            is at `-clip_eps_low`.
        clip_eps_high: likewise `1 + clip_eps_high` and `clip_eps_high`.
        dual_clip: c > 1 bounds the loss of tokens with A < 0 at `-c A` in ppo, gspo and clip_cov; 0 does not.
        sapo_tau_positive: temperature of sapo for A > 0.
        sapo_tau_negative: temperature of sapo for the others.
        kl_cov_coef: weight of `|lp - lp_old|` in kl_cov.
    """

    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    dual_clip: float = 0.0
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    kl_cov_coef: float = 1.0


@dataclass(frozen=True)
class TokenLosses:
    """What a policy loss gives.

    Attributes:
        losses: (B, R) fp32 with gradient, 0 outside the mask.
        ratio: (B, R) fp32, detached, 1 outside the mask: the ratio of probabilities that the loss works with. In gspo
            and gmpo it is the row's.
        clipped: (B, R) bool, detached, True where the clip changed the gradient; never outside the mask.
    """

    losses: Tensor
    ratio: Tensor
    clipped: Tensor


def ppo(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """`max(-A rho, -A clip(rho, 1 - low, 1 + high))`, rho = exp(lp - lp_old) (Schulman et al. 2017, eq. 7).

    Unequal bounds are DAPO's clip-higher (Yu et al. 2025); with `dual_clip` c the loss is at most `-c A` where A < 0
    (Ye et al. 2020).
    """
    return _clipped_surrogate(_log_ratio(terms).exp(), terms, settings)


def gspo(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """ppo with `s = exp(mean over the row's tokens of lp - lp_old)` for the ratio (Zheng et al. 2025, GSPO-token).

    Each token's ratio is `s sg(1 / pi) pi`: the value of s, and a gradient through its own lp alone. With one advantage
    for the row and seq_mean_token_mean the gradient is that of the sequence form.
    """
    mean = row_means(_difference(terms).detach(), terms.mask).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    logprobs = zero_outside(terms.logprobs, terms.mask)
    log_ratio = zero_outside(mean.unsqueeze(1) + (logprobs - logprobs.detach()), terms.mask)
    return _clipped_surrogate(log_ratio.exp(), terms, settings)


def cispo(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """`-sg(clip(rho, 1 - low, 1 + high)) A lp`: the weight is clipped, no token loses its gradient (MiniMax 2025)."""
    ratio = _log_ratio(terms).exp().detach()
    weight = ratio.clamp(1 - settings.clip_eps_low, 1 + settings.clip_eps_high)
    advantages = zero_outside(terms.advantages, terms.mask)
    losses = -weight * advantages * zero_outside(terms.logprobs, terms.mask)
    return TokenLosses(losses, ratio, (weight != ratio) & (advantages != 0))


def reinforce(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """`-A lp` (Williams 1992); the ratio is reported only."""
    losses = -zero_outside(terms.advantages, terms.mask) * zero_outside(terms.logprobs, terms.mask)
    return _unclipped(losses, _log_ratio(terms).exp())


def sapo(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """`-A (4 / tau) sigmoid(tau (rho - 1))`, tau by the sign of A: a gate that closes softly (SAPO, Gao et al. 2025).

    At rho = 1 its gradient is that of `-A rho`.
    """
    ratio = _log_ratio(terms).exp()
    advantages = zero_outside(terms.advantages, terms.mask)
    tau = torch.full_like(advantages, settings.sapo_tau_negative)
    tau = tau.masked_fill(advantages > 0, settings.sapo_tau_positive)
    return _unclipped(-advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)), ratio)


def gmpo(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """`-A exp(mean over the row's tokens of the clipped lp - lp_old)` on each token (GMPO, Zhao et al. 2025).

    A is the mean of the row's advantages. Where it is positive, log-ratios are cut at `clip_eps_high` from above, where
    negative at `-clip_eps_low` from below: the side on which the row would gain. With seq_mean_token_mean the loss is
    the mean over rows.
    """
    row_advantage = row_means(terms.advantages, terms.mask).unsqueeze(1)
    log_ratio = _log_ratio(terms)
    low, high = -settings.clip_eps_low, settings.clip_eps_high
    bounded = torch.where(row_advantage > 0, log_ratio.clamp_max(high), log_ratio.clamp_min(low))
    ratio = zero_outside(row_means(bounded, terms.mask).unsqueeze(1).expand_as(bounded), terms.mask).exp()
    clipped = (bounded != log_ratio) & (row_advantage != 0)
    return TokenLosses(zero_outside(-row_advantage * ratio, terms.mask), ratio.detach(), clipped)


def clip_cov(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """ppo without the `selected` tokens: they add neither loss nor gradient (Clip-Cov, Cui et al. 2025)."""
    selected = _selected(terms)
    plain = ppo(terms, settings)
    losses = plain.losses.masked_fill(selected, 0.0)
    return TokenLosses(
        losses, plain.ratio, plain.clipped | (selected & (zero_outside(terms.advantages, terms.mask) != 0))
    )


def kl_cov(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """`-A rho`, plus `kl_cov_coef |lp - lp_old|` on the `selected` tokens; no clip (KL-Cov, Cui et al. 2025)."""
    ratio = _log_ratio(terms).exp()
    penalty = zero_outside(_difference(terms).abs(), _selected(terms))
    return _unclipped(-zero_outside(terms.advantages, terms.mask) * ratio + settings.kl_cov_coef * penalty, ratio)


POLICY_LOSSES: dict[str, Callable[[PolicyTerms, PolicyLossSettings], TokenLosses]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "sapo": sapo,
    "gmpo": gmpo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


def _clipped_surrogate(ratio: Tensor, terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    advantages = zero_outside(terms.advantages, terms.mask)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - settings.clip_eps_low, 1 + settings.clip_eps_high)
    losses, clipped = torch.maximum(plain, bounded), bounded > plain
    if settings.dual_clip:
        ceiling = torch.where(advantages < 0, -settings.dual_clip * advantages, torch.inf)
        clipped = clipped | (losses > ceiling)
        losses = torch.minimum(losses, ceiling)
    return TokenLosses(losses, ratio.detach(), clipped.detach())


def _unclipped(losses: Tensor, ratio: Tensor) -> TokenLosses:
    return TokenLosses(losses, ratio.detach(), torch.zeros_like(losses, dtype=torch.bool))


def _selected(terms: PolicyTerms) -> Tensor:
    if terms.selected is None:
        raise ValueError("clip_cov and kl_cov need `selected`, the tokens to treat")
    return terms.selected


def _difference(terms: PolicyTerms) -> Tensor:
    """(B, R) `lp - lp_old`, 0 outside the mask."""
    return zero_outside(terms.logprobs - terms.old_logprobs, terms.mask)


def _log_ratio(terms: PolicyTerms) -> Tensor:
    return _difference(terms).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
