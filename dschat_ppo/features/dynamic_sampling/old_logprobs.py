"""Whether old log-probs can be those of the update."""

from __future__ import annotations

from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features.dynamic_sampling.flags import DynamicSamplingFlags


def reason_to_score(config: PPOConfig) -> str | None:
    """Rows that stay for the next PPO step are not those of the policy that it updates."""
    if config.of(DynamicSamplingFlags).dynamic_sampling:
        return "--dynamic_sampling keeps answers for the next PPO step"
    return None
