"""`--router_loss_coef`, of all steps."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.feature_flags import FlagNotes
from dschat_ppo.config.schema import not_negative


@dataclass(frozen=True)
class RouterFlags:
    """Mixtures of experts."""

    router_loss_coef: float = not_negative(
        0.0,
        "weight of the load-balancing loss of a mixture of experts (step 3: of the actor), over the"
        " tokens of an optimizer step (0.001 to 0.01 is usual). Each step then needs a second"
        " forward pass without gradients; 0 = off",
    )


FLAGS = {"sft": RouterFlags, "reward": RouterFlags, "ppo": RouterFlags}
NOTES = FlagNotes(their_names={"router_loss_coef": "router_aux_loss_coef aux_loss_coef"})
