"""DeepSpeed configurations as plain dicts, merged with the user's own settings."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from dschat_ppo.config.run_flags import MemoryFlags
from dschat_ppo.config.schema import read_settings, require
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.engine.optimizers import optimizer_of
from dschat_ppo.errors import UserError, reading

Config = dict[str, Any]

# The trainer marks the last micro-batch of an optimizer step and divides losses by global counts,
# so it derives these.
DERIVED = tuple(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer"
    " scheduler".split()
)
# Other keys of DeepSpeed's configuration, which ignores a key that it does not know.
KNOWN = tuple(
    """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger
    communication_data_type compile compression_training csv_monitor data_efficiency data_types
    dataloader_drop_last disable_allgather disable_python_gc dump_state flops_profiler fp16
    gradient_allreduce_op gradient_clipping gradient_predivide_factor hybrid_engine log_level
    lower_precision_safe_modules managed_gradient_accumulation memory_breakdown pipeline
    prescale_gradients
    seq_parallel_communication_data_type steps_per_print tensor_parallel tensorboard timers
    torch_autocast
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
    zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer zero_optimization
    """.split()
)
SCHEDULES = {
    "warmuplr": "constant_with_warmup",
    "warmupdecaylr": "linear",
    "warmupcosinelr": "cosine",
}
# Numbers of a bucket of gradients or gathered weights on a GPU: 0.2 GB in bf16. DeepSpeed's default
# is five times that, for each engine that trains, whatever its size; on a CPU the pages of a bucket
# that nothing writes take no memory.
BUCKET_SIZE = 100_000_000
# ZeRO-3 keeps weights of up to so many elements whole on each rank. Models that fit into memory
# many times are whole altogether (`WholeWeights`), unless the user sets another number.
PERSISTENT_ELEMENTS = 10_000
GRADIENT_CHECKS = (("bf16", "check_grad_overflow"), ("zero_optimization", "compute_grad_norm"))


@dataclass(frozen=True)
class ZeroOptions:
    """What ZeRO does beside dividing by its stage.

    Attributes:
        memory: the flags for the offload of the optimizer alone, and for ZeRO++.
        quantised_frozen: hold frozen weights in 8 bits at stage 3.
        device: a type such as "cuda": on a GPU, ZeRO-3 gathers and reduces while it computes.
    """

    memory: MemoryFlags = MemoryFlags()
    quantised_frozen: bool = False
    device: str = "cpu"


def train_config(
    stage: int,
    dtype: str,
    offload: bool,
    world_size: int,
    max_grad_norm: float,
    overlay: Config | None = None,
    options: ZeroOptions = ZeroOptions(),
) -> Config:
    """Configuration of an engine that trains.

    In bf16 and fp16 stage 0 runs as stage 1: DeepSpeed's own stage 0 does not scale the fp16 loss
    in `engine.backward` and counts one Adam step too many, so its numbers differ.

    Args:
        stage: of ZeRO.
        dtype: fp32, bf16 or fp16.
        offload: keep the optimizer state in host memory, at stage 3 the parameters too.
        world_size: number of ranks.
        max_grad_norm: gradients are clipped to this norm.
        overlay: the user's `--deepspeed_config`, which takes precedence.
        options: further settings of ZeRO.
    """
    if stage == 0 and dtype != "fp32":
        stage = 1
    config = {
        **_common(dtype, world_size),
        "zero_optimization": _zero_section(stage, offload, options),
        "gradient_clipping": max_grad_norm,
    }
    if dtype == "bf16":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        # At stage 1, DeepSpeed would otherwise keep the bf16 gradients too, from one micro-batch to
        # the next.
        config["bf16"]["immediate_grad_update"] = True
    settings = merge(config, overlay or {})
    zero = settings["zero_optimization"]
    if zero["stage"] == 0 and dtype != "fp32":
        zero["stage"] = 1
    offload_device = (zero.get("offload_optimizer") or {}).get("device", "none")
    if dtype == "bf16" and zero["stage"] == 1 and offload_device == "none":
        # The sums are in fp32. In bf16, DeepSpeed would round them, and copy them for that, so that
        # the number of ranks changed a gradient.
        settings.setdefault("communication_data_type", "fp32")
    return settings


def _zero_section(stage: int, offload: bool, options: ZeroOptions) -> Config:
    """The section `zero_optimization` of an engine that trains."""
    on_gpu = options.device == "cuda"
    zero: Config = {"stage": stage, "overlap_comm": on_gpu and stage == 3}
    if on_gpu:
        zero["reduce_bucket_size"] = BUCKET_SIZE
        zero["allgather_bucket_size"] = BUCKET_SIZE
    if stage > 0:
        offloads_optimizer = offload or options.memory.offload_optimizer
        zero["offload_optimizer"] = _offloaded(offloads_optimizer)
    if stage == 3:
        zero["offload_param"] = _offloaded(offload)
        zero["stage3_param_persistence_threshold"] = PERSISTENT_ELEMENTS
        zero["zero_hpz_partition_size"] = options.memory.zero_hpz_partition_size
        zero["zero_quantized_nontrainable_weights"] = options.quantised_frozen
    return zero


def _offloaded(to_host: bool) -> Config:
    return {"device": "cpu" if to_host else "none"}


def config_of_run(
    config: StepConfig, stage: int, ranks: int, device: str, quantised_frozen: bool = False
) -> Config:
    """`train_config` as the flags of a step ask, and its `--deepspeed_config`."""
    training = config.training
    return train_config(
        stage,
        config.run.dtype,
        training.offload,
        ranks,
        training.max_grad_norm,
        read_overlay(config.run.deepspeed_config),
        ZeroOptions(config.memory, quantised_frozen, device),
    )


def eval_config(stage: int, dtype: str, offload: bool, world_size: int) -> Config:
    """Configuration of an engine that only runs forward: partitioned at stage 3, else whole on each
    rank. hpZ would save no gather: only a backward pass gathers again."""
    zero: Config = {"stage": 0}
    if stage == 3:
        zero = {
            "stage": 3,
            "offload_param": _offloaded(offload),
            "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
        }
    return {**_common(dtype, world_size), "zero_optimization": zero}


def check_zero_plus_plus(memory: MemoryFlags, ranks: int) -> None:
    """Check, before a model is loaded, that the ranks can be divided for ZeRO++."""
    size = memory.zero_hpz_partition_size
    require(
        ranks % size == 0,
        f"--zero_hpz_partition_size {size} must divide the number of ranks, {ranks}, because each"
        " group of ranks holds one copy",
    )


def _common(dtype: str, world_size: int) -> Config:
    """The settings of all engines."""
    return {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        # it waits for the device in every forward pass and update
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # PyTorch's is as fast, and nothing is compiled
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "loss_scale_window": 100},
    }


def merge(base: Config, overlay: Config) -> Config:
    """`base` updated with `overlay`, recursively. Neither argument is modified."""
    merged = copy.deepcopy(base)
    for key, value in overlay.items():
        both_are_levels = isinstance(value, dict) and isinstance(merged.get(key), dict)
        if both_are_levels:
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def read_overlay(path: str | None) -> Config:
    """The settings of `--deepspeed_config`; {} without a file. Without those that the trainer
    derives (see `require_agreement`) and "auto", which means what the flags or DeepSpeed set."""
    return {key: value for key, value in _checked_settings(path).items() if key not in DERIVED}


def require_agreement(config: StepConfig, ranks: int) -> None:
    """Require batches, optimizer, schedule and number format of `--deepspeed_config` to be those of
    the flags in `config`, for this number of `ranks`. `UserError` names the setting and the
    flag."""
    run = config.run
    path = run.deepspeed_config
    settings = _checked_settings(path)
    kind = _setting_at(settings, "optimizer.type")
    require(
        kind is None or str(kind).lower() in optimizer_of(config).types,
        f"--deepspeed_config {path}: optimizer.type is {kind}, but --optimizer is {run.optimizer}:"
        " change one of the two, or take it out of the file",
    )
    for setting, flag, value in _settings_of_flags(config, ranks):
        in_file = _setting_at(settings, setting)
        meant = in_file
        if setting == "scheduler.type":
            meant = SCHEDULES.get(str(in_file).lower(), in_file)
        elif setting == "zero_optimization.stage" and run.dtype != "fp32":
            if {in_file, value} == {0, 1}:
                meant = value  # see `train_config`
        if in_file is None or meant == value:
            continue
        advice = "change one of the two, or take it out of the file"
        if f"{run.optimizer}'s" in flag:  # which no flag sets
            advice = "take it out of the file"
        if flag == "dtype":
            value = run.dtype
        raise UserError(
            f"--deepspeed_config {path}: {setting} is {json.dumps(in_file)}, but --{flag} is"
            f" {value}: {advice}"
        )


def _settings_of_flags(config: StepConfig, ranks: int) -> list[tuple[str, str, Any]]:
    """(setting of DeepSpeed, flag, value) of what the flags decide for this number of `ranks`, so
    that a file can only repeat it. Those of the learning rate occur for each model that trains."""
    run = config.run
    flags = vars(config.training)
    micro = config.micro_batch
    accumulation = flags["gradient_accumulation_steps"]
    settings: list[tuple[str, str, Any]] = [
        ("train_micro_batch_size_per_gpu", micro, flags[micro]),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", accumulation),
        (
            "train_batch_size",
            f"{micro} x --gradient_accumulation_steps x ranks",
            flags[micro] * accumulation * ranks // config.ranks_of_row,
        ),
        ("optimizer.params.betas", "adam_beta1 and --adam_beta2", [run.adam_beta1, run.adam_beta2]),
        ("optimizer.params.eps", "adam_epsilon", run.adam_epsilon),
        ("bf16.enabled", "dtype", run.dtype == "bf16"),
        ("fp16.enabled", "dtype", run.dtype == "fp16"),
    ]
    settings += optimizer_of(config).needed_settings(config)
    for model in config.stages:
        peak = f"{model}learning_rate"
        decay = f"{model}weight_decay"
        settings += [
            ("optimizer.params.lr", peak, flags[peak]),
            ("optimizer.params.adam_lr", peak, flags[peak]),
            ("optimizer.params.weight_decay", decay, flags[decay]),
            ("scheduler.params.warmup_max_lr", peak, flags[peak]),
            ("scheduler.params.warmup_num_steps", "num_warmup_steps", flags["num_warmup_steps"]),
            ("scheduler.type", "lr_scheduler_type", flags["lr_scheduler_type"]),
        ]
    return settings


def _setting_at(settings: Config, path: str) -> Any:
    """The value at a place such as "optimizer.params.lr"; None if there is none."""
    level: Any = settings
    for key in path.split("."):
        if not isinstance(level, dict):
            return None
        level = level.get(key)
    return level


def _without_auto(settings: Config) -> Config:
    """The settings, at all levels, whose value is not "auto"."""
    chosen = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            chosen[key] = _without_auto(value)
        elif value != "auto":
            chosen[key] = value
    return chosen


def _checked_settings(path: str | None) -> Config:
    """The settings of `--deepspeed_config` but for "auto"; {} without a file. `UserError` for those
    that DeepSpeed does not know or that a run cannot do without."""
    if path is None:
        return {}
    text = read_settings("--deepspeed_config", path)
    with reading(f"--deepspeed_config {path}: cannot be read as JSON"):
        settings = json.loads(text)
    if not isinstance(settings, dict):
        raise UserError(f"--deepspeed_config {path}: must be a JSON object")
    for key in settings:
        require(
            key in KNOWN + DERIVED,
            f"--deepspeed_config {path}: DeepSpeed has no setting"
            f" {key}{_nearest(key, KNOWN + DERIVED)}",
        )
    settings = _without_auto(settings)
    for section, key in GRADIENT_CHECKS:
        if isinstance(settings.get(section), dict) and settings[section].get(key) is False:
            raise UserError(
                f"--deepspeed_config {path}: {section}.{key} false would let gradients that are not"
                " finite into the weights; take it out"
            )
    for section in ("offload_optimizer", "offload_param"):
        require(
            _setting_at(settings, f"zero_optimization.{section}.device") != "nvme",
            f"--deepspeed_config {path}: zero_optimization.{section}.device is nvme, but"
            " checkpoints would not hold what is there: use cpu",
        )
    if settings.keys() & {"zero_optimization", "fp16", "bf16"}:
        _check_sections(path, settings)
    return settings


def _nearest(key: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return ""


def _check_sections(path: str, settings: Config) -> None:
    """Check the `settings` of the file at `path` as DeepSpeed does when an engine is built, which
    is after the model is loaded."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    kinds = {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }
    for section, kind in kinds.items():
        values = settings.get(section, {})
        require(isinstance(values, dict), f"--deepspeed_config {path}: {section} must be an object")
        try:
            kind(**values)
        except ValueError as problem:
            # pydantic's; "value_error": several settings do not fit, perhaps those of flags
            errors = [error for error in problem.errors() if error["type"] != "value_error"]  # type: ignore[attr-defined]
            if not errors:
                continue
            name = ".".join(map(str, errors[0]["loc"]))
            reason = errors[0]["msg"]
            if errors[0]["type"] == "extra_forbidden":
                names = list(kind.model_fields)
                names += [field.alias for field in kind.model_fields.values() if field.alias]
                reason = f"DeepSpeed has no such setting{_nearest(name, names)}"
            raise UserError(f"--deepspeed_config {path}: {section}.{name}: {reason}") from None
