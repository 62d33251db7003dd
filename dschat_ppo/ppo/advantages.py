"""Scored rollout -> experience: token rewards, advantages, and which tokens count in the policy
loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.advantage_estimators import ESTIMATORS, AdvantageInputs, Estimator
from dschat_ppo.algorithms.aggregation import masked_sum, masked_whiten, zero_outside
from dschat_ppo.algorithms.controllers import AdaptiveKL, FixedCoefficient
from dschat_ppo.algorithms.correction import (
    clip_cov_tokens,
    high_entropy_tokens,
    importance_weights,
    kl_cov_tokens,
    token_covariances,
)
from dschat_ppo.algorithms.kl import kl_k1
from dschat_ppo.algorithms.token_rewards import (
    RunningScale,
    clip_scores,
    missing_eos,
    overlong_penalty,
    token_rewards,
)
from dschat_ppo.checkpoint.manager import load_saved
from dschat_ppo.common.own_functions import function_named
from dschat_ppo.common.phases import block
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features import hooks
from dschat_ppo.types import Experience, RewardedRollout, ScoredRollout

CLIP_COV_BOUNDS = (1.0, 5.0)  # covariances that clip_cov acts on (Cui et al. 2025)
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
    return replace(
        rows,
        response_mask=mask,
        sampled_mask=rows.response_mask,
        episode_lengths=rows.response_lengths,
        **masked_columns,
    )


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
        self.estimate = function_named(
            "--advantage_estimator", flags.advantage_estimator, ESTIMATORS
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
        flags = self.flags
        mask = rows.response_mask
        self.state_before = self.state_dict()
        if flags.normalize_rewards == "running":
            self.running.update(rows.scores[rows.has_score])
        self.used_kl_coef = self.kl_coef.value

        scores = self.scaled_and_clipped(rows.scores)  # (N,)
        scores = scores + missing_eos(rows.ended, flags.missing_eos_penalty)
        if flags.overlong_buffer:
            scores = scores + overlong_penalty(
                rows.response_lengths,
                self.max_length,
                flags.overlong_buffer,
                flags.overlong_penalty,
            )

        kl = rows.kl  # (N, R)
        if kl is None:
            kl = torch.zeros_like(rows.rollout_logprobs)
        if self.early_rewards is None:
            rewards = token_rewards(scores, kl, mask, self.used_kl_coef)  # (N, R)
        else:
            early = self._scaled_early_rewards(self.early_rewards, rows)
            last_rewards = (scores.double() - early.double().sum(dim=1)).float()  # (N,)
            rewards = token_rewards(last_rewards, kl, mask, self.used_kl_coef) + early
        loss_mask = mask
        if flags.mask_truncated_answers:
            loss_mask = mask & rows.ended.unsqueeze(1)
        return RewardedRollout(
            **vars(rows),
            rewards=rewards,
            loss_mask=loss_mask,
            row_indices=torch.arange(len(mask), device=mask.device),
            penalised_scores=scores,
        )

    def advantages(self, rows: RewardedRollout, step: int) -> Experience:
        """Advantages, returns, weights of the token losses and selected tokens of N rows; then
        adapts the KL coefficient for the next step. The rewards, and what a group compares, include
        the KL penalty."""
        mask = rows.response_mask
        with block("advantages"):
            advantages, returns = self._estimated(rows)  # (N, R) each
            if self.flags.whitens:
                advantages = masked_whiten(advantages, mask)
            for term in self.terms:
                advantages = advantages + term(rows)
        experience = Experience(
            **vars(rows),
            advantages=advantages,
            returns=returns,
            loss_weights=self._loss_weights(rows),
            selected=self._selected_tokens(rows, advantages, step),
        )
        if step > self.warmup_rollouts and rows.ref_logprobs is not None:
            kl = kl_k1(rows.policy_logprobs, rows.ref_logprobs)
            mean_kl = masked_sum(kl, mask) / mask.sum().clamp_min(1)
            self.kl_coef.update(float(mean_kl), int(rows.has_score.sum()))
        return experience

    def _estimated(self, rows: RewardedRollout) -> tuple[Tensor, Tensor]:
        """Advantages and returns by `--advantage_estimator`, (N, R) each."""
        flags = self.flags
        baselines = None
        if rows.baselines is not None:
            baselines = self.scaled_and_clipped(rows.baselines)
        assert rows.penalised_scores is not None
        scores = rows.penalised_scores
        if flags.advantage_estimator == "gdpo":
            scores = rows.scores
        inputs = AdvantageInputs(
            rewards=rows.rewards,
            values=rows.values,
            response_mask=rows.response_mask,
            groups=rows.groups,
            baselines=baselines,
            gamma=flags.gamma,
            lam=flags.gae_lambda,
            normalise_std=flags.normalize_group_std,
            batch_std=flags.group_std == "batch",
            scores=scores,
            source_scores=rows.source_scores,
            source_weights=torch.tensor(
                self.source_weights, dtype=torch.float64, device=scores.device
            ),
        )
        if self.early_rewards is not None and flags.advantage_estimator in _OF_WHOLE_ROWS:
            early = self._scaled_early_rewards(self.early_rewards, rows)
            return self.early_rewards.estimate(self.estimate, inputs, early)
        advantages, returns = self.estimate(inputs)
        return advantages, returns

    def _loss_weights(self, rows: RewardedRollout) -> Tensor:
        """The weight of each token in the policy loss, (N, R) fp32: 1 on response tokens, times the
        importance weight (`--importance_correction`), and 0 where the entropy is too low
        (`--high_entropy_share`)."""
        flags = self.flags
        weights = rows.response_mask.float()
        if flags.importance_correction != "none":
            assert rows.old_logprobs is not None
            weights = weights * importance_weights(
                rows.old_logprobs,
                rows.rollout_logprobs,
                rows.response_mask,
                level=flags.importance_correction,
                mode=flags.importance_mode,
                cap=flags.importance_cap,
                floor=flags.importance_floor,
            )
        if flags.high_entropy_share < 1:
            assert rows.entropies is not None
            weights = weights * high_entropy_tokens(
                rows.entropies, rows.loss_mask, flags.high_entropy_share
            )
        return weights

    def _selected_tokens(
        self, rows: RewardedRollout, advantages: Tensor, step: int
    ) -> Tensor | None:
        """The tokens that the covariance losses act on, (N, R) bool; None with other losses.

        They are chosen among all tokens of the PPO step, by the log-probs of the policy that
        sampled them, so the choice depends neither on micro-batches nor on ranks.
        """
        flags = self.flags
        if not flags.selects_tokens:
            return None
        assert rows.old_logprobs is not None
        mask = rows.loss_mask
        covariances = token_covariances(advantages, rows.old_logprobs, mask)
        share = flags.covariance_share
        if flags.policy_loss == "kl_cov":
            return kl_cov_tokens(covariances, mask, share)
        generator = shared_generator(self.seed, step, 0, SELECTION)
        return clip_cov_tokens(covariances, mask, share, *CLIP_COV_BOUNDS, generator)

    def _scaled_early_rewards(self, early_rewards: EarlyRewards, rows: ScoredRollout) -> Tensor:
        """The early rewards after scaling, (N, R) fp32; 0 in rows without a score."""
        early = self.scaled(early_rewards.of_rows(rows))
        return zero_outside(early, rows.has_score.unsqueeze(1).expand_as(early))

    def undo(self) -> None:
        """Restore the state before the last `with_rewards`."""
        self.load_state_dict(self.state_before)

    def scaled_and_clipped(self, scores: Tensor) -> Tensor:
        """Scores after scaling and clipping, (N,) fp32."""
        return clip_scores(self.scaled(scores), self.score_clip)

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
