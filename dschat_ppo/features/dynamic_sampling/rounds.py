"""The rounds of dynamic sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dschat_ppo.checkpoint.manager import load_saved
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features.dynamic_sampling.flags import DynamicSamplingFlags
from dschat_ppo.features.dynamic_sampling.group_pool import GroupPool
from dschat_ppo.ppo.advantages import AdvantageComputation
from dschat_ppo.types import ScoredRollout


def rounds_of(
    config: PPOConfig, plan: PPOPlan, advantages: AdvantageComputation
) -> DynamicRounds | None:
    """The rounds of a run with `--dynamic_sampling`, which compares scores as `advantages` sees
    them."""
    flags = config.of(DynamicSamplingFlags)
    if not flags.dynamic_sampling:
        return None
    source_weights: Sequence[float] = ()
    if config.algorithm.advantage_estimator == "gdpo":
        source_weights = advantages.source_weights
    pool = GroupPool(
        plan.rollout_rows,
        advantages.scaled_and_clipped,
        flags.dynamic_sampling_range,
        source_weights,
        magnitudes_of=advantages.score_magnitudes,
    )
    return DynamicRounds(
        pool, flags.dynamic_sampling_rounds, plan.samples, most_prompts=plan.prompts_per_rank
    )


@dataclass(eq=False)
class DynamicRounds:
    """Rounds until enough groups differ in score: `ppo.rounds.Rounds`."""

    pool: GroupPool  # the rows of the rounds
    most_rounds: int  # of a PPO step
    samples: int  # responses to a prompt
    most_prompts: int  # of a round on a rank
    metrics: dict[str, float] = field(default_factory=dict)

    def prompts_per_rank(self) -> int:
        """As many as should fill the step, estimated from the share of rows kept so far."""
        prompts_needed = self.pool.missing / self.samples / max(self.pool.kept_share, 0.1)
        per_rank = -int(-prompts_needed // dist.world_size())  # rounded up
        return max(1, min(self.most_prompts, per_rank))

    def rows_of_step(self, rows: ScoredRollout, rounds_done: int) -> ScoredRollout | None:
        """The accepted rows of all rounds, once they are enough; after the last round, dropped rows
        fill the step."""
        self.pool.add(rows)
        if self.pool.missing and rounds_done < self.most_rounds:
            return None
        kept_share = self.pool.kept_share
        step_rows, filled = self.pool.take()
        self.metrics = {
            "rollout/dynamic_sampling_rounds": float(rounds_done),
            "rollout/dynamic_sampling_kept_share": kept_share,
            "rollout/dynamic_sampling_filled_rows": float(filled),
        }
        if filled:
            in_range = ""
            if self.pool.score_range:
                in_range = " and whose mean is in --dynamic_sampling_range"
            logger().warning(
                f"dynamic sampling: {rounds_done} rounds gave too few prompts whose answers differ"
                f" in score{in_range}; {filled} rows of other prompts fill the step (see"
                " --dynamic_sampling_rounds)"
            )
        return step_rows

    def state_dict(self) -> dict[str, Any]:
        """The accepted rows that stay for the next step."""
        return self.pool.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None, device: torch.device) -> None:
        """Restore `state_dict()`. A pool that the saved run did not have starts empty."""
        load_saved("--dynamic_sampling", state, partial(self.pool.load_state_dict, device=device))
