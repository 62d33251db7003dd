"""`--sleep_in_rollout`, of step 3."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.feature_flags import FlagNotes, SmallerRollout
from dschat_ppo.config.schema import flag


@dataclass(frozen=True)
class SleepFlags:
    """Sleep in rollouts."""

    sleep_in_rollout: bool = flag(
        False,
        "while generating, move to host memory what generation does not need: optimizer states,"
        " fp32 weights and gradient buffers of actor and critic, and the weights of critic,"
        " reference and reward model",
    )


FLAGS = {"ppo": SleepFlags}
NOTES = FlagNotes(
    their_names={
        "sleep_in_rollout": (
            "vllm_enable_sleep_mode vllm_enable_sleep deepspeed_enable_sleep ds_enable_sleep"
        ),
    },
    harmless=("sleep_in_rollout",),
    smaller_rollout=SmallerRollout("--sleep_in_rollout", {"sleep_in_rollout": True}),
)
