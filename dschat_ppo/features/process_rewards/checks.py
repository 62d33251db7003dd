"""Checks of reward models, before weights are loaded."""

from __future__ import annotations

from transformers import PretrainedConfig

from dschat_ppo.errors import UserError
from dschat_ppo.features.process_rewards.scoring import SEPARATOR


def check_served_model(model_config: PretrainedConfig, folder: str) -> None:
    """Refuse a process reward model for the reward server, which scores whole texts."""
    if SEPARATOR in model_config.to_dict():
        raise UserError(
            f"--model {folder}: is a process reward model (its config.json has {SEPARATOR}), but"
            " this server scores whole texts; give it to --reward_model_name_or_path of step 3,"
            " with --process_reward"
        )
