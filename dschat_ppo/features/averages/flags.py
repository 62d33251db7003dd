"""`--enable_ema` and `--ref_sync_interval`, of step 3."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.feature_flags import FlagNotes
from dschat_ppo.config.schema import flag, fraction, not_negative, require_used, share


@dataclass(frozen=True)
class AveragesFlags:
    """Moving averages."""

    enable_ema: bool = flag(
        False, "keep an exponential moving average of the actor's weights, saved in `actor_ema/`"
    )
    ema_decay: float = fraction(
        0.992,  # as in DeepSpeed-Chat
        "decay of the moving average, applied at each update of the actor",
    )
    ref_sync_interval: int = not_negative(
        0, "move the reference towards the actor after every N PPO steps; 0 = never"
    )
    ref_sync_mixup: float = share(
        1.0,
        "share of the actor in the new reference; the rest is the old reference (TRL: 0.6); 1 = the"
        " actor",
    )

    def __post_init__(self) -> None:
        require_used(self, "ema_decay", when=self.enable_ema, purpose="--enable_ema")
        require_used(
            self, "ref_sync_mixup", when=self.ref_sync_interval > 0, purpose="--ref_sync_interval"
        )


FLAGS = {"ppo": AveragesFlags}
NOTES = FlagNotes(
    their_names={
        "ref_sync_interval": "sync_ref_model ref_model_sync_steps",
        "ref_sync_mixup": "ref_model_mixup_alpha",
        "ema_decay": "ema_beta",
    },
    saved_roles=("actor_ema",),
)
