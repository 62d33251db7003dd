"""Combinations of flags that Muon rules out."""

from __future__ import annotations

from dschat_ppo.config.run_flags import AUTO
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.muon.flags import MuonFlags


def refuse(config: StepConfig) -> None:
    """Refuse Muon where a skipped update would change its momentum too, or a checkpoint could not
    divide it; and LoRA, whose factors it would train."""
    uses_muon = config.run.optimizer == "muon"
    if uses_muon != (config.of(MuonFlags).muon_learning_rate is not None):
        raise UserError(
            "--optimizer muon and --muon_learning_rate need each other (--help muon says which rate"
            " is usual)"
        )
    if not uses_muon:
        return
    stages = [f"--{prefix}zero_stage" for prefix in config.stages]
    highest_stage = 1 if config.run.dtype in (AUTO, "bf16") else 0
    offloads = config.training.offload or config.memory.offload_optimizer
    is_too_high = max(config.stages.values()) > highest_stage
    if config.run.dtype == "fp16" or offloads or is_too_high:
        raise UserError(
            f"--optimizer muon needs {' and '.join(stages)} 0, with --dtype bf16 at most 1, and"
            " neither fp16 nor offload: elsewhere DeepSpeed clips Muon's update in place of the"
            " gradient, which makes it many times smaller"
        )
    lora_dims = [f"{prefix}lora_dim" for prefix in config.stages]
    if any(config.value(name) for name in lora_dims):
        dim_flags = " or ".join(f"--{name}" for name in lora_dims)
        raise UserError(
            "--optimizer muon is for whole matrices, not for the two factors of LoRA: omit"
            f" {dim_flags}, or use adamw"
        )
