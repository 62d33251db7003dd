"""What a run with dynamic sampling depends on."""

from __future__ import annotations

from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features.dynamic_sampling.flags import DynamicSamplingFlags


def derived_sizes(config: PPOConfig, plan: PPOPlan) -> dict[str, int]:
    """The number of ranks: each round takes the same number of prompts on every rank, so it decides
    how many prompts a round takes in all, and which prompts later steps see."""
    if config.of(DynamicSamplingFlags).dynamic_sampling:
        return {"ranks": plan.world_size}
    return {}
