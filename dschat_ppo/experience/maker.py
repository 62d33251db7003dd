"""Rollout -> experience: old and reference log-probs, values, scores, rewards, advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.advantages import gae, token_rewards
from dschat_ppo.algorithms.kl import kl_k1
from dschat_ppo.common import dist
from dschat_ppo.experience.micro_batches import split_by_tokens
from dschat_ppo.models.forward import response_logprobs, response_values
from dschat_ppo.types import Experience, Rollout, concat_rows, row_lengths, select_rows


@dataclass(frozen=True)
class RewardShaping:
    """Constants between scores and advantages; see the flags of the same names."""

    kl_coef: float
    reward_clip: float
    missing_eos_penalty: float
    gamma: float
    gae_lambda: float


def shape_scores(scores: Tensor, ended: Tensor, shaping: RewardShaping) -> Tensor:
    """Clip the scores to +- `reward_clip` (0: not at all), then penalise answers that the length limit cut.

    Args:
        scores: (B,) fp32 from the reward source.
        ended: (B,) bool, False where the length limit cut the answer.
        shaping: constants.

    Returns:
        (B,) fp32.
    """
    clipped = scores.clamp(-shaping.reward_clip, shaping.reward_clip) if shaping.reward_clip > 0 else scores
    return clipped - shaping.missing_eos_penalty * (~ended).to(clipped.dtype)


class ExperienceMaker:
    """Scores rollouts in micro-batches. All models are in eval mode, so dropout takes no part.

    Args:
        actor, reference: engines or causal models; critic: engine or `ScalarModel`.
        reward: rollout -> scores (B,).
        shaping: constants of the reward.
        temperature: of sampling; log-probs are taken under it.
        micro_batch_tokens: budget of `split_by_tokens` for one forward pass.
        recompute: take `old_logprobs` from a forward pass of the actor; False: as recorded while sampling.
    """

    def __init__(
        self,
        actor: Any,
        reference: Any,
        critic: Any,
        reward: Callable[[Rollout], Tensor],
        shaping: RewardShaping,
        temperature: float,
        micro_batch_tokens: int,
        recompute: bool = True,
    ):
        self.actor = actor
        self.reference = reference
        self.critic = critic
        self.reward = reward
        self.shaping = shaping
        self.temperature = temperature
        self.micro_batch_tokens = micro_batch_tokens
        self.recompute = recompute

    @torch.no_grad()
    def make(self, rollout: Rollout) -> Experience:
        """Score every row. Collective; ranks with fewer passes score their last micro-batch again."""
        parts = split_by_tokens(row_lengths(rollout), self.micro_batch_tokens)
        passes = int(dist.all_reduce(torch.tensor(len(parts), device=rollout.response_ids.device), "max"))
        padded = parts + (passes - len(parts)) * parts[-1:]
        scored = [self._score(select_rows(rollout, part)) for part in padded][: len(parts)]
        return select_rows(concat_rows(scored), torch.argsort(torch.cat(parts)))

    def _score(self, rollout: Rollout) -> Experience:
        mask = rollout.response_mask
        old_logprobs = rollout.rollout_logprobs
        if self.recompute:
            old_logprobs = response_logprobs(self.actor, rollout, self.temperature)
        ref_logprobs = response_logprobs(self.reference, rollout, self.temperature)
        values = response_values(self.critic, rollout)
        old_logprobs, ref_logprobs, values = (torch.where(mask, x, 0.0) for x in (old_logprobs, ref_logprobs, values))
        scores = self.reward(rollout)
        shaping = self.shaping
        rewards = token_rewards(
            shape_scores(scores, rollout.ended, shaping),
            kl_k1(old_logprobs, ref_logprobs),
            mask,
            shaping.kl_coef,
        )
        advantages, returns = gae(rewards, values, mask, shaping.gamma, shaping.gae_lambda)
        return Experience(
            prompt_ids=rollout.prompt_ids,
            prompt_mask=rollout.prompt_mask,
            response_ids=rollout.response_ids,
            response_mask=mask,
            rollout_logprobs=rollout.rollout_logprobs,
            finish_reason=rollout.finish_reason,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            values=values,
            scores=scores,
            rewards=rewards,
            advantages=advantages,
            returns=returns,
        )
