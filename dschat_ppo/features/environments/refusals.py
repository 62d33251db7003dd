"""Flags that do not fit episodes of several turns."""

from __future__ import annotations

import argparse

from dschat_ppo.config.feature_flags import HasFeatures, features_observe
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.environments.flags import EnvironmentFlags, refuse_unused


def refuse(config: StepConfig) -> None:
    """Refuse flags of single responses beside those of episodes, whoever plays them."""
    if not isinstance(config, PPOConfig):
        return
    refuse_unused(config)
    if not features_observe(config):
        return
    if config.ppo.min_answer_seq_len > 0:
        raise UserError("--min_answer_seq_len is not for episodes: an action may be short; omit it")
    estimator = config.algorithm.advantage_estimator
    if config.of(EnvironmentFlags).turn_reward == "to_go" and estimator in ("remax", "gdpo"):
        raise UserError(
            f"--advantage_estimator {estimator} compares scores of whole episodes; use"
            " --turn_reward sum"
        )


def refuse_evaluation(args: argparse.Namespace, flags: HasFeatures) -> None:
    """Refuse flags of `tools.evaluate` for single responses beside those of episodes."""
    refuse_unused(flags)
    if not features_observe(flags):
        return
    if args.write_best or args.write_pairs:
        raise UserError(
            "--write_best and --write_pairs are for single answers, not for episodes; omit them"
        )
