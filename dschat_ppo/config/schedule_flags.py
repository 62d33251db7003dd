"""Flags of the learning rate schedule, of the length of a run, and of the reference."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.batch_plan import times
from dschat_ppo.config.ppo_flags import PPOFlags
from dschat_ppo.config.schema import flag, fraction, not_negative, refuse, require_used, share
from dschat_ppo.config.supervised_flags import SupervisedFlags

DECAYING = ("linear", "cosine", "cosine_with_restarts", "polynomial")  # the others are constant after the warm-up
WITHOUT_WARMUP = "constant"
POLYNOMIAL_END = 1e-7  # where transformers' polynomial schedule ends


@dataclass(frozen=True)
class ScheduleFlags:
    """Schedule and length of a run."""

    # fmt: off
    warmup_ratio: float = fraction(0.0,
        "warm-up steps as a share of all optimizer steps, rounded up; replaces the default of --num_warmup_steps")
    min_lr_ratio: float = fraction(0.0,
        "lowest learning rate after the warm-up, as a share of the peak; for the schedules linear, cosine, "
        "cosine_with_restarts and polynomial")
    max_steps: int = not_negative(0,
        "length of the run in optimizer steps (step 3: PPO steps); replaces --num_train_epochs. The learning rate "
        "schedule covers it, and the data repeat if needed; 0 = --num_train_epochs sets the length")
    # fmt: on

    def warmup_steps(self, kind: str, number: int, total: int) -> int:
        """Warm-up steps of a schedule of `total` optimizer steps; `number` is --num_warmup_steps."""
        if kind == WITHOUT_WARMUP:
            return 0
        return times(total, self.warmup_ratio) if self.warmup_ratio > 0 else number


@dataclass(frozen=True)
class ReferenceFlags:
    """Reference."""

    # fmt: off
    ref_model_name_or_path: str | None = flag(None,
        "model of the reference, with the actor's tokenizer; not given: the model of --actor_model_name_or_path")
    ref_sync_interval: int = not_negative(0, "move the reference towards the actor after every N PPO steps; 0 = never")
    ref_sync_mixup: float = share(1.0,
        "share of the actor in the new reference; the rest is the old reference (TRL: 0.6); 1 = the actor")
    # fmt: on

    def __post_init__(self) -> None:
        require_used(self, [(self.ref_sync_interval > 0, "--ref_sync_interval", "ref_sync_mixup")])


def require_schedule(flags: ScheduleFlags, group: SupervisedFlags | PPOFlags) -> None:
    """Check the schedule of a run; `group` holds --lr_scheduler_type and --num_warmup_steps."""
    ratio, kind, warmup = flags.warmup_ratio, f"--lr_scheduler_type {group.lr_scheduler_type}", group.num_warmup_steps
    refuse({
        f"--warmup_ratio {ratio} and --num_warmup_steps {warmup} both set the warm-up; use one of the two":
            ratio > 0 and warmup != type(group).num_warmup_steps,
        f"--warmup_ratio {ratio}: {kind} has no warm-up; use constant_with_warmup, or omit it":
            ratio > 0 and group.lr_scheduler_type == WITHOUT_WARMUP,
        f"--min_lr_ratio {flags.min_lr_ratio}: {kind} does not decay; use one of {', '.join(DECAYING)}, or omit it":
            flags.min_lr_ratio > 0 and group.lr_scheduler_type not in DECAYING,
    })  # fmt: skip


def idle_flags(flags: ScheduleFlags, group: SupervisedFlags | PPOFlags) -> dict[str, str]:
    """Given flags that have no effect with the others -> the reason. The arguments are those of `require_schedule`."""
    found = {}
    if flags.max_steps > 0 and group.num_train_epochs != 1:
        found["num_train_epochs"] = "--max_steps sets the length of the run"
    if group.num_warmup_steps not in (0, type(group).num_warmup_steps) and group.lr_scheduler_type == WITHOUT_WARMUP:
        found["num_warmup_steps"] = "--lr_scheduler_type constant has no warm-up (constant_with_warmup has one)"
    return found
