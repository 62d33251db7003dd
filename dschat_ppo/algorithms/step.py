"""The formulas of a PPO step in the order in which data meets them: scores, token rewards,
advantages, the tokens that count, and the loss of the actor.

The loop of step 3 calls these functions (`ppo/advantages.py`, `ppo/token_losses.py`), and
`dschat-algorithm` prints their text for the flags of a run. So a branch depends on a setting alone
where it can, and functions do nothing but compute. N rows of all ranks, b rows of a micro-batch, R
response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from dschat_ppo.algorithms.actor_critic_losses import (
    PolicyLossSettings,
    PolicyTerms,
    TokenLosses,
)
from dschat_ppo.algorithms.advantage_estimators import AdvantageInputs, Estimator
from dschat_ppo.algorithms.aggregation import (
    Denominators,
    LossAggregation,
    aggregate,
    masked_whiten,
)
from dschat_ppo.algorithms.correction import (
    clip_cov_tokens,
    high_entropy_tokens,
    importance_weights,
    kl_cov_tokens,
    off_policy_rows,
    token_covariances,
)
from dschat_ppo.algorithms.token_rewards import (
    clip_scores,
    missing_eos,
    overlong_penalty,
    token_rewards,
)

if TYPE_CHECKING:
    from dschat_ppo.types import Experience, RewardedRollout, ScoredRollout

PolicyLoss = Callable[[PolicyTerms, PolicyLossSettings], TokenLosses]
CLIP_COV_BOUNDS = (1.0, 5.0)  # covariances that clip_cov acts on (Cui et al. 2025)


@dataclass(frozen=True)
class AdvantageSettings:
    """Constants of rewards and advantages in a PPO step."""

    estimate: Estimator
    score_divisor: float | None  # scores are divided by it; None: they are not
    score_clip: float  # scores are clipped to +- this; 0: they are not
    missing_eos_penalty: float
    max_length: int  # longest response in tokens
    overlong_buffer: int  # 0: there is no penalty for long responses
    overlong_penalty: float
    kl_coef: float  # weight of the KL penalty in the rewards
    mask_truncated_answers: bool
    gamma: float
    lam: float
    normalise_std: bool
    batch_std: bool
    source_weights: Sequence[float]  # of each reward source in the score
    compares_sources: bool  # the estimator compares the scores of each source, and not their sum
    whitens: bool
    importance_correction: Literal["none", "token", "sequence"]
    importance_mode: Literal["truncate", "mask"]
    importance_cap: float
    importance_floor: float | None
    high_entropy_share: float
    selected_tokens: Literal["none", "clip_cov", "kl_cov"]
    covariance_share: float


@dataclass(frozen=True)
class LossSettings:
    """Constants of the actor's loss in an optimizer step."""

    policy_loss: PolicyLoss
    policy_loss_settings: PolicyLossSettings
    off_policy_delta: float | None
    aggregation: LossAggregation
    entropy_coef: float


def scaled_and_clipped(scores: Tensor, settings: AdvantageSettings) -> Tensor:
    """Scores after scaling and clipping, (N,) fp32."""
    if settings.score_divisor is not None:
        scores = scores / settings.score_divisor
    return clip_scores(scores, settings.score_clip)


def score_magnitudes(rows: ScoredRollout, settings: AdvantageSettings) -> Tensor:
    """(N,) fp64, sizes of the numbers that the scores were added up from: `sum_k |w_k r_k|` over
    the reward sources k, after scaling. 0.9 - 3 * 0.3 is 0, but in fp32 as far from 0 as the
    rounding of 0.9. Of a score that is clipped, which has no rounding, the bound."""
    weights = torch.tensor(settings.source_weights, dtype=torch.float64)  # (K,)
    weighted = weights.to(rows.scores.device) * rows.source_scores.double()  # (N, K)
    magnitudes = weighted.abs().nan_to_num().sum(dim=1)
    if settings.score_divisor is not None:
        magnitudes = magnitudes / settings.score_divisor
    if settings.score_clip > 0:
        sizes = scaled_and_clipped(rows.scores, settings).double().abs()  # (N,)
        magnitudes = torch.where(sizes < settings.score_clip, magnitudes, sizes)
    return magnitudes


def penalised_scores(rows: ScoredRollout, settings: AdvantageSettings) -> Tensor:
    """(N,) fp32, the scores after scaling and clipping, less the penalties of responses that are
    cut or too long."""
    scores = scaled_and_clipped(rows.scores, settings)
    if settings.missing_eos_penalty > 0:
        scores = scores + missing_eos(rows.ended, settings.missing_eos_penalty)
    if settings.overlong_buffer > 0:
        scores = scores + overlong_penalty(
            rows.response_lengths,
            settings.max_length,
            settings.overlong_buffer,
            settings.overlong_penalty,
        )
    return scores


def rewards_of_tokens(scores: Tensor, rows: ScoredRollout, settings: AdvantageSettings) -> Tensor:
    """(N, R) fp32, the reward of each token: minus its KL penalty, and on the last token plus the
    score of `scores` (N,)."""
    kl = rows.kl
    if kl is None:
        kl = torch.zeros_like(rows.rollout_logprobs)
    return token_rewards(scores, kl, rows.response_mask, settings.kl_coef)


