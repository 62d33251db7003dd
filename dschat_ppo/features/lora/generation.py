"""Generation with adapters merged into the weights under them."""

from __future__ import annotations

from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.engine.hybrid_engine import GenerationChange
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.features.lora.flags import PPOLoraFlags
from dschat_ppo.models.adapters.merging import adapters_merged


def generation_change(config: PPOConfig, engines: RLHFEngine) -> GenerationChange | None:
    """An actor with LoRA generates with merged weights."""
    if config.of(PPOLoraFlags).actor_lora_dim == 0:
        return None
    return GenerationChange(merge=adapters_merged)
