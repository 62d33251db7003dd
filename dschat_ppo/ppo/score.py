"""Model scores of a rollout: old and reference log-probs, KL and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.kl import KL_ESTIMATORS, kl_full
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.models.forward import ResponseScores, response_scores, response_values
from dschat_ppo.models.micro_batches import even_passes
from dschat_ppo.ppo.reward_scorer import Scores
from dschat_ppo.types import Rollout, ScoredRollout, concat_rows, row_lengths, select_rows, tensors_of


@dataclass(frozen=True)
class Scoring:
    """Constants of `ModelScorer`."""

    temperature: float  # of sampling; log-probs are taken under it
    micro_batch_tokens: int  # budget of one forward pass
    recompute: bool  # take old log-probs and entropies from a forward pass, not as recorded while sampling
    kl_estimator: str  # form of the KL in the reward; "full" needs `recompute`


class ModelScorer:
    """Scores rollouts in micro-batches. The caller puts all models into eval mode.

    Args:
        actor: engine or `PolicyModel`.
        reference: the same, or None where no KL is asked for.
        critic: engine or `ScalarModel`, or None where the estimator needs no values.
        scoring: constants.
    """

    def __init__(self, actor: Any, reference: Any | None, critic: Any | None, scoring: Scoring):
        self.actor = actor
        self.reference = reference
        self.critic = critic
        self.scoring = scoring

    @torch.no_grad()
    def __call__(self, rollout: Rollout, scores: Scores, groups: Tensor) -> ScoredRollout:
        """Score every row. Collective; ranks with fewer passes score their last micro-batch again.

        Args:
            rollout: B rows.
            scores: of the reward sources.
            groups: (B,) int64, number of each row's prompt.
        """
        unscored = ScoredRollout(
            **tensors_of(rollout), old_logprobs=rollout.rollout_logprobs, entropies=None, ref_logprobs=None, kl=None,
            values=None, source_scores=scores.by_source, scores=scores.total, baselines=scores.baselines, groups=groups,
        )  # fmt: skip
        parts, own = even_passes(row_lengths(rollout), self.scoring.micro_batch_tokens)
        scored = [self._score_micro_batch(select_rows(unscored, part)) for part in parts][:own]
        return select_rows(concat_rows(scored), torch.argsort(torch.cat(parts[:own])))  # in the order of the rollout

    def _score_micro_batch(self, rows: ScoredRollout) -> ScoredRollout:
        """One forward pass of each model; every tensor is (b, R)."""
        heartbeat()
        mask, temperature, estimator = rows.response_mask, self.scoring.temperature, self.scoring.kl_estimator
        full = estimator == "full" and self.reference is not None
        if self.scoring.recompute:
            actor = response_scores(self.actor, rows, temperature, distributions=full)
            rows = replace(rows, old_logprobs=actor.logprobs, entropies=actor.entropy)
        else:
            rows = replace(rows, old_logprobs=torch.where(mask, rows.old_logprobs, 0.0))
        if self.reference is not None:
            reference = response_scores(self.reference, rows, temperature, distributions=full)
            if full:
                kl = exact_kl(rows, actor, reference)
            else:
                kl = KL_ESTIMATORS[estimator](rows.old_logprobs, reference.logprobs)
            rows = replace(rows, ref_logprobs=reference.logprobs, kl=kl)
        if self.critic is not None:
            rows = replace(rows, values=torch.where(mask, response_values(self.critic, rows), 0.0))
        return rows


def exact_kl(rows: Rollout, actor: ResponseScores, reference: ResponseScores) -> Tensor:
    """(B, R) fp32, `kl_full` at each response token and 0 elsewhere; carries the actor's gradient if it has one."""
    assert actor.distributions is not None and reference.distributions is not None
    per_token = kl_full(actor.distributions, reference.distributions)  # (response tokens,)
    return per_token.new_zeros(rows.response_mask.shape).masked_scatter(rows.response_mask, per_token)
