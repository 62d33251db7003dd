"""Flags of learning rate schedules and of the length of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dschat_ppo.config.schema import SCHEDULERS, flag, require_not_negative


@dataclass(frozen=True)
class ScheduleFlags:
    """Schedule and length of a run."""

    _argument_group_name: ClassVar[str] = "schedule"

    warmup_ratio: float = flag("warm-up as a share of all optimizer steps, instead of --num_warmup_steps", 0.0)
    min_lr_ratio: float = flag("lowest learning rate after the warm-up, as a share of the peak", 0.0)
    max_steps: int = flag("stop after this many optimizer steps (step 3: PPO steps); 0 = by --num_train_epochs", 0)

    def __post_init__(self) -> None:
        require_not_negative(self, "max_steps")


@dataclass(frozen=True)
class PPOScheduleFlags:
    """What differs for the critic, and what the reference is."""

    _argument_group_name: ClassVar[str] = "critic's schedule and reference"

    critic_lr_scheduler_type: SCHEDULERS | None = flag("schedule of the critic; not given: --lr_scheduler_type", None)
    critic_num_warmup_steps: int | None = flag("warm-up steps of the critic; not given: --num_warmup_steps", None)
    critic_max_grad_norm: float | None = flag("gradient clipping of the critic; not given: --max_grad_norm", None)
    ref_model_name_or_path: str | None = flag(
        "model of the reference; not given: --actor_model_name_or_path, as it is before training", None
    )
    ref_sync_interval: int = flag("move the reference towards the actor every N PPO steps; 0 = never", 0)
    ref_sync_mixup: float = flag("new reference = this share of the actor and the rest of the old one", 1.0)

    def __post_init__(self) -> None:
        require_not_negative(self, "ref_sync_interval")
