"""Combinations of flags that do not go together."""

from __future__ import annotations

import argparse
from typing import Any

from dschat_ppo.config.feature_flags import HasFeatures, features_observe
from dschat_ppo.config.schema import require_used
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.process_rewards.flags import ProcessRewardFlags, StepFlags


def refuse(config: StepConfig) -> None:
    """Refuse flags of a step beside which those of this feature have no effect."""
    if config.kind == "reward":
        _refuse_in_step_2(config)
    elif config.kind == "ppo":
        _refuse_in_step_3(config)


def _refuse_in_step_2(config: Any) -> None:
    require_used(
        config.of(StepFlags),
        "step_separator",
        when=config.reward.objective == "process",
        purpose="--objective process",
    )


def _refuse_in_step_3(config: Any) -> None:
    flags = config.of(ProcessRewardFlags)
    require_used(
        flags,
        "process_reward",
        when=config.rewards.use_reward_model,
        purpose="--use_reward_model",
    )
    if flags.process_reward is None:
        return
    if config.algorithm.normalize_rewards == "model":
        raise UserError(
            "--normalize_rewards model uses the mean of scores at last tokens, not of"
            " --process_reward scores; use --normalize_rewards running"
        )
    _refuse_episodes(config)


def refuse_evaluation(args: argparse.Namespace, flags: HasFeatures) -> None:
    """Refuse a process reward in an evaluation without a reward model, or of episodes."""
    group = flags.of(ProcessRewardFlags)
    require_used(
        group,
        "process_reward",
        when=bool(args.reward_model_name_or_path),
        purpose="--reward_model_name_or_path",
    )
    if group.process_reward is not None:
        _refuse_episodes(flags)


def _refuse_episodes(flags: HasFeatures) -> None:
    if features_observe(flags):
        raise UserError("--process_reward scores the steps of one answer, not of episodes; omit it")
