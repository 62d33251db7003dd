"""Scored rollout -> experience: what the scores become, advantages, and which tokens count."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.advantage_estimators import ESTIMATORS, AdvantageInputs, token_rewards
from dschat_ppo.algorithms.controllers import AdaptiveKL, FixedCoefficient
from dschat_ppo.algorithms.correction import (
    clip_cov_tokens,
    high_entropy_tokens,
    importance_weights,
    kl_cov_tokens,
    token_covariances,
)
from dschat_ppo.algorithms.kl import kl_k1
from dschat_ppo.algorithms.masked import masked_sum, masked_whiten
from dschat_ppo.algorithms.scores import RunningScale, clip_scores, missing_eos, overlong_penalty
from dschat_ppo.checkpoint.resumable import load_saved
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.types import Experience, ScoredRollout

SELECTION = 3  # separates the stream of `selected` from others of the same seed and step


class AdvantageComputation:
    """Makes the experience of one PPO step from the scored rows of all ranks; every rank holds the same state.

    The order: scores are scaled, clipped, penalised for length; the KL penalty is taken off token by token; then come
    baseline and advantages, so that the KL is inside what a group is compared by.

    Args:
        flags: of the algorithm.
        max_length: most tokens of an answer.
        seed: of the run.
    """

    def __init__(self, flags: AlgorithmFlags, max_length: int, seed: int):
        self.flags = flags
        self.max_length = max_length
        self.seed = seed
        self.kl_coef: AdaptiveKL | FixedCoefficient = FixedCoefficient(flags.kl_reward_coef)
        if flags.kl_target is not None:
            self.kl_coef = AdaptiveKL(flags.kl_reward_coef, flags.kl_target, flags.kl_horizon)
        self.running = RunningScale()

    def experience(self, rows: ScoredRollout, step: int) -> Experience:
        """Rewards, advantages and masks of the rows; then the coefficient of KL is adapted, for the next step."""
        scores = self._final_scores(rows)
        kl = torch.zeros_like(rows.old_logprobs) if rows.kl is None else rows.kl
        rewards = token_rewards(scores, kl, rows.response_mask, self.kl_coef.value)
        advantages, returns = ESTIMATORS[self.flags.advantage_estimator](self._inputs(rows, rewards, scores))
        if self.flags.whitens:
            advantages = masked_whiten(advantages, rows.response_mask)
        loss_mask = rows.response_mask
        if self.flags.mask_truncated_answers:
            loss_mask = loss_mask & rows.ended.unsqueeze(1)
        made: dict[str, Any] = {field.name: getattr(rows, field.name) for field in fields(rows)}
        experience = Experience(
            **made, rewards=rewards, advantages=advantages, returns=returns, loss_mask=loss_mask,
            loss_weights=self._weights(rows, loss_mask), selected=None,
        )  # fmt: skip
        if step > self.flags.critic_warmup_rollouts:  # before, the policy stays where it was
            self._adapt(rows)
        return replace(experience, selected=self._selected(experience, step))

    def _inputs(self, rows: ScoredRollout, rewards: Tensor, scores: Tensor) -> AdvantageInputs:
        flags = self.flags
        baselines = None if rows.baselines is None else self.shaped(rows.baselines)
        return AdvantageInputs(
            rewards, rows.values, rows.response_mask, rows.groups, baselines, flags.gamma, flags.gae_lambda,
            flags.normalize_group_std, scores=scores,
        )  # fmt: skip

    def shaped(self, scores: Tensor) -> Tensor:
        """Scores after scaling and clipping, (B,) fp32."""
        if self.flags.normalize_rewards == "running":
            scores = self.running.scale(scores)
        return clip_scores(scores, self.flags.reward_clip)

    def _final_scores(self, rows: ScoredRollout) -> Tensor:
        """(B,) scores after scaling, clipping and penalties."""
        flags = self.flags
        if flags.normalize_rewards == "running":
            self.running.update(rows.scores)
        scores = self.shaped(rows.scores) + missing_eos(rows.ended, flags.missing_eos_penalty)
        if flags.overlong_buffer:
            lengths = rows.response_mask.sum(dim=1)
            scores = scores + overlong_penalty(lengths, self.max_length, flags.overlong_buffer, flags.overlong_penalty)
        return scores

    def _weights(self, rows: ScoredRollout, mask: Tensor) -> Tensor:
        """Factors of the token losses, (B, R) fp32."""
        flags = self.flags
        weights = rows.response_mask.float()
        if flags.importance_correction != "none":
            weights = weights * importance_weights(
                rows.old_logprobs, rows.rollout_logprobs, rows.response_mask, flags.importance_correction,
                flags.importance_mode, flags.importance_cap,
            )  # fmt: skip
        if flags.high_entropy_share < 1:
            assert rows.entropies is not None
            weights = weights * high_entropy_tokens(rows.entropies, mask, flags.high_entropy_share)
        return weights

    def _selected(self, rows: Experience, step: int) -> Tensor | None:
        """Tokens for the covariance losses, among all of the PPO step, by the log-probs of the policy that sampled, so
        that the choice depends neither on micro-batches nor on ranks."""
        flags = self.flags
        if not flags.selects_tokens:
            return None
        covariances = token_covariances(rows.advantages, rows.old_logprobs, rows.loss_mask)
        if flags.policy_loss == "kl_cov":
            return kl_cov_tokens(covariances, rows.loss_mask, flags.covariance_share)
        generator = shared_generator(self.seed, step, 0, SELECTION)
        return clip_cov_tokens(
            covariances, rows.loss_mask, flags.covariance_share, flags.clip_cov_low, flags.clip_cov_high, generator
        )

    def _adapt(self, rows: ScoredRollout) -> None:
        if rows.ref_logprobs is not None:
            kl = masked_sum(kl_k1(rows.old_logprobs, rows.ref_logprobs), rows.response_mask)
            self.kl_coef.update(float(kl / rows.response_mask.sum().clamp_min(1)), len(rows.groups))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        running = self.running.state_dict() if self.flags.normalize_rewards == "running" else {}
        return {"kl_coef": self.kl_coef.state_dict(), "running": running}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`, as far as the flags ask for what is in it."""
        if self.flags.kl_target is not None:
            load_saved("--kl_target", state["kl_coef"], self.kl_coef.load_state_dict)
        if self.flags.normalize_rewards == "running":
            load_saved("--normalize_rewards running", state["running"], self.running.load_state_dict)
