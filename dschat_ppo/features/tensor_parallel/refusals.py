"""Combinations of flags that are refused or have no effect."""

from __future__ import annotations

from dschat_ppo.config.feature_flags import observing_flags
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.tensor_parallel.flags import TensorParallelFlags


def refuse(config: StepConfig) -> None:
    """Refuse to divide layers that each rank gathers whole, and responses that programs write with
    the ranks of a group."""
    if not isinstance(config, PPOConfig):
        return
    ranks_of_group = config.of(TensorParallelFlags).inference_tp_size
    if ranks_of_group == 1:
        return
    if config.ppo.unpin_actor_parameters:
        raise UserError(
            f"--inference_tp_size {ranks_of_group} divides the layers, and"
            " --unpin_actor_parameters gathers each layer whole; use one of the two"
        )
    used = observing_flags(config)
    if used:
        raise UserError(
            f"--inference_tp_size {ranks_of_group} does not go with {' and '.join(used)}: each rank"
            " of a group would run that for the responses of all; set it to 1"
        )


def reason_not_exact(config: PPOConfig) -> str | None:
    """Why rollouts with divided layers are not exact."""
    if config.of(TensorParallelFlags).inference_tp_size > 1:
        return "divided layers add in another order; omit --inference_tp_size"
    return None


def idle(config: StepConfig) -> dict[str, str]:
    """The number of layers that are gathered at a time has no effect where none is divided."""
    if isinstance(config, PPOConfig) and config.of(TensorParallelFlags).inference_tp_size == 1:
        return {"tp_gather_partition_size": "no layers are divided: --inference_tp_size is 1"}
    return {}
