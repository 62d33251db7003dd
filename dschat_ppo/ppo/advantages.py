"""Scored rollout -> experience: token rewards, advantages, and which tokens count in the policy
loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.advantage_estimators import ESTIMATORS, AdvantageInputs, Estimator
from dschat_ppo.algorithms.aggregation import masked_sum, zero_outside
from dschat_ppo.algorithms.controllers import AdaptiveKL, FixedCoefficient
from dschat_ppo.algorithms.kl import kl_k1
from dschat_ppo.algorithms.step import (
    AdvantageSettings,
    advantages_of,
    counted_tokens,
    penalised_scores,
    rewards_of_tokens,
    scaled_and_clipped,
    score_magnitudes,
    selected_tokens,
    token_weights,
)
from dschat_ppo.algorithms.token_rewards import RunningScale
from dschat_ppo.checkpoint.manager import load_saved
from dschat_ppo.common.own_functions import function_named
from dschat_ppo.common.phases import block
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features import hooks
from dschat_ppo.types import Experience, RewardedRollout, ScoredRollout

# estimators whose advantage is one number for all tokens of a row; the others follow the rewards of
# tokens
_OF_WHOLE_ROWS = set(ESTIMATORS) - {"gae", "reinforce_plus_plus"}
# columns (N, R) that the core's passes add; users of the columns of features apply the mask
_OF_TOKENS = ("old_logprobs", "entropies", "ref_logprobs", "kl", "values")
SELECTION = 3  # separates the draws of `selected` from others of the same seed and step

# (rows) -> what is added to the advantages of the N rows after they are whitened, (N, R) fp32
AdvantageTerm = Callable[[RewardedRollout], Tensor]


def advantage_terms(config: PPOConfig) -> list[AdvantageTerm]:
    """The terms that features add to the advantages. A feature offers
    `advantage_terms.advantage_term_of(config)`, an `AdvantageTerm` or None."""
    terms = [
        advantage_term_of(config)
        for advantage_term_of in hooks("advantage_terms.advantage_term_of")
    ]
    return [term for term in terms if term is not None]


def empty_rows_without_score(rows: ScoredRollout) -> ScoredRollout:
    """The rows, with an empty `response_mask` where a row without a score has left its group: so it
    is in no baseline, mean, whitening or loss. It keeps its length and `sampled_mask`, for samples.
    If no row has left, the same object."""
    if rows.left_group is None or not rows.left_group.any():
        return rows
    mask = rows.response_mask & rows.has_score.unsqueeze(1)  # (N, R)
    masked_columns: dict[str, Any] = {}
    for name in _OF_TOKENS:
        column = getattr(rows, name)
        if column is not None:
            masked_columns[name] = zero_outside(column, mask)
    emptied = replace(rows, response_mask=mask, sampled_mask=rows.response_mask, **masked_columns)
    return emptied.with_lengths(rows.response_lengths)


@dataclass(frozen=True)
class EarlyRewards:
    """A part of the scores that tokens before the last one receive."""

    # (N rows) -> (N, R) fp32, the part, where it is received
    of_rows: Callable[[ScoredRollout], Tensor]
    # (an estimator of whole rows, its inputs, the part after scaling) -> advantages and returns,
    # (N, R) each, in which each token is credited with what is received from it on
    estimate: Callable[[Estimator, AdvantageInputs, Tensor], tuple[Tensor, Tensor]]


def early_rewards_of(config: PPOConfig) -> EarlyRewards | None:
    """The early rewards of a run; None: there are none. A feature offers them as
    `token_rewards.early_rewards`, with this argument."""
    for early_rewards in hooks("token_rewards.early_rewards"):
        rewards: EarlyRewards | None = early_rewards(config)
        if rewards is not None:
            return rewards
    return None


def advantage_settings(
    flags: AlgorithmFlags, max_length: int, score_clip: float, source_weights: Sequence[float]
) -> AdvantageSettings:
    """The constants of rewards and advantages at the start of a run.

    Args:
        flags: of the algorithm.
        max_length: longest response in tokens.
        score_clip: scores are clipped to +- this; 0: they are not.
        source_weights: of the reward sources, in the order of `source_scores`.
    """
    selection: Any = "none"
    if flags.selects_tokens:
        selection = flags.policy_loss
    return AdvantageSettings(
        estimate=function_named("--advantage_estimator", flags.advantage_estimator, ESTIMATORS),
        score_divisor=None,
        score_clip=score_clip,
        missing_eos_penalty=flags.missing_eos_penalty,
        max_length=max_length,
        overlong_buffer=flags.overlong_buffer,
        overlong_penalty=flags.overlong_penalty,
        kl_coef=flags.kl_reward_coef,
        mask_truncated_answers=flags.mask_truncated_answers,
        gamma=flags.gamma,
        lam=flags.gae_lambda,
        normalise_std=flags.normalize_group_std,
        batch_std=flags.group_std == "batch",
        source_weights=list(source_weights),
        compares_sources=flags.advantage_estimator == "gdpo",
        whitens=flags.whitens,
        importance_correction=flags.importance_correction,
        importance_mode=flags.importance_mode,
        importance_cap=flags.importance_cap,
        importance_floor=flags.importance_floor,
        high_entropy_share=flags.high_entropy_share,
        selected_tokens=selection,
        covariance_share=flags.covariance_share,
    )


@dataclass(eq=False)
class AdvantageComputation:
    """Computes the experience of a PPO step from the scored rows of all ranks: `with_rewards`,
    then, with the values known, `advantages`. Every rank holds the same state: the KL coefficient
    and the running scale of the scores, which adapt."""

    flags: AlgorithmFlags
    max_length: int  # longest response in tokens
    seed: int
    score_clip: float  # 0: scores are not clipped
    warmup_rollouts: int = 0  # first PPO steps, in which the policy does not move
    # None: the last token receives all of the score
    early_rewards: EarlyRewards | None = None
    source_weights: Sequence[float] = ()  # of the reward sources, in the order of `source_scores`
    terms: Sequence[AdvantageTerm] = ()  # of features

    def __post_init__(self) -> None:
        flags = self.flags
        self.first_settings = advantage_settings(
            flags, self.max_length, self.score_clip, self.source_weights
        )
        self.kl_coef: AdaptiveKL | FixedCoefficient = FixedCoefficient(flags.kl_reward_coef)
        if flags.kl_target is not None:
            self.kl_coef = AdaptiveKL(flags.kl_reward_coef, flags.kl_target, flags.kl_horizon)
        # of the last experience: the coefficient before it adapted
        self.used_kl_coef = self.kl_coef.value
        self.running = RunningScale()
        self.state_before = self.state_dict()  # before the last `with_rewards`

    def with_rewards(self, rows: ScoredRollout) -> RewardedRollout:
        """The N rows with the reward of each token, and with the mask of the policy loss.

        The reward of a token is minus its KL penalty, plus the early rewards received at it; on the
        last token of a response, plus what these leave of its score. First rows without a score
        leave, and the running scale adapts to the scores of the others.
        """
        rows = empty_rows_without_score(rows)
        self.state_before = self.state_dict()
        if self.flags.normalize_rewards == "running":
            self.running.update(rows.scores[rows.has_score])
        self.used_kl_coef = self.kl_coef.value
        settings = self.settings

        scores = penalised_scores(rows, settings)  # (N,)
        if self.early_rewards is None:
            rewards = rewards_of_tokens(scores, rows, settings)  # (N, R)
        else:
            early = self._scaled_early_rewards(self.early_rewards, rows)
            last_rewards = (scores.double() - early.double().sum(dim=1)).float()  # (N,)
            rewards = rewards_of_tokens(last_rewards, rows, settings) + early
        return RewardedRollout(
            **vars(rows),
            rewards=rewards,
            loss_mask=counted_tokens(rows, settings),
            row_indices=torch.arange(len(scores), device=scores.device),
            penalised_scores=scores,
        )

    def advantages(self, rows: RewardedRollout, step: int) -> Experience:
        """Advantages, returns, weights of the token losses and selected tokens of N rows; then
        adapts the KL coefficient for the next step. The rewards, and what a group compares, include
        the KL penalty."""
        settings = self.settings
        if self.early_rewards is not None and self.flags.advantage_estimator in _OF_WHOLE_ROWS:
            settings = self._crediting_early_rewards(self.early_rewards, rows)
        with block("advantages"):
            advantages, returns = advantages_of(rows, settings)  # (N, R) each
            for term in self.terms:
                advantages = advantages + term(rows)
        generator = shared_generator(self.seed, step, 0, SELECTION)
        experience = Experience(
            **vars(rows),
            advantages=advantages,
            returns=returns,
            loss_weights=token_weights(rows, settings),
            selected=selected_tokens(rows, advantages, settings, generator),
        )
        if step > self.warmup_rollouts and rows.ref_logprobs is not None:
            kl = kl_k1(rows.policy_logprobs, rows.ref_logprobs)
            mean_kl = masked_sum(kl, rows.response_mask) / rows.response_mask.sum().clamp_min(1)
            self.kl_coef.update(float(mean_kl), int(rows.has_score.sum()))
        return experience

    @property
    def settings(self) -> AdvantageSettings:
        """The constants of the experience in hand, with those that adapt."""
        divisor = None
        if self.flags.normalize_rewards == "running":
            divisor = self.running.divisor
        return replace(self.first_settings, score_divisor=divisor, kl_coef=self.used_kl_coef)

    def _crediting_early_rewards(
        self, early_rewards: EarlyRewards, rows: RewardedRollout
    ) -> AdvantageSettings:
        """The settings with an estimator of whole rows that credits each token with what is
        received from it on."""
        settings = self.settings
        early = self._scaled_early_rewards(early_rewards, rows)

        def estimate(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
            return early_rewards.estimate(settings.estimate, inputs, early)

        return replace(settings, estimate=estimate)

    def _scaled_early_rewards(self, early_rewards: EarlyRewards, rows: ScoredRollout) -> Tensor:
        """The early rewards after scaling, (N, R) fp32; 0 in rows without a score."""
        early = self.scaled(early_rewards.of_rows(rows))
        return zero_outside(early, rows.has_score.unsqueeze(1).expand_as(early))

    def undo(self) -> None:
        """Restore the state before the last `with_rewards`."""
        self.load_state_dict(self.state_before)

    def scaled_and_clipped(self, scores: Tensor) -> Tensor:
        """Scores after scaling and clipping, (N,) fp32."""
        return scaled_and_clipped(scores, self.settings)

    def score_magnitudes(self, rows: ScoredRollout) -> Tensor:
        """Sizes of the numbers that scores were added up from, after scaling, (N,) fp64."""
        return score_magnitudes(rows, self.settings)

    def scaled(self, scores: Tensor) -> Tensor:
        """Scores after scaling, (N,) fp32."""
        if self.flags.normalize_rewards == "running":
            return self.running.scale(scores)
        return scores

    def state_dict(self) -> dict[str, Any]:
        """The adapted KL coefficient and the running scale."""
        running: dict[str, Any] = {}
        if self.flags.normalize_rewards == "running":
            running = self.running.state_dict()
        return {"kl_coef": self.kl_coef.state_dict(), "running": running}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the parts of `state_dict()` that the flags use."""
        if self.flags.kl_target is not None:
            load_saved("--kl_target", state["kl_coef"], self.kl_coef.load_state_dict)
        if self.flags.normalize_rewards == "running":
            load_saved(
                "--normalize_rewards running", state["running"], self.running.load_state_dict
            )
