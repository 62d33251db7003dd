"""The learning rate of adapters."""

from __future__ import annotations

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.engine.optimizers import SecondRate
from dschat_ppo.features.lora.flags import AdapterFlags
from dschat_ppo.models.adapters.layers import is_adapter_parameter


def rate_of_adapter(config: StepConfig, prefix: str) -> float:
    """`--lora_learning_rate` of a model."""
    return float(vars(config.of(AdapterFlags))[f"{prefix}lora_learning_rate"])


SECOND_RATE = SecondRate(
    takes=is_adapter_parameter,
    learning_rate=rate_of_adapter,
    rate_name="lora_lr",
    rate_label="LoRA lr",
)
