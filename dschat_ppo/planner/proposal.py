"""Flags with which a run fits: rungs of a ladder, those that cost least time first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dschat_ppo.config.steps import PPOConfig, StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.planner.plan_step import Plan

LORA_DIM = 16  # of the LoRA that is tried where nothing else fits
Change = dict[str, Any]  # flag -> value


def flags_that_fit(config: StepConfig, plan_with: Callable[[list[str]], Plan]) -> tuple[list[str], Plan] | None:
    """The flags to add so that the run fits, and its plan; None if all of the ladder is not enough. Of the rungs that
    lower what is missing, the cheapest is taken until the run fits. Then those that it fits without are left out, the
    last one first. The rows of an optimizer step stay. LoRA changes what is trained, so it is the last rung."""
    given = {name: value for group in vars(config).values() for name, value in vars(group).items()}

    def tried(rungs: Sequence[Change]) -> tuple[list[str], Plan] | None:
        wanted = {name: value for rung in rungs for name, value in rung.items() if given[name] != value}
        words = [word for name, value in wanted.items() for word in (f"--{name}", str(value))]
        try:
            return words, plan_with(words)
        except UserError:  # flags that contradict each other, such as --offload at stage 0
            return None

    taken: list[Change] = []
    best, ladder = tried([]), _ladder(config, given)
    while best is not None and not best[1].fits:
        least = best[1].missing
        for rung in ladder:
            found = tried([*taken, rung])
            if found and found[1].missing < least:
                taken, best = [*taken, rung], found
                break
        else:
            return None
    for rung in reversed(taken[:-1]):
        fewer = [each for each in taken if each is not rung]
        if (found := tried(fewer)) and found[1].fits:
            taken, best = fewer, found
    return best


def _ladder(config: StepConfig, given: Change) -> list[Change]:
    """What makes a run smaller, in the order of what it costs."""
    if isinstance(config, PPOConfig):
        critic, reward = config.algorithm.has_critic, config.rewards.use_reward_model
        zero = ["actor_zero_stage", *["critic_zero_stage"] * (critic or reward)]
        checkpointing = ["actor_gradient_checkpointing", *["critic_gradient_checkpointing"] * critic]
        lora, batch = ["actor_lora_dim", *["critic_lora_dim"] * critic], "per_device_training_batch_size"
        frozen = ["offload_reference_model"] * config.algorithm.has_reference + ["offload_reward_model"] * reward
        sleep: list[Change] = [{"sleep_in_rollout": True}]
    else:
        zero, checkpointing, lora, frozen, sleep = ["zero_stage"], ["gradient_checkpointing"], ["lora_dim"], [], []
        batch = "per_device_train_batch_size"
    size, accumulation = given[batch], given["gradient_accumulation_steps"]
    halves: list[Change] = []
    while size % 2 == 0:
        size, accumulation = size // 2, 2 * accumulation
        halves.append({batch: size, "gradient_accumulation_steps": accumulation})
    stage_2, stage_3 = ({name: max(stage, given[name]) for name in zero} for stage in (2, 3))
    return [
        stage_2,
        stage_3,
        *sleep,
        *halves,
        dict.fromkeys(checkpointing, True),
        *(stage_3 | {name: True} for name in frozen),
        stage_2 | {"offload_optimizer": True},
        stage_3 | {"offload_optimizer": True},
        stage_3 | {"offload_optimizer": False, "offload": True},
        {"only_optimize_lora": True} | {name: given[name] or LORA_DIM for name in lora},
    ]
