"""Rewards of turns that the tokens receive at the ends of their turns (`--turn_reward to_go`)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dschat_ppo.algorithms.advantage_estimators import (
    AdvantageInputs,
    Estimator,
    returns_to_go,
    scores_before_penalty,
)
from dschat_ppo.algorithms.aggregation import zero_outside
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features.environments.flags import EnvironmentFlags
from dschat_ppo.ppo.advantages import EarlyRewards
from dschat_ppo.types import ScoredRollout


def early_rewards(config: PPOConfig) -> EarlyRewards | None:
    """The rewards of turns; None if an episode has one score."""
    flags = config.of(EnvironmentFlags)
    if flags.turn_reward != "to_go":
        return None
    return turn_rewards(flags.environment_reward_weight)


def turn_rewards(weight: float) -> EarlyRewards:
    """The rewards of environments, which have this weight in the scores."""

    def of_rows(rows: ScoredRollout) -> Tensor:
        return weight * rows.extra["turn_rewards"]

    return EarlyRewards(of_rows, by_turn)


def by_turn(
    estimate: Estimator, inputs: AdvantageInputs, turn_rewards: Tensor
) -> tuple[Tensor, Tensor]:
    """Advantages of the turns of episodes: of each turn, those that `estimate` gives if the episode
    begins with it.

    So the tokens of a turn are credited with the rewards from that turn on, and are compared with
    the same turn of the other episodes of their group that have one. A turn is a run of True tokens
    of the mask. `turn_rewards` (B, R) fp32 is the part of the scores that is in the rewards before
    the last token.

    What remains of a score after a turn has the rounding of the whole score: of equal episodes it
    may be 0 and 1e-5. So whether such scores are equal is decided by the size of the whole ones.
    """
    mask = inputs.response_mask
    whole_scores = scores_before_penalty(inputs)  # (B,)
    magnitudes = whole_scores.abs() + zero_outside(turn_rewards, mask).double().abs().sum(dim=1)
    if inputs.magnitudes is not None:
        magnitudes = torch.maximum(magnitudes, inputs.magnitudes)
    starts = mask & ~pad(mask, (1, 0))[:, :-1]  # (B, R)
    turns = torch.where(mask, starts.cumsum(dim=1), 0)  # (B, R), from 1 on
    advantages = torch.zeros_like(inputs.rewards)
    for turn in range(1, int(turns.max()) + 1):
        remaining = turns >= turn  # (B, R)
        scores = None
        if inputs.scores is not None:
            earlier = zero_outside(turn_rewards, mask & ~remaining).double().sum(dim=1)  # (B,)
            scores = inputs.scores.double() - earlier
        from_turn = replace(
            inputs,
            rewards=zero_outside(inputs.rewards, remaining),
            response_mask=remaining,
            scores=scores,
            magnitudes=magnitudes,
        )
        advantages_from_turn, _ = estimate(from_turn)
        advantages = torch.where(turns == turn, advantages_from_turn, advantages)
    return advantages, returns_to_go(inputs.rewards, mask, inputs.gamma)
