"""Rollout -> scored rollout: old and reference log-probs, KL and values beside the scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.kl import KL_ESTIMATORS, kl_full
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.models.forward import ResponseScores, response_scores, response_values
from dschat_ppo.models.micro_batches import even_passes
from dschat_ppo.types import Rollout, ScoredRollout, concat_rows, row_lengths, select_rows, tensors_of


@dataclass(frozen=True)
class Scoring:
    """`temperature` of sampling, under which log-probs are taken; `micro_batch_tokens`, the budget of one forward pass;
    `recompute` takes `old_logprobs` and entropies from a forward pass of the actor (else as recorded while sampling);
    `kl_estimator`, the form of KL in the reward; with "full", `recompute` must be True."""

    temperature: float
    micro_batch_tokens: int
    recompute: bool
    kl_estimator: str


class ModelScorer:
    """Scores rollouts in micro-batches. All models are in eval mode, so dropout takes no part.

    Args:
        actor: engine or `PolicyModel`.
        reference: the same, or None where no KL is asked for.
        critic: engine or `ScalarModel`, or None where the estimator needs no values.
        how: constants.
    """

    def __init__(self, actor: Any, reference: Any | None, critic: Any | None, how: Scoring):
        self.actor = actor
        self.reference = reference
        self.critic = critic
        self.how = how

    @torch.no_grad()
    def make(
        self, rollout: Rollout, source_scores: Tensor, scores: Tensor, groups: Tensor, baselines: Tensor | None = None
    ) -> ScoredRollout:
        """Score every row. Collective; ranks with fewer passes score their last micro-batch again.

        Args:
            rollout: B rows.
            source_scores: (B, K) fp32, of each source of reward.
            scores: (B,) fp32, their mixture.
            groups: (B,) int64, number of each row's prompt.
            baselines: (B,) fp32, scores of greedy answers.
        """
        parts, own = even_passes(row_lengths(rollout), self.how.micro_batch_tokens)
        bare = ScoredRollout(
            **tensors_of(rollout), old_logprobs=rollout.rollout_logprobs, entropies=None, ref_logprobs=None, kl=None,
            values=None, source_scores=source_scores, scores=scores, baselines=baselines, groups=groups,
        )  # fmt: skip
        scored = [self._score(select_rows(bare, part)) for part in parts][:own]
        return select_rows(concat_rows(scored), torch.argsort(torch.cat(parts[:own])))

    def _score(self, rows: ScoredRollout) -> ScoredRollout:
        heartbeat()
        whole = self.how.kl_estimator == "full" and self.reference is not None
        if self.how.recompute:
            actor = response_scores(self.actor, rows, self.how.temperature, distributions=whole)
            rows = replace(rows, old_logprobs=actor.logprobs, entropies=actor.entropy)
        else:
            rows = replace(rows, old_logprobs=torch.where(rows.response_mask, rows.old_logprobs, 0.0))
        if self.reference is not None:
            reference = response_scores(self.reference, rows, self.how.temperature, distributions=whole)
            kl = exact_kl(rows, actor, reference) if whole else self._estimate(rows.old_logprobs, reference.logprobs)
            rows = replace(rows, ref_logprobs=reference.logprobs, kl=kl)
        if self.critic is not None:
            rows = replace(rows, values=torch.where(rows.response_mask, response_values(self.critic, rows), 0.0))
        return rows

    def _estimate(self, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return KL_ESTIMATORS[self.how.kl_estimator](old_logprobs, ref_logprobs)


def exact_kl(rows: Rollout, actor: ResponseScores, reference: ResponseScores) -> Tensor:
    """(B, R) fp32, `kl_full` at each response token and 0 elsewhere; with the actor's gradient if it has one."""
    assert actor.distributions is not None and reference.distributions is not None
    per_token = kl_full(actor.distributions, reference.distributions)
    return per_token.new_zeros(rows.response_mask.shape).masked_scatter(rows.response_mask, per_token)
