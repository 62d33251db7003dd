"""Search for the fastest setting that fits: ZeRO stages, offload, sleep, gradient checkpointing, batches, LoRA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.errors import UserError
from dschat_ppo.planner.plan_step import Plan

LORA_DIM = 16  # of the LoRA that is tried where nothing else fits
Change = dict[str, Any]  # flag -> value


@dataclass(frozen=True)
class Setting:
    """A setting that fits: the flags that differ from the given ones, and its plan."""

    changes: Change
    plan: Plan

    @property
    def words(self) -> list[str]:
        """The flags to copy."""
        words: list[str] = []
        for name, value in self.changes.items():
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return words


def fastest_setting(config: Any, plan_of: Callable[[Any], Plan]) -> Setting | None:
    """The fastest setting that fits; of two that are equally fast, to 1 %, the one with fewer changes. None: none fits.

    The rows of an optimizer step stay as the flags ask: a smaller micro-batch is repeated more often. LoRA changes what
    is trained, so it is tried only where nothing else fits.

    Args:
        config: of the step.
        plan_of: the plan of a configuration.
    """
    for candidates in (_settings(config), _settings(config, lora=True)):
        fitting = [
            Setting(changes, plan) for changes, changed in candidates if (plan := plan_of(changed)) and plan.fits
        ]
        if fitting:
            least = min(setting.plan.time.total for setting in fitting)
            close = [setting for setting in fitting if setting.plan.time.total <= 1.01 * least]
            return min(close, key=lambda setting: (len(setting.changes), setting.plan.time.total))
    return None


def _settings(config: Any, lora: bool = False) -> Iterator[tuple[Change, Any]]:
    """(flags that differ from the given ones, configuration) of all settings that are valid."""
    options = _ppo_options(config) if isinstance(config, PPOConfig) else _supervised_options(config)
    added = (_ppo_lora(config) if isinstance(config, PPOConfig) else _supervised_lora(config)) if lora else {}
    given = flag_values(config)
    for choice in product(*options):
        wanted: Change = dict(added)
        for part in choice:
            wanted |= part
        changes = {name: value for name, value in wanted.items() if given[name] != value}
        try:
            yield changes, with_flags(config, changes)
        except UserError:  # flags that contradict each other, such as --offload at stage 0
            continue


def _ppo_options(config: PPOConfig) -> list[list[Change]]:
    stages = [{"actor_zero_stage": stage, "critic_zero_stage": stage} for stage in (0, 2, 3)]
    if not config.algorithm.has_critic and not config.rewards.use_reward_model:
        stages = [{"actor_zero_stage": stage} for stage in (0, 2, 3)]
    frozen = {"offload_reference_model": True} if config.algorithm.has_reference else {}
    frozen |= {"offload_reward_model": True} if config.rewards.use_reward_model else {}
    kept = dict.fromkeys(frozen, False)
    checkpointing = ["actor_gradient_checkpointing", *(["critic_gradient_checkpointing"] * config.algorithm.has_critic)]
    return [
        stages,
        [{"offload_optimizer": False, "offload": False}, {"offload_optimizer": True, "offload": False},
         {"offload_optimizer": False, "offload": True}],
        [kept, frozen] if frozen else [{}],
        [{"sleep_in_rollout": False}, {"sleep_in_rollout": True}],
        [{"unpin_actor_parameters": False}, {"unpin_actor_parameters": True}],
        [dict.fromkeys(checkpointing, False), dict.fromkeys(checkpointing, True)],
        _batches("per_device_training_batch_size", config.ppo.per_device_training_batch_size,
                 config.ppo.gradient_accumulation_steps),
    ]  # fmt: skip


def _supervised_options(config: Any) -> list[list[Change]]:
    return [
        [{"zero_stage": stage} for stage in (0, 2, 3)],
        [{"offload_optimizer": False, "offload": False}, {"offload_optimizer": True, "offload": False},
         {"offload_optimizer": False, "offload": True}],
        [{"gradient_checkpointing": False}, {"gradient_checkpointing": True}],
        _batches("per_device_train_batch_size", config.fit.per_device_train_batch_size,
                 config.fit.gradient_accumulation_steps),
    ]  # fmt: skip


def _batches(name: str, size: int, accumulation: int) -> list[Change]:
    """Micro-batches of the same rows in all: the given one, and powers of two below it."""
    rows, found, count = size * accumulation, [{name: size, "gradient_accumulation_steps": accumulation}], accumulation
    while rows % (2 * count) == 0 and rows // (2 * count) >= 1:
        count *= 2
        found.append({name: rows // count, "gradient_accumulation_steps": count})
    return found


def _ppo_lora(config: PPOConfig) -> Change:
    found: Change = {"actor_lora_dim": config.lora.actor_lora_dim or LORA_DIM, "only_optimize_lora": True}
    if config.algorithm.has_critic:
        found["critic_lora_dim"] = config.lora.critic_lora_dim or LORA_DIM
    return found


def _supervised_lora(config: Any) -> Change:
    return {"lora_dim": config.lora.lora_dim or LORA_DIM, "only_optimize_lora": True}


def flag_values(config: Any) -> dict[str, Any]:
    """The values of all flags of a step by name."""
    return {name: value for group in vars(config).values() for name, value in vars(group).items()}


def with_flags(config: Any, values: Change) -> Any:
    """The configuration with other values of some flags.

    Raises:
        UserError: the flags contradict each other.
    """
    changed: dict[str, Any] = {}
    for name, group in vars(config).items():
        own = {flag: value for flag, value in values.items() if flag in vars(group)}
        if own:
            changed[name] = replace(group, **own)
    return replace(config, **changed)
