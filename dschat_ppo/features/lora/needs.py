"""What models with LoRA need of a run, and what of them stays frozen."""

from __future__ import annotations

from dschat_ppo.config.feature_needs import Needs
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.lora.flags import AdapterFlags, PPOLoraFlags


def needs_of(config: StepConfig) -> Needs:
    """The frozen weights, and what is done with those of the actor."""
    flags = config.of(AdapterFlags)
    frozen = [prefix for prefix in config.stages if flags.freezes(prefix)]
    changed_in_training = None
    if flags.lora_dropout > 0:
        changed_in_training = "--lora_dropout changes them in training"
    if not isinstance(flags, PPOLoraFlags):
        return Needs(frozen=frozen, frozen_bits=flags.frozen_bits)
    undivided = None
    if flags.actor_lora_dim > 0:
        undivided = "layers with LoRA are not divided"
    return Needs(
        frozen=frozen,
        frozen_bits=flags.frozen_bits,
        undivided=undivided,
        shares_base=flags.share_base,
        quantises_frozen=flags.enable_mixed_precision_lora,
        changed_in_training=changed_in_training,
    )
