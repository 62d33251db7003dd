"""Scored rollout -> experience: token rewards, advantages, and which tokens count in the policy
loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.advantage_estimators import (
    ESTIMATORS,
    AdvantageInputs,
    RunningScale,
    by_turn,
    clip_scores,
    missing_eos,
    overlong_penalty,
    token_rewards,
)
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
from dschat_ppo.checkpoint.manager import load_saved
from dschat_ppo.common.own_functions import function_named
from dschat_ppo.common.phases import block
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.types import Experience, RewardedRollout, ScoredRollout

CLIP_COV_BOUNDS = (1.0, 5.0)  # covariances that clip_cov acts on (Cui et al. 2025)
# the others follow the rewards of tokens
_OF_WHOLE_ROWS = set(ESTIMATORS) - {"gae", "reinforce_plus_plus"}
# (N, R) numbers that scoring gives
_OF_TOKENS = ("old_logprobs", "entropies", "ref_logprobs", "kl", "values", "teacher_logprobs")
SELECTION = 3  # separates the random stream of `selected` from others of the same seed and step


def kept_rows(rows: ScoredRollout) -> ScoredRollout:
    """The rows, where those without a score have left their group: their `response_mask` is empty,
    so they are in no baseline, mean, whitening or loss. They keep their length and `sampled_mask`,
    for samples. Without such rows, the same object."""
    if rows.left_group is None or not rows.left_group.any():
        return rows
    mask = rows.response_mask & rows.has_score.unsqueeze(1)  # (N, R)
    numbers = {
        name: zero_outside(getattr(rows, name), mask)
        for name in _OF_TOKENS
        if getattr(rows, name) is not None
    }
    return replace(
        rows,
        response_mask=mask,
        sampled_mask=rows.response_mask,
        episode_lengths=rows.response_lengths,
        **numbers,
    )


class AdvantageComputation:
    """Computes the experience of a PPO step from the scored rows of all ranks: `with_rewards`,
    then, with the values known, the advantages. Every rank holds the same state. The policy does
    not move in the first `warmup_rollouts` PPO steps. `score_clip` 0: scores are not clipped. With
    `to_go_weight`, that of the environment's rewards, each of these is received at the end of its
    turn, and the rest of the score at the last token. `distill_coef`: weight of the KL to the
    teacher at each token, a reward that is received there and whose discount is 0.
    `source_weights`: of the reward sources, in the order of `source_scores`."""

    def __init__(
        self,
        flags: AlgorithmFlags,
        max_length: int,
        seed: int,
        score_clip: float,
        warmup_rollouts: int = 0,
        to_go_weight: float | None = None,
        distill_coef: float = 0.0,
        source_weights: Sequence[float] = (),
    ):
        self.flags = flags
        self.distill_coef = distill_coef
        self.source_weights = list(source_weights)
        self.estimate = function_named(
            "--advantage_estimator", flags.advantage_estimator, ESTIMATORS
        )
        self.score_clip = score_clip
        self.to_go_weight = to_go_weight
        self.warmup_rollouts = warmup_rollouts
        self.max_length = max_length
        self.seed = seed
        self.kl_coef: AdaptiveKL | FixedCoefficient = FixedCoefficient(flags.kl_reward_coef)
        if flags.kl_target is not None:
            self.kl_coef = AdaptiveKL(flags.kl_reward_coef, flags.kl_target, flags.kl_horizon)
        self.running = RunningScale()
        # in the last experience, before the coefficient adapted to it
        self.used_kl_coef = self.kl_coef.value
        self.before = self.state_dict()  # before the last rows

    def with_rewards(self, rows: ScoredRollout) -> RewardedRollout:
        """The score of each answer on its last token minus the KL penalty at each token; the mask
        of the policy loss. Rows without a score leave, and the running scale adapts to the scores
        of the others, first."""
        rows = kept_rows(rows)
        flags = self.flags
        mask = rows.response_mask
        self.before = self.state_dict()
        if flags.normalize_rewards == "running":
            self.running.update(rows.scores[rows.has_score])
        kl = torch.zeros_like(rows.rollout_logprobs) if rows.kl is None else rows.kl  # (N, R)
        self.used_kl_coef = self.kl_coef.value
        # (N,)
        scores = self.scaled_and_clipped(rows.scores) + missing_eos(
            rows.ended, flags.missing_eos_penalty
        )
        if flags.overlong_buffer:
            scores = scores + overlong_penalty(
                rows.response_lengths,
                self.max_length,
                flags.overlong_buffer,
                flags.overlong_penalty,
            )
        if self.to_go_weight is None:
            rewards = token_rewards(scores, kl, mask, self.used_kl_coef)  # (N, R)
        else:
            at_turns = self._at_turns(rows)
            at_the_end = (scores.double() - at_turns.double().sum(dim=1)).float()  # (N,)
            rewards = token_rewards(at_the_end, kl, mask, self.used_kl_coef) + at_turns
        if flags.mask_truncated_answers:
            loss_mask = mask & rows.ended.unsqueeze(1)
        else:
            loss_mask = mask
        return RewardedRollout(
            **vars(rows),
            rewards=rewards,
            loss_mask=loss_mask,
            row_indices=torch.arange(len(mask), device=mask.device),
            penalised_scores=scores,
        )

    def advantages(self, rows: RewardedRollout, step: int) -> Experience:
        """Advantages, factors of the token losses and selected tokens of N rows; then adapts the KL
        coefficient for the next step. The rewards, and what a group compares, include the KL
        penalty. The tokens of the covariance losses are chosen among all tokens of the PPO step, by
        the log-probs of the policy that sampled them, so the choice depends neither on
        micro-batches nor on ranks."""
        flags = self.flags
        mask = rows.response_mask
        assert rows.penalised_scores is not None
        baselines = None if rows.baselines is None else self.scaled_and_clipped(rows.baselines)
        inputs = AdvantageInputs(
            rows.rewards,
            rows.values,
            mask,
            rows.groups,
            baselines,
            flags.gamma,
            flags.gae_lambda,
            flags.normalize_group_std,
            flags.group_std == "batch",
            source_scores=rows.source_scores,
            source_weights=torch.tensor(
                self.source_weights, dtype=torch.float64, device=mask.device
            ),
            scores=rows.scores if flags.advantage_estimator == "gdpo" else rows.penalised_scores,
        )
        with block("advantages"):
            if self.to_go_weight is not None and flags.advantage_estimator in _OF_WHOLE_ROWS:
                # (N, R) each
                advantages, returns = by_turn(self.estimate, inputs, self._at_turns(rows))
            else:
                advantages, returns = self.estimate(inputs)
            if flags.whitens:
                advantages = masked_whiten(advantages, mask)
            # (Lu and Thinking Machines Lab 2025, "On-policy distillation")
            if rows.teacher_logprobs is not None:
                kl = torch.where(mask, kl_k1(rows.policy_logprobs, rows.teacher_logprobs), 0.0)
                if rows.teachers is None:
                    taught = torch.ones_like(mask[:, :1])
                else:
                    taught = (rows.teachers >= 0).unsqueeze(1)
                advantages = advantages - self.distill_coef * kl * taught
        weights = mask.float()  # (N, R)
        if flags.importance_correction != "none":
            assert rows.old_logprobs is not None
            weights = weights * importance_weights(
                rows.old_logprobs,
                rows.rollout_logprobs,
                mask,
                flags.importance_correction,
                flags.importance_mode,
                flags.importance_cap,
                flags.importance_floor,
            )
        if flags.high_entropy_share < 1:
            assert rows.entropies is not None
            weights = weights * high_entropy_tokens(
                rows.entropies, rows.loss_mask, flags.high_entropy_share
            )
        selected = None  # (N, R) bool
        if flags.selects_tokens:
            assert rows.old_logprobs is not None
            covariances = token_covariances(advantages, rows.old_logprobs, rows.loss_mask)
            if flags.policy_loss == "kl_cov":
                selected = kl_cov_tokens(covariances, rows.loss_mask, flags.covariance_share)
            else:
                generator = shared_generator(self.seed, step, 0, SELECTION)
                share = flags.covariance_share
                selected = clip_cov_tokens(
                    covariances, rows.loss_mask, share, *CLIP_COV_BOUNDS, generator
                )
        if step > self.warmup_rollouts and rows.ref_logprobs is not None:
            mean_kl = masked_sum(
                kl_k1(rows.policy_logprobs, rows.ref_logprobs), mask
            ) / mask.sum().clamp_min(1)
            self.kl_coef.update(float(mean_kl), int(rows.has_score.sum()))
        return Experience(
            **vars(rows),
            advantages=advantages,
            returns=returns,
            loss_weights=weights,
            selected=selected,
        )

    def _at_turns(self, rows: ScoredRollout) -> Tensor:
        """(N, R) fp32, the part of the scores that is received at the ends of turns."""
        assert self.to_go_weight is not None and rows.turn_rewards is not None
        at_turns = self.scaled(self.to_go_weight * rows.turn_rewards)
        return zero_outside(at_turns, rows.has_score.unsqueeze(1).expand_as(at_turns))

    def undo(self) -> None:
        """Restore the state before the last `with_rewards`."""
        self.load_state_dict(self.before)

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
        if self.flags.normalize_rewards == "running":
            running = self.running.state_dict()
        else:
            running = {}
        return {"kl_coef": self.kl_coef.state_dict(), "running": running}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the parts of `state_dict()` that the flags use."""
        if self.flags.kl_target is not None:
            load_saved("--kl_target", state["kl_coef"], self.kl_coef.load_state_dict)
        if self.flags.normalize_rewards == "running":
            load_saved(
                "--normalize_rewards running", state["running"], self.running.load_state_dict
            )