def counted_tokens(rows: ScoredRollout, settings: AdvantageSettings) -> Tensor:
    """(N, R) bool, True on the tokens in the policy loss."""
    if settings.mask_truncated_answers:
        return rows.response_mask & rows.ended.unsqueeze(1)
    return rows.response_mask


def advantages_of(rows: RewardedRollout, settings: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """Advantages and returns, (N, R) fp32 each. The rewards, and what a group compares, include the
    KL penalty."""
    baselines = None
    if rows.baselines is not None:
        baselines = scaled_and_clipped(rows.baselines, settings)
    scores = rows.penalised_scores
    source_weights = None
    if settings.compares_sources:
        scores = rows.scores
        source_weights = torch.tensor(settings.source_weights, dtype=torch.float64)
        source_weights = source_weights.to(scores.device)
    inputs = AdvantageInputs(
        rewards=rows.rewards,
        values=rows.values,
        response_mask=rows.response_mask,
        groups=rows.groups,
        baselines=baselines,
        gamma=settings.gamma,
        lam=settings.lam,
        normalise_std=settings.normalise_std,
        batch_std=settings.batch_std,
        scores=scores,
        source_scores=rows.source_scores,
        source_weights=source_weights,
        magnitudes=score_magnitudes(rows, settings),
    )
    advantages, returns = settings.estimate(inputs)
    if settings.whitens:
        advantages = masked_whiten(advantages, rows.response_mask)
    return advantages, returns


def token_weights(rows: RewardedRollout, settings: AdvantageSettings) -> Tensor:
    """The weight of each token in the policy loss, (N, R) fp32: 1 on response tokens, times the
    importance weight, and 0 where the entropy is too low."""
    weights = rows.response_mask.float()
    if settings.importance_correction != "none":
        assert rows.old_logprobs is not None
        weights = weights * importance_weights(
            rows.old_logprobs,
            rows.rollout_logprobs,
            rows.response_mask,
            level=settings.importance_correction,
            mode=settings.importance_mode,
            cap=settings.importance_cap,
            floor=settings.importance_floor,
        )
    if settings.high_entropy_share < 1:
        assert rows.entropies is not None
        counted = high_entropy_tokens(
            rows.entropies,
            rows.loss_mask,
            settings.high_entropy_share,
        )
        weights = weights * counted
    return weights


def selected_tokens(
    rows: RewardedRollout,
    advantages: Tensor,
    settings: AdvantageSettings,
    generator: torch.Generator,
) -> Tensor | None:
    """The tokens that the covariance losses act on, (N, R) bool; None with other losses.

    They are chosen among all tokens of the PPO step, by the log-probs of the policy that sampled
    them, so the choice depends neither on micro-batches nor on ranks. clip_cov draws from the
    `generator`.
    """
    if settings.selected_tokens == "none":
        return None
    assert rows.old_logprobs is not None
    mask = rows.loss_mask
    covariances = token_covariances(advantages, rows.old_logprobs, mask)
    if settings.selected_tokens == "kl_cov":
        return kl_cov_tokens(covariances, mask, settings.covariance_share)
    return clip_cov_tokens(
        covariances,
        mask,
        settings.covariance_share,
        *CLIP_COV_BOUNDS,
        generator,
    )


@dataclass(frozen=True)
class PolicyObjective:
    """The part of a micro-batch in the policy loss of its optimizer step."""

    loss: Tensor  # a scalar with gradient
    losses: Tensor  # (b, R) fp32, of each token, with its weight
    unweighted: TokenLosses
    kept_rows: Tensor | None  # (b,) bool, False for rows that are too far off-policy; None: all


def policy_objective(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rows: Experience,
    settings: LossSettings,
    denominators: Denominators,
) -> PolicyObjective:
    """The policy loss of the tokens of `rows.loss_mask`, averaged over the optimizer step, whose
    counts the `denominators` are. Log-probs (b, R) fp32, of the policy in training with gradient,
    and of the policy before the updates."""
    terms = PolicyTerms(logprobs, old_logprobs, rows.advantages, rows.loss_mask, rows.selected)
    unweighted = settings.policy_loss(terms, settings.policy_loss_settings)
    weights = rows.loss_weights
    kept_rows = None
    if settings.off_policy_delta is not None:
        kept_rows = off_policy_rows(
            logprobs,
            old_logprobs,
            rows.advantages,
            rows.loss_mask,
            settings.off_policy_delta,
        )
        weights = weights * kept_rows.unsqueeze(1)
    losses = unweighted.losses * weights
    loss = aggregate(losses, rows.loss_mask, settings.aggregation, denominators)
    return PolicyObjective(loss, losses, unweighted, kept_rows)


def loss_with_terms(
    policy_loss: Tensor,
    entropy: Tensor,
    terms: Sequence[tuple[float, Tensor]],
    rows: Experience,
    settings: LossSettings,
    denominators: Denominators,
) -> Tensor:
    """The policy loss, minus the entropy bonus, plus the `terms`, each a weight and the mean of its
    losses of tokens. `entropy` (b, R) fp32 with gradient."""
    loss = policy_loss
    if settings.entropy_coef > 0:
        mean = aggregate(entropy, rows.loss_mask, settings.aggregation, denominators)
        loss = loss - settings.entropy_coef * mean
    for coef, mean in terms:
        loss = loss + coef * mean
    return loss
