"""Losses of actor and critic: one function each, giving a loss for every token; `aggregate` makes a
scalar of them.

In the formulas A is the advantage, lp the log-probability under the policy in training, lp_old that
under the policy that collected the data, and rho = exp(lp - lp_old). Log-ratios are clamped to +-20
before they are exponentiated. Values outside the mask, NaN too, affect neither losses nor
gradients. sg(x) is x without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat_ppo.algorithms.aggregation import row_means, zero_outside
from dschat_ppo.algorithms.kl import smooth_abs

CLOSEST_TO_ONE = -1e-8  # log-probs above this count as this, so that log(1 - p) is finite
# exp(20) is 5e8: far beyond every clip, and still finite when squared in fp32
LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyTerms:
    """Inputs of a policy loss, for B rows and R response tokens."""

    logprobs: Tensor  # (B, R) fp32 with gradient, log-probs under the policy in training
    old_logprobs: Tensor  # (B, R) fp32, log-probs under the policy that collected the data
    advantages: Tensor  # (B, R) fp32
    mask: Tensor  # (B, R) bool, True on tokens that count; rows may have none
    # (B, R) bool, tokens that clip_cov or kl_cov acts on; None for the other losses
    selected: Tensor | None = None

    @property
    def log_ratio(self) -> Tensor:
        """(B, R) `lp - lp_old`, clamped to +-20, 0 outside the mask."""
        log_ratio = zero_outside(self.logprobs - self.old_logprobs, self.mask)
        return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


@dataclass(frozen=True)
class PolicyLossSettings:
    """Constants of the policy losses."""

    # lower clip of the ratio at 1 - this (gmpo: of the log-ratio at -this; dppo_tv and dppo_kl: the
    # largest divergence)
    clip_eps_low: float = 0.2
    # upper clip of the ratio at 1 + this (gmpo: of the log-ratio at this; dppo_tv and dppo_kl: the
    # largest divergence)
    clip_eps_high: float = 0.2
    # c > 1 bounds the loss at -c A where A < 0 (ppo, gspo, clip_cov); 0 = off
    dual_clip: float = 0.0
    sapo_tau_positive: float = 1.0  # temperature of sapo where A > 0
    sapo_tau_negative: float = 1.05  # temperature of sapo elsewhere
    kl_cov_coef: float = 1.0  # weight of |lp - lp_old| in kl_cov


@dataclass(frozen=True)
class TokenLosses:
    """Output of a policy loss."""

    losses: Tensor  # (B, R) fp32 with gradient, 0 outside the mask
    # (B, R) fp32, detached, 1 outside the mask: the ratio in the loss (gspo, gmpo: one for the row)
    ratio: Tensor
    # (B, R) bool, detached, True where the clip changed the gradient; False outside the mask
    clipped: Tensor


def ppo(
    terms: PolicyTerms, settings: PolicyLossSettings, ratio: Tensor | None = None
) -> TokenLosses:
    """`max(-A rho, -A clip(rho, 1 - low, 1 + high))` (Schulman et al. 2017, eq. 7). Unequal bounds:
    clip-higher (DAPO, Yu et al. 2025). `dual_clip` c: at most `-c A` where A < 0 (Ye et al. 2020).
    `ratio` (B, R) replaces rho."""
    if ratio is None:
        ratio = terms.log_ratio.exp()
    advantages = zero_outside(terms.advantages, terms.mask)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - settings.clip_eps_low, 1 + settings.clip_eps_high)
    losses = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if settings.dual_clip:
        ceiling = torch.where(advantages < 0, -settings.dual_clip * advantages, torch.inf)
        clipped = clipped | (losses > ceiling)
        losses = torch.minimum(losses, ceiling)
    return TokenLosses(losses, ratio.detach(), clipped.detach())


def gspo(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """ppo with the ratio `s = exp(mean over the row's tokens of lp - lp_old)` (GSPO-token, Zheng et
    al. 2025).

    The ratio of a token is `sg(s) pi / sg(pi)`: it has the value of s and a gradient through its
    own lp only. With one advantage for the whole row and seq_mean_token_mean the gradient is that
    of the sequence form.
    """
    log_ratio = zero_outside(terms.logprobs - terms.old_logprobs, terms.mask).detach()  # (B, R)
    mean = row_means(log_ratio, terms.mask).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)  # (B,)
    logprobs = zero_outside(terms.logprobs, terms.mask)
    # (B, 1) over (B, R)
    log_s = zero_outside(mean.unsqueeze(1) + (logprobs - logprobs.detach()), terms.mask)
    return ppo(terms, settings, log_s.exp())


def cispo(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """`-sg(clip(rho, 1 - low, 1 + high)) A lp`: the weight is clipped, no token loses its gradient
    (MiniMax 2025)."""
    ratio = terms.log_ratio.exp().detach()
    weight = ratio.clamp(1 - settings.clip_eps_low, 1 + settings.clip_eps_high)
    advantages = zero_outside(terms.advantages, terms.mask)
    losses = -weight * advantages * zero_outside(terms.logprobs, terms.mask)
    return TokenLosses(losses, ratio, (weight != ratio) & (advantages != 0))


def reinforce(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """`-A lp` (Williams 1992); the ratio is only reported."""
    losses = -zero_outside(terms.advantages, terms.mask) * zero_outside(terms.logprobs, terms.mask)
    return _unclipped(losses, terms.log_ratio.exp())


def sapo(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """`-A (4 / tau) sigmoid(tau (rho - 1))`, a soft gate with tau by the sign of A (SAPO, Gao et
    al. 2025). At rho = 1 its gradient is that of `-A rho`."""
    ratio = terms.log_ratio.exp()
    advantages = zero_outside(terms.advantages, terms.mask)
    tau = torch.full_like(advantages, settings.sapo_tau_negative)
    tau = tau.masked_fill(advantages > 0, settings.sapo_tau_positive)
    return _unclipped(-advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)), ratio)


def gmpo(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """`-A exp(mean over the row's tokens of the clipped lp - lp_old)` on each token (GMPO, Zhao et
    al. 2025).

    A is the mean of the row's advantages. Log-ratios are clipped on the side on which the row would
    gain: at `clip_eps_high` from above where A > 0, at `-clip_eps_low` from below where A < 0. With
    seq_mean_token_mean the loss is the mean over rows.
    """
    advantage = row_means(terms.advantages, terms.mask).unsqueeze(1)  # (B, R) -> (B, 1)
    log_ratio = terms.log_ratio  # (B, R)
    low = -settings.clip_eps_low
    high = settings.clip_eps_high
    bounded = torch.where(advantage > 0, log_ratio.clamp_max(high), log_ratio.clamp_min(low))
    log_mean = row_means(bounded, terms.mask).unsqueeze(1).expand_as(bounded)  # (B,) -> (B, R)
    ratio = zero_outside(log_mean, terms.mask).exp()
    clipped = (bounded != log_ratio) & (advantage != 0)
    return TokenLosses(zero_outside(-advantage * ratio, terms.mask), ratio.detach(), clipped)


def dppo_tv(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """`-A rho` within a bound on the total variation of the sampled token against all others, `|p -
    p_old|` (DPPO, Qi et al. 2026, arXiv 2602.04879); see `_within`."""
    return _within(
        terms, settings, (terms.logprobs.detach().exp() - terms.old_logprobs.exp()).abs()
    )


def dppo_kl(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """`-A rho` within a bound on the KL of the sampled token against all others, `p_old log(p_old /
    p) + (1 - p_old) log((1 - p_old) / (1 - p))` (DPPO, Qi et al. 2026); see `_within`."""
    new = terms.logprobs.detach().clamp_max(CLOSEST_TO_ONE)  # (B, R)
    old = terms.old_logprobs.detach().clamp_max(CLOSEST_TO_ONE)
    of_sampled = old.exp() * (old - new)
    of_all_others = -old.expm1() * (_log1mexp(old) - _log1mexp(new))
    return _within(terms, settings, of_sampled + of_all_others)


def _log1mexp(x: Tensor) -> Tensor:
    """`log(1 - exp(x))` for x < 0, exact near 0 and far from it (Mächler 2012)."""
    return torch.where(x > -math.log(2), (-x.expm1()).log(), (-x.exp()).log1p())


def _within(terms: PolicyTerms, settings: PolicyLossSettings, divergence: Tensor) -> TokenLosses:
    """`-A rho`. A token adds neither loss nor gradient once the policy has moved the way that A
    asks for, by a `divergence` (B, R) above `clip_eps_high` where A > 0, above `clip_eps_low` where
    A < 0."""
    ratio = terms.log_ratio.exp()
    advantages = zero_outside(terms.advantages, terms.mask)
    raised = (advantages > 0) & (ratio > 1) & (divergence > settings.clip_eps_high)
    lowered = (advantages < 0) & (ratio < 1) & (divergence > settings.clip_eps_low)
    left_out = raised | lowered
    return TokenLosses((-advantages * ratio).masked_fill(left_out, 0.0), ratio.detach(), left_out)


def clip_cov(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """ppo without the `selected` tokens, which add neither loss nor gradient (Clip-Cov, Cui et al.
    2025)."""
    assert terms.selected is not None
    all_tokens = ppo(terms, settings)
    losses = all_tokens.losses.masked_fill(terms.selected, 0.0)
    left_out = terms.selected & (zero_outside(terms.advantages, terms.mask) != 0)
    return TokenLosses(losses, all_tokens.ratio, all_tokens.clipped | left_out)


def kl_cov(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLosses:
    """`-A rho`, plus `kl_cov_coef |lp - lp_old|` on the `selected` tokens; no clip (KL-Cov, Cui et
    al. 2025). The absolute value is `smooth_abs`: in the first update of a PPO step the difference
    is rounding noise."""
    assert terms.selected is not None
    ratio = terms.log_ratio.exp()
    distance = smooth_abs(zero_outside(terms.logprobs - terms.old_logprobs, terms.mask))
    penalty = zero_outside(distance, terms.selected)
    return _unclipped(
        -zero_outside(terms.advantages, terms.mask) * ratio + settings.kl_cov_coef * penalty, ratio
    )


def _unclipped(losses: Tensor, ratio: Tensor) -> TokenLosses:
    return TokenLosses(losses, ratio.detach(), torch.zeros_like(losses, dtype=torch.bool))


POLICY_LOSSES: dict[str, Callable[[PolicyTerms, PolicyLossSettings], TokenLosses]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


def value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_eps: float
) -> tuple[Tensor, Tensor]:
    """`0.5 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)` of each token; all (B, R).

    The clipping of Schulman's PPO implementation (baselines `ppo2`, 2017), as in Ouyang et al.
    2022. `old_values` are those when the rollout was scored; with `clip_eps` 0 nothing is clipped.

    Returns (losses, clipped): fp32 with gradient, 0 outside the mask; bool, True where the clipped
    error is the larger one, so that the token has no gradient.
    """
    values = zero_outside(values, mask)
    old_values = zero_outside(old_values, mask)
    returns = zero_outside(returns, mask)
    error = (values - returns) ** 2
    clipped_error = error
    if clip_eps > 0:
        clipped_values = torch.minimum(
            torch.maximum(values, old_values - clip_eps), old_values + clip_eps
        )
        clipped_error = (clipped_values - returns) ** 2
    return 0.5 * torch.maximum(error, clipped_error), (clipped_error > error).detach()
