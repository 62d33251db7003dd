"""The moving average of the actor, and the reference that follows it, as followers of the actor."""

from __future__ import annotations

from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.features.averages.averages import MovingAverage, ReferenceSync, whole_averages
from dschat_ppo.features.averages.flags import AveragesFlags
from dschat_ppo.ppo.followers import Follower, FollowingModel

ACTOR_EMA = FollowingModel("actor_ema", "actor_average", whole_averages)
FOLLOWING_MODELS = (ACTOR_EMA,)


def followers_of(config: PPOConfig, engines: RLHFEngine, clock: PhaseClock) -> list[Follower]:
    """What `--enable_ema` and `--ref_sync_interval` ask for."""
    flags = config.of(AveragesFlags)
    followers = []
    if flags.enable_ema:
        average = MovingAverage(engines.actor.module.lm, flags.ema_decay)
        followers.append(
            Follower(
                "--enable_ema",
                ACTOR_EMA.state_name,
                average,
                after_update=average.update,
                saved=(ACTOR_EMA, average.gathered),
            )
        )
    if flags.ref_sync_interval > 0:
        assert engines.reference is not None  # else the flag is refused
        sync = ReferenceSync(engines.actor, engines.reference, flags.ref_sync_mixup)

        def move_reference(step: int) -> dict[str, float]:
            if step % flags.ref_sync_interval != 0:
                return {}
            with clock.phase("sync"):
                return {"kl/reference_moved": sync.update()}

        followers.append(
            Follower("--ref_sync_interval", "reference", sync, after_step=move_reference)
        )
    return followers
