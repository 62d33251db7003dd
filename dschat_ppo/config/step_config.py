"""What the configurations of all steps share: their groups of flags, the checks of these, and flags
without effect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from dschat_ppo.config.batch_plan import times
from dschat_ppo.config.data_flags import DataFlags, StepData
from dschat_ppo.config.health_flags import HealthFlags
from dschat_ppo.config.run_flags import (
    AUTO,
    AdapterFlags,
    ConsoleFlags,
    MemoryFlags,
    OldFlags,
    RunFlags,
    SafetyFlags,
)
from dschat_ppo.config.schema import default_of, fraction, not_negative, refuse, types_of
from dschat_ppo.errors import without_credentials

# the others are constant after the warm-up
DECAYING = "linear", "cosine", "cosine_with_restarts", "polynomial"
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


@dataclass(frozen=True, kw_only=True)
class StepConfig(ABC):
    """The configuration of a step: groups of flags, of which these are in every step."""

    data: DataFlags
    safety: SafetyFlags
    run: RunFlags
    lora: Any  # of the models of the step
    adapters: AdapterFlags
    memory: MemoryFlags
    schedule: ScheduleFlags
    console: ConsoleFlags
    health: HealthFlags
    old: OldFlags

    # in checkpoints; those of "dpo" are of the kind "reward"
    kind: ClassVar[Literal["sft", "reward", "ppo"]]
    own_defaults = dict[str, Any]()  # flag -> default that replaces that of a shared group
    own_notes = dict[str, str]()  # flag without effect in this step alone -> the reason
    micro_batch = "per_device_train_batch_size"  # the flag of the rows of a micro-batch

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
    @abstractmethod
    def models(self) -> dict[str, tuple[str, str]]:
        """Role -> the flag that names its model, and the folder or hub name. Roles: "model"; of
        step 3 "actor", and those that the run has of "reference", "critic" and "reward"."""

    @property
    @abstractmethod
    def validate_only(self) -> bool:
        """Whether the run trains nothing."""

    @property
    @abstractmethod
    def step_data(self) -> StepData:
        """What the step wants of its data."""

    def warmup_steps(self, total: int) -> int:
        """Warm-up steps of a schedule of `total` optimizer steps."""
        ratio = self.schedule.warmup_ratio
        group = self.training
        if group.lr_scheduler_type == WITHOUT_WARMUP:
            return 0
        if ratio > 0:
            return times(total, ratio)
        return int(group.num_warmup_steps)

    def __post_init__(self) -> None:
        flags = self.memory
        schedule = self.schedule
        group = self.training
        stages = {f"--{prefix}zero_stage": stage for prefix, stage in self.stages.items()}
        names = " and ".join(stages)
        some = " or ".join(stages)
        refuse(
            {
                (
                    f"--offload_optimizer needs {names} 1, 2 or 3: stage 0 keeps everything on the "
                    "device"
                ): (flags.offload_optimizer and min(stages.values()) == 0),
                (
                    f"--zero_hpz_partition_size (ZeRO++) needs {some} 3: the other stages do not "
                    "partition weights"
                ): (flags.zero_hpz_partition_size > 1 and 3 not in stages.values()),
                # elsewhere a skipped update also changes Muon's momentum, or a checkpoint could not
                # divide it
                (
                    f"--optimizer muon needs {names} 0, with --dtype bf16 at most 1, and neither "
                    "fp16 nor offload: elsewhere DeepSpeed clips Muon's update in place of the "
                    "gradient, which makes it many times smaller"
                ): (
                    self.run.optimizer == "muon"
                    and (
                        self.run.dtype == "fp16"
                        or group.offload
                        or flags.offload_optimizer
                        or max(stages.values()) > (self.run.dtype in (AUTO, "bf16"))
                    )
                ),
            }
        )
        self._require_usable_lora()
        ratio = schedule.warmup_ratio
        kind = group.lr_scheduler_type
        warmup = group.num_warmup_steps
        refuse(
            {
                (
                    f"--warmup_ratio {ratio} and --num_warmup_steps {warmup} both set the warm-up; "
                    "use one of the two"
                ): (ratio > 0 and warmup != type(group).num_warmup_steps),
                (
                    f"--warmup_ratio {ratio}: --lr_scheduler_type {kind} has no warm-up; use "
                    "constant_with_warmup, or omit it"
                ): (ratio > 0 and kind == WITHOUT_WARMUP),
                (
                    f"--min_lr_ratio {schedule.min_lr_ratio}: --lr_scheduler_type {kind} does not "
                    f"decay; use one of {', '.join(DECAYING)}, or omit it"
                ): (schedule.min_lr_ratio > 0 and kind not in DECAYING),
            }
        )

    def _require_usable_lora(self) -> None:
        """Require the LoRA flags to have an effect, and to fit each other."""
        stages = self.stages
        adapters = self.adapters
        dims = self._lora_dims
        adapted = [prefix for prefix, dim in dims.items() if dim > 0]
        ranks = " or ".join(f"--{prefix}lora_dim" for prefix in stages)
        if adapters.load_in_4bit:
            bits = "--load_in_4bit"
        elif adapters.load_in_8bit:
            bits = "--load_in_8bit"
        else:
            bits = None
        refuse(
            {
                (
                    f"--{name} needs LoRA: set {ranks}, or omit --{name}; without LoRA all weights "
                    "train, and 1e-5 to 2e-5 is a usual learning rate"
                ): (not adapted and vars(adapters)[name])
                for name in (
                    "only_optimize_lora",
                    "use_rslora",
                    "use_dora",
                    "load_in_4bit",
                    "load_in_8bit",
                )
            }
            | {
                (
                    f"{bits} needs --{prefix}zero_stage 0, 1 or 2: ZeRO-3 cannot partition "
                    "quantised weights"
                ): (bits is not None and stages[prefix] == 3)
                for prefix in adapted
            }
            | {
                (
                    "--optimizer muon is for whole matrices, not for the two factors of LoRA: "
                    f"omit {ranks}, or use adamw"
                ): (bool(adapted) and self.run.optimizer == "muon"),
                (
                    "--resize_vocabulary adds rows to the embedding and the head, which "
                    "--only_optimize_lora would freeze: omit one of the two"
                ): (bool(adapted) and adapters.only_optimize_lora and self.run.resize_vocabulary),
                f"{bits} freezes the weights that it quantises: add --only_optimize_lora": (
                    bits is not None and not adapters.only_optimize_lora
                ),
                (
                    f"{bits} with --lora_merge would save the rounding errors of quantised "
                    "weights: omit --lora_merge; an adapter folder is merged into unquantised "
                    "weights wherever it is loaded"
                ): (bits is not None and adapters.lora_merge),
            }
        )

    @property
    def _lora_dims(self) -> dict[str, int]:
        """Prefix of the flags of each model that trains -> its LoRA rank."""
        return {prefix: vars(self.lora)[f"{prefix}lora_dim"] for prefix in self.stages}

    def idle(self) -> dict[str, str]:
        """Flags that have no effect with the other flags -> the reason."""
        found = dict[str, str]()
        group = self.training
        for prefix, dim in self._lora_dims.items():
            if dim == 0:
                names = (f"{prefix}lora_module_name", f"{prefix}lora_learning_rate")
                found |= dict.fromkeys(names, f"--{prefix}lora_dim is 0, so there is no LoRA")
        if not any(self._lora_dims.values()):
            found |= dict.fromkeys(
                ("lora_alpha", "lora_dropout", "lora_merge"), "no model has LoRA (rank 0)"
            )
        elif not self.adapters.only_optimize_lora:
            merged = (
                "other weights train too (no --only_optimize_lora), so the adapter is merged in any"
                " case"
            )
            found["lora_merge"] = merged
        if self.schedule.max_steps > 0 and group.num_train_epochs != 1:
            found["num_train_epochs"] = "--max_steps sets the length of the run"
        default = type(group).num_warmup_steps
        if group.num_warmup_steps not in (0, default) and group.lr_scheduler_type == WITHOUT_WARMUP:
            found["num_warmup_steps"] = (
                "--lr_scheduler_type constant has no warm-up (constant_with_warmup has one)"
            )
        return found


def groups_of(kind: type[StepConfig]) -> dict[str, Any]:
    """Name of a group of flags -> its dataclass; those of the step alone come first."""
    hints = types_of(kind)
    shared = {group.name for group in fields(StepConfig)}
    return {
        name: hints[name]
        for name in sorted((group.name for group in fields(kind)), key=shared.__contains__)
    }


def flatten(config: StepConfig) -> dict[str, Any]:
    """The configuration of a step as flag name -> value, to be saved and compared, without
    credentials."""
    groups = [vars(getattr(config, name)) for name in groups_of(type(config))]
    return {name: without_credentials(value) for group in groups for name, value in group.items()}


def defaults_of(kind: type[StepConfig]) -> dict[str, Any]:
    """Flag -> its default in a step; `MISSING` for a flag that must be given."""
    every = [own for group in groups_of(kind).values() for own in fields(group)]
    return {own.name: default_of(own) for own in every} | kind.own_defaults
