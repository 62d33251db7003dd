"""`--sleep_in_rollout`, of step 3."""

from __future__ import annotations

from dataclasses import dataclass

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
THEIR_NAMES = {
    "sleep_in_rollout": (
        "vllm_enable_sleep_mode vllm_enable_sleep deepspeed_enable_sleep ds_enable_sleep"
    ),
}
HARMLESS = ("sleep_in_rollout",)
SMALLER_ROLLOUT = {"sleep_in_rollout": True}
