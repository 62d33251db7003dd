"""Flags with which rollouts cannot be exact."""

from __future__ import annotations

import os
from argparse import Namespace

from dschat_ppo.config.feature_flags import FeatureFlags
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features import hooks
from dschat_ppo.features.exact_rollout.flags import ExactRolloutFlags

MKL_MODE = "MKL_CBWR"  # the variable by which MKL adds in one order
STRICT = ",STRICT"  # the end of its values with which the order does not depend on the rows


def refuse(config: StepConfig) -> None:
    """Refuse what makes rollouts and training passes round differently."""
    if not isinstance(config, PPOConfig) or not config.of(ExactRolloutFlags).exact_rollout:
        return
    reason = _reason_not_exact(config)
    if reason is not None:
        raise UserError(f"--exact_rollout: {reason}")
    _refuse_mode_of_mkl()


def refuse_evaluation(args: Namespace, features: FeatureFlags) -> None:
    """As `refuse`, for `dschat-evaluate`."""
    if features.of(ExactRolloutFlags).exact_rollout:
        _refuse_mode_of_mkl()


def _refuse_mode_of_mkl() -> None:
    """Refuse an environment in which the order of additions depends on the rows."""
    mode = os.environ.get(MKL_MODE)
    if mode is not None and not mode.endswith(STRICT):
        raise UserError(
            f"--exact_rollout: {MKL_MODE} is {mode} in the environment; unset it or use"
            f" AVX2{STRICT}"
        )


def _reason_not_exact(config: PPOConfig) -> str | None:
    """Why rollouts cannot be exact with these flags, and the way out; None if they can be. Another
    feature offers the same of its flags as `refusals.reason_not_exact`."""
    ppo = config.ppo
    if ppo.rollout_engine == "padded":
        return "it is for continuous batching; omit --rollout_engine padded"
    if ppo.unpin_actor_parameters:
        return "--unpin_actor_parameters gathers each layer by itself; omit one of the two"
    if ppo.actor_dropout:
        return "--actor_dropout changes the log-probs of training; omit one of the two"
    if config.memory.attn_implementation != "auto":
        choice = config.memory.attn_implementation
        return f"--attn_implementation {choice} adds in another order; omit it"
    reasons: list[str | None] = [reason(config) for reason in hooks("refusals.reason_not_exact")]
    return next((reason for reason in reasons if reason is not None), None)
