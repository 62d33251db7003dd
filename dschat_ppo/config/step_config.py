"""What the configurations of all steps share: their groups of flags, the checks of these, and flags
without effect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from dschat_ppo.config.batch_plan import times
from dschat_ppo.config.data_flags import DataFlags, StepData
from dschat_ppo.config.feature_flags import FeatureFlags, Flags, feature_groups
from dschat_ppo.config.feature_needs import FurtherModel, Needs
from dschat_ppo.config.health_flags import HealthFlags
from dschat_ppo.config.run_flags import (
    ConsoleFlags,
    MemoryFlags,
    OldFlags,
    RunFlags,
    SafetyFlags,
)
from dschat_ppo.config.schema import (
    default_of,
    fraction,
    not_negative,
    positive,
    require_used,
    types_of,
)
from dschat_ppo.errors import UserError, without_credentials
from dschat_ppo.features import hooks

# the others are constant after the warm-up
DECAYING = ("linear", "cosine", "cosine_with_restarts", "polynomial")
WITHOUT_WARMUP = "constant"
POLYNOMIAL_END = 1e-7  # where transformers' polynomial schedule ends


@dataclass(frozen=True)
class ScheduleFlags:
    """Schedule and length of a run."""

    warmup_ratio: float = fraction(
        0.0,
        "warm-up steps as a share of all optimizer steps, rounded up; replaces the default of"
        " --num_warmup_steps",
    )
    min_lr_ratio: float = fraction(
        0.0,
        "lowest learning rate after the warm-up, as a share of the peak; for the schedules linear,"
        " cosine, cosine_with_restarts and polynomial",
    )
    max_steps: int = not_negative(
        0,
        "length of the run in optimizer steps (step 3: PPO steps); replaces --num_train_epochs. The"
        " learning rate schedule covers it, and the data repeat if needed; 0 = --num_train_epochs"
        " sets the length",
    )
    early_stop_patience: int | None = positive(
        None,
        "end the run, as at its normal end, after this many evaluations in a row that do not"
        " improve the score by which the best model is chosen: in steps 1 and 2 that of"
        " --metric_for_best, or the lowest eval_loss; in step 3 the held-out score. Not given: off",
    )
    early_stop_min_delta: float = not_negative(
        0.0, "with --early_stop_patience: what an improvement must exceed"
    )

    def __post_init__(self) -> None:
        require_used(
            self,
            "early_stop_min_delta",
            when=self.early_stop_patience is not None,
            purpose="--early_stop_patience",
        )


@dataclass(frozen=True, kw_only=True)
class StepConfig(ABC):
    """The configuration of a step: groups of flags, of which these are in every step."""

    data: DataFlags
    safety: SafetyFlags
    run: RunFlags
    memory: MemoryFlags
    schedule: ScheduleFlags
    console: ConsoleFlags
    health: HealthFlags
    old: OldFlags
    features: FeatureFlags = FeatureFlags()

    # in checkpoints; those of "dpo" are of the kind "reward"
    kind: ClassVar[Literal["sft", "reward", "ppo"]]
    own_defaults = dict[str, Any]()  # flag -> default that replaces that of a shared group
    own_notes = dict[str, str]()  # flag without effect in this step alone -> the reason
    micro_batch = "per_device_train_batch_size"  # the flag of the rows of a micro-batch

    def of(self, kind: type[Flags]) -> Flags:
        """The flags of a feature, which this step has."""
        return self.features.of(kind)

    def value(self, name: str) -> Any:
        """The value of a flag that another feature may have; None if no feature has it."""
        return self.features.value(name)

    @property
    def ranks_of_row(self) -> int:
        """Ranks that share the rows of a micro-batch; 1: each rank has its own."""
        sizes = [ranks_of_row(self) for ranks_of_row in hooks("refusals.sharing_ranks")]
        return max(sizes, default=1)

    @property
    def groups(self) -> list[Any]:
        """All groups of flags."""
        names = [group.name for group in fields(self) if group.name != "features"]
        return [*(getattr(self, name) for name in names), *self.features.groups]

    @property
    def needs(self) -> list[Needs]:
        """What the features need with these flags. A feature offers `needs.needs_of(config)`."""
        return [needs_of(self) for needs_of in hooks("needs.needs_of")]

    @property
    def further_models(self) -> list[FurtherModel]:
        """The models that features add to those of the step."""
        return [model for needs in self.needs for model in needs.models]

    def is_frozen(self, prefix: str) -> bool:
        """Whether of a model that trains the weights of its folder stay as they are, and others
        train beside them. `prefix`: of its flags."""
        return any(prefix in needs.frozen for needs in self.needs)

    @property
    def frozen_bits(self) -> int:
        """Bits of a frozen weight that is quantised; 0 if they are not."""
        return max((needs.frozen_bits for needs in self.needs), default=0)

    @property
    @abstractmethod
    def training(self) -> Any:
        """The group of flags of optimization, with --lr_scheduler_type, --num_warmup_steps and
        --num_train_epochs."""

    @property
    @abstractmethod
    def stages(self) -> dict[str, int]:
        """Prefix of the flags of each model that trains, "", "actor_" or "critic_" -> its ZeRO
        stage."""

    @property
    def models(self) -> dict[str, tuple[str, str]]:
        """Role -> the flag that names its model, and the folder or hub name: those of the step, and
        then `further_models`."""
        models = dict(self.models_of_step)
        for model in self.further_models:
            models[model.role] = (model.flag, model.name)
        return models

    @property
    @abstractmethod
    def models_of_step(self) -> dict[str, tuple[str, str]]:
        """Those of `models` that the step has itself. Roles: "model"; of step 3 "actor", and those
        that the run has of "reference", "critic" and "reward"."""

    @property
    @abstractmethod
    def validate_only(self) -> bool:
        """Whether the run trains nothing."""

    @property
    def step_data(self) -> StepData:
        """What the step wants of its data, and the features in it. A feature offers
        `step_data.changed(config, data)`, which gives `data` with its own wishes."""
        data = self.data_of_step
        for changed in hooks("step_data.changed"):
            data = changed(self, data)
        return data

    @property
    @abstractmethod
    def data_of_step(self) -> StepData:
        """What the step itself wants of its data."""

    def warmup_steps(self, total: int) -> int:
        """Warm-up steps of a schedule of `total` optimizer steps."""
        if self.training.lr_scheduler_type == WITHOUT_WARMUP:
            return 0
        if self.schedule.warmup_ratio > 0:
            return times(total, self.schedule.warmup_ratio)
        return int(self.training.num_warmup_steps)

    def __post_init__(self) -> None:
        self._check_zero_stages()
        self._check_schedule()
        for refuse in hooks("refusals.refuse"):
            refuse(self)

    @property
    def _stages_by_flag(self) -> dict[str, int]:
        """`stages` with the names of whole flags."""
        return {f"--{prefix}zero_stage": stage for prefix, stage in self.stages.items()}

    def _check_zero_stages(self) -> None:
        """Refuse flags of memory that need another ZeRO stage."""
        stages = self._stages_by_flag
        if self.memory.offload_optimizer and min(stages.values()) == 0:
            raise UserError(
                f"--offload_optimizer needs {' and '.join(stages)} 1, 2 or 3: stage 0 keeps"
                " everything on the device"
            )
        if self.memory.zero_hpz_partition_size > 1 and 3 not in stages.values():
            raise UserError(
                f"--zero_hpz_partition_size (ZeRO++) needs {' or '.join(stages)} 3: the other"
                " stages do not partition weights"
            )

    def _check_schedule(self) -> None:
        """Refuse a warm-up or a lowest rate that the schedule does not have."""
        ratio = self.schedule.warmup_ratio
        group = self.training
        if ratio > 0 and group.num_warmup_steps != type(group).num_warmup_steps:
            raise UserError(
                f"--warmup_ratio {ratio} and --num_warmup_steps {group.num_warmup_steps} both set"
                " the warm-up; use one of the two"
            )
        if ratio > 0 and group.lr_scheduler_type == WITHOUT_WARMUP:
            raise UserError(
                f"--warmup_ratio {ratio}: --lr_scheduler_type {group.lr_scheduler_type} has no"
                " warm-up; use constant_with_warmup, or omit it"
            )
        if self.schedule.min_lr_ratio > 0 and group.lr_scheduler_type not in DECAYING:
            raise UserError(
                f"--min_lr_ratio {self.schedule.min_lr_ratio}: --lr_scheduler_type"
                f" {group.lr_scheduler_type} does not decay; use one of {', '.join(DECAYING)}, or"
                " omit it"
            )

    def idle(self) -> dict[str, str]:
        """Flags that have no effect with the other flags -> the reason."""
        reasons = dict[str, str]()
        group = self.training
        if self.schedule.max_steps > 0 and group.num_train_epochs != 1:
            reasons["num_train_epochs"] = "--max_steps sets the length of the run"
        default = type(group).num_warmup_steps
        if group.num_warmup_steps not in (0, default) and group.lr_scheduler_type == WITHOUT_WARMUP:
            reasons["num_warmup_steps"] = (
                "--lr_scheduler_type constant has no warm-up (constant_with_warmup has one)"
            )
        return reasons


def core_groups_of(kind: type[StepConfig]) -> dict[str, Any]:
    """Name of a group of flags -> its dataclass; those of the step alone come first, and then those
    of all steps. Those of features are not among them."""
    hints = types_of(kind)
    shared = {group.name for group in fields(StepConfig)}
    names = [group.name for group in fields(kind) if group.name != "features"]
    of_step = [name for name in names if name not in shared]
    of_all_steps = [name for name in names if name in shared]
    return {name: hints[name] for name in of_step + of_all_steps}


def groups_of(kind: type[StepConfig]) -> list[Any]:
    """All groups of flags of a step, as dataclasses."""
    return [*core_groups_of(kind).values(), *feature_groups(kind.kind)]


def flatten(config: StepConfig) -> dict[str, Any]:
    """The configuration of a step as flag name -> value, to be saved and compared, without
    credentials."""
    values: dict[str, Any] = {}
    for group in config.groups:
        for name, value in vars(group).items():
            values[name] = without_credentials(value)
    return values


def defaults_of(kind: type[StepConfig]) -> dict[str, Any]:
    """Flag -> its default in a step; `MISSING` for a flag that must be given."""
    defaults: dict[str, Any] = {}
    for group in groups_of(kind):
        for flag_field in fields(group):
            defaults[flag_field.name] = default_of(flag_field)
    return defaults | kind.own_defaults
