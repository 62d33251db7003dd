"""Flags of learning rate schedules, of the length of a run, and of the reference."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.batch_plan import times
from dschat_ppo.config.ppo_flags import PPOFlags
from dschat_ppo.config.schema import SCHEDULERS, flag, fraction, not_negative, refuse, require, share
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

    def warmup_steps(self, number: int, total: int) -> int:
        """Warm-up steps of a schedule of `total` optimizer steps; `number` is --num_warmup_steps."""
        return times(total, self.warmup_ratio) if self.warmup_ratio > 0 else number

    def warmup_of(self, model: ModelSchedule, number: int, total: int) -> int:
        """Warm-up steps of the schedule of one model; `number` and `total` as for `warmup_steps`."""
        if model.kind == WITHOUT_WARMUP:
            return 0
        return self.warmup_steps(number, total) if model.warmup is None else model.warmup


@dataclass(frozen=True)
class PPOScheduleFlags:
    """Schedule of the critic, and the reference."""

    # fmt: off
    critic_lr_scheduler_type: SCHEDULERS | None = flag(None,
        "learning rate schedule of the critic; not given: that of --lr_scheduler_type")
    critic_num_warmup_steps: int | None = not_negative(None,
        "warm-up steps of the critic; not given: --warmup_ratio or --num_warmup_steps")
    critic_max_grad_norm: float | None = not_negative(None,
        "clip gradients of the critic to this global norm; 0 = off; not given: --max_grad_norm")
    ref_model_name_or_path: str | None = flag(None,
        "model of the reference, with the actor's tokenizer; not given: the model of --actor_model_name_or_path")
    ref_sync_interval: int = not_negative(0, "move the reference towards the actor after every N PPO steps; 0 = never")
    ref_sync_mixup: float = share(1.0,
        "share of the actor in the new reference; the rest is the old reference (TRL: 0.6); 1 = the actor")
    # fmt: on

    def __post_init__(self) -> None:
        require(
            self.ref_sync_interval > 0 or self.ref_sync_mixup == 1,
            "--ref_sync_mixup has no effect without --ref_sync_interval",
        )


@dataclass(frozen=True)
class ModelSchedule:
    """The learning rate schedule of one model, and the flags that set it."""

    kind: str
    kind_flag: str
    peak: float  # highest learning rate
    peak_flag: str
    warmup: int | None = None  # the critic's own warm-up steps


def fit_schedules(fit: SupervisedFlags) -> list[ModelSchedule]:
    """The schedule of the one model of steps 1 and 2."""
    return [ModelSchedule(fit.lr_scheduler_type, "--lr_scheduler_type", fit.learning_rate, "learning_rate")]


def ppo_schedules(ppo: PPOFlags, critic: PPOScheduleFlags, has_critic: bool) -> list[ModelSchedule]:
    """The schedules of the actor and, if there is one, of the critic."""
    flag, kind = "--lr_scheduler_type", ppo.lr_scheduler_type
    actor = ModelSchedule(kind, flag, ppo.actor_learning_rate, "actor_learning_rate")
    if not has_critic:
        return [actor]
    if critic.critic_lr_scheduler_type is not None:
        flag, kind = "--critic_lr_scheduler_type", critic.critic_lr_scheduler_type
    peak, warmup = ppo.critic_learning_rate, critic.critic_num_warmup_steps
    return [actor, ModelSchedule(kind, flag, peak, "critic_learning_rate", warmup)]


def require_schedule(flags: ScheduleFlags, models: list[ModelSchedule], group: SupervisedFlags | PPOFlags) -> None:
    """Check the schedules of all models that a run trains; `group` holds --num_warmup_steps."""
    warmup = group.num_warmup_steps
    ratio, kinds = flags.warmup_ratio, " and ".join(dict.fromkeys(f"{m.kind_flag} {m.kind}" for m in models))
    refuse({
        f"--warmup_ratio {ratio} and --num_warmup_steps {warmup} both set the warm-up; use one of the two":
            ratio > 0 and warmup != type(group).num_warmup_steps,
        f"--warmup_ratio {ratio}: no model has a warm-up to set ({kinds}); use constant_with_warmup, or omit it":
            ratio > 0 and not any(model.kind != WITHOUT_WARMUP and model.warmup is None for model in models),
        f"--min_lr_ratio {flags.min_lr_ratio}: {kinds} does not decay; use one of {', '.join(DECAYING)}, or omit it":
            flags.min_lr_ratio > 0 and not any(model.kind in DECAYING for model in models),
    } | {
        f"--critic_num_warmup_steps {model.warmup}: {model.kind_flag} {model.kind} has no warm-up; use "
        "constant_with_warmup": bool(model.warmup) and model.kind == WITHOUT_WARMUP for model in models
    })  # fmt: skip


def idle_flags(flags: ScheduleFlags, models: list[ModelSchedule], group: SupervisedFlags | PPOFlags) -> dict[str, str]:
    """Given flags that have no effect with the others -> the reason. The arguments are those of `require_schedule`."""
    found = {}
    if flags.max_steps > 0 and group.num_train_epochs != 1:
        found["num_train_epochs"] = "--max_steps sets the length of the run"
    given = group.num_warmup_steps not in (0, type(group).num_warmup_steps)
    if given and all(model.kind == WITHOUT_WARMUP for model in models):
        found["num_warmup_steps"] = "--lr_scheduler_type constant has no warm-up (constant_with_warmup has one)"
    return found
