"""Flags that need all training rows before the run trains."""

from __future__ import annotations

from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.config.supervised_config import FitConfig, PreferenceConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.streaming.flags import StreamingFlags


def refuse(config: StepConfig) -> None:
    """Refuse what knows all training rows beside a stream of them."""
    if not config.of(StreamingFlags).streaming:
        return
    if isinstance(config, PPOConfig) and config.ppo.sampler is not None:
        raise UserError(
            "--sampler chooses among all prompts, which --streaming does not know; use one of the"
            " two"
        )
    if isinstance(config, FitConfig) and config.fit.packing:
        raise UserError(
            "--packing needs the length of every training row before the first step, which"
            " --streaming does not know; use one of the two"
        )
    if isinstance(config, PreferenceConfig) and config.reward.has_reference:
        raise UserError(
            f"--objective {config.reward.objective} computes log-probs of the reference for all"
            " rows before training, so it does not go with --streaming"
        )
