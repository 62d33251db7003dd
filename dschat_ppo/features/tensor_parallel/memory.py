"""Memory of generation with divided layers, for the planner."""

from __future__ import annotations

from transformers import PretrainedConfig

from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features.tensor_parallel.flags import TensorParallelFlags
from dschat_ppo.features.tensor_parallel.layers import reason_not_to_shard
from dschat_ppo.planner.phase_memory import GatheredLayers


def gathered_layers(config: PPOConfig, actor: PretrainedConfig) -> GatheredLayers | None:
    """Layers that are divided over the ranks of a group, or gathered one at a time where they
    cannot be."""
    size = config.of(TensorParallelFlags).inference_tp_size
    if size == 1:
        return None
    if reason_not_to_shard(actor, config.undivided) is not None:
        return GatheredLayers(by_layer=True)
    return GatheredLayers(shards=size)
