"""Checks of the actor's architecture, before weights are loaded."""

from __future__ import annotations

from transformers import PretrainedConfig

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.tensor_parallel.flags import TensorParallelFlags
from dschat_ppo.features.tensor_parallel.layers import check_tensor_parallel, reason_not_to_shard


def check_trained_model(config: StepConfig, model_config: PretrainedConfig, model: str) -> None:
    """Check `--inference_tp_size`, and say so if the actor's layers will not be divided."""
    if not isinstance(config, PPOConfig):
        return
    size = config.of(TensorParallelFlags).inference_tp_size
    check_tensor_parallel(model_config, size, dist.world_size(), config.undivided)
    reason = reason_not_to_shard(model_config, config.undivided)
    if size > 1 and reason is not None:
        at_zero_3 = "one layer at a time, as with --unpin_actor_parameters"
        if config.ppo.actor_zero_stage == 3:
            instead = at_zero_3
        else:
            instead = "the whole model (at ZeRO-3 one layer at a time)"
        logger().info(
            f"note: --inference_tp_size {size}: {reason}; each rank generates with {instead}"
        )
