"""Combinations of flags that are refused."""

from __future__ import annotations

from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.schema import require_used
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.averages.flags import AveragesFlags


def refuse(config: StepConfig) -> None:
    """Refuse to move a reference that does not exist, or whose changes would be in an adapter."""
    if not isinstance(config, PPOConfig):
        return
    flags = config.of(AveragesFlags)
    if flags.ref_sync_interval > 0 and config.value("actor_lora_dim"):
        raise UserError(
            "--ref_sync_interval mixes whole weights, but with --actor_lora_dim the changes of"
            " the actor are in its adapter; omit one of the two"
        )
    require_used(
        flags,
        "ref_sync_interval",
        when=config.has_reference,
        purpose="the reference, which --kl_coef or --kl_loss_coef above 0 compares with",
    )
