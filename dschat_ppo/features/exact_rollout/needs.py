"""What a run gains by `--exact_rollout`."""

from __future__ import annotations

from dschat_ppo.config.feature_needs import Needs
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.exact_rollout.flags import ExactRolloutFlags


def needs_of(config: StepConfig) -> Needs:
    """Log-probs recorded while sampling serve as those of training."""
    if not isinstance(config, PPOConfig):
        return Needs()
    return Needs(samples_exactly=config.of(ExactRolloutFlags).exact_rollout)
