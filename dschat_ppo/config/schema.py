"""The flag groups that the steps share. Every field is a command-line flag, documented by its help text.

Names, types and meanings follow DeepSpeed-Chat, so that its scripts keep working. A group validates itself when it is
created, and is frozen.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from dschat_ppo.errors import UserError, nearest_path

SCHEDULERS = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]
ZERO_STAGES = Literal[0, 1, 2, 3]
EPOCHS_HELP = "epochs over the {}; a fraction such as 0.5 or 1.5 ends inside an epoch (see --max_steps)"
VALIDATE_ONLY = "evaluate once, write the results to validation/ in --output_dir, and train nothing"
MOST_EPOCHS = 2**31 - 1
MOST_PROCESSES = 1024  # worker processes on one machine
MOST_SETTINGS = 2**20  # characters of a settings file; a device such as /dev/zero has no end

SMALLEST_EPSILON = 2.0**-63  # of AdamW: the squares of smaller gradients are subnormal in fp32
LARGEST_BETA = 1 - 1e-6  # of AdamW: 1 - beta of a larger one has hardly a significant digit in fp32
SMALLEST_NORM = 1e-6  # of clipped gradients: smaller ones vanish against the usual epsilon


def flag(help: str, default: Any = MISSING, *aliases: str, commas: bool = False) -> Any:
    """A dataclass field that becomes the command-line flag of the same name; required without a default.

    `aliases` are other names of the flag, as other libraries call it. `commas`: its text has parts between commas,
    which may also be words of their own.
    """
    names = [f"--{name}" for name in aliases]
    return field(default=default, metadata={"help": help, "aliases": names} | ({"commas": True} if commas else {}))


def flag_list(help: str, default: Callable[[], list[Any]], *, commas: bool = False) -> Any:
    """A flag that takes any number of values; `commas`: also between commas."""
    return field(default_factory=default, metadata={"help": help} | ({"commas": True} if commas else {}))


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def require_positive(flags: object, names: str) -> None:
    """Require these flags (names separated by spaces) to be above 0; None (not given) passes."""
    for name, value in _named(flags, names):
        require(value is None or 0 < value < math.inf, f"--{name} must be finite and above 0, got {value}")


def require_not_negative(flags: object, names: str) -> None:
    """Require these flags to be 0 or above; None passes. The message says what 0 means, for which others have -1."""
    for name, value in _named(flags, names):
        meaning = re.search(r"\b0 = [^;,)]+", type(flags).__dataclass_fields__[name].metadata["help"])  # type: ignore[attr-defined]
        zero = f"; {meaning[0]}" if meaning else ""
        require(value is None or 0 <= value < math.inf, f"--{name} must be finite, 0 or above, got {value}{zero}")


def require_fraction(flags: object, names: str) -> None:
    """Require these flags to be in [0, 1); None passes."""
    for name, value in _named(flags, names):
        require(value is None or 0 <= value < 1, f"--{name} must be at least 0 and below 1, got {value}")


def require_bounded_updates(flags: object, learning_rate: str, weight_decay: str) -> None:
    """Require these two flags and `--max_grad_norm` to bound the update of AdamW.

    With the betas that `RunFlags` allows, an update moves each weight by at most the learning rate times a small
    number, and weight decay multiplies it by `1 - learning_rate * weight_decay`.
    """
    (_, rate), (_, decay) = _named(flags, f"{learning_rate} {weight_decay}")
    assert rate is not None and decay is not None
    require(
        rate <= 1,
        f"--{learning_rate} must be at most 1, got {rate}: an update of AdamW moves each weight by about this rate",
    )
    require(
        rate * decay < 1,
        f"--{learning_rate} x --{weight_decay} must be below 1, got {rate * decay:g}: otherwise the decay changes the "
        "sign of the weights or makes them grow",
    )
    require_clip_norm(flags, "max_grad_norm")


def require_clip_norm(flags: object, name: str) -> None:
    """Require the norm to which gradients are clipped to be 0 (off) or large enough for AdamW; None passes."""
    [(_, norm)] = _named(flags, name)
    require(
        norm is None or norm == 0 or norm >= SMALLEST_NORM,
        f"--{name} must be 0 (off) or at least {SMALLEST_NORM:g}, got {norm}: smaller gradients vanish against "
        "AdamW's epsilon",
    )


def require_at_most(flags: object, names: str, most: float, reason: str) -> None:
    """Require these flags to be at most `most`, because of `reason`; None passes."""
    for name, value in _named(flags, names):
        require(value is None or value <= most, f"--{name} {value}: must be at most {most}: {reason}")


def _named(flags: object, names: str) -> list[tuple[str, float | None]]:
    """(name, value) of these flags."""
    return [(name, vars(flags)[name]) for name in names.split()]


def read_settings(flag: str, path: str) -> str:
    """The text of the settings file that `flag` names.

    Raises:
        UserError: the file cannot be read, is not UTF-8 text, or is longer than `MOST_SETTINGS` characters.
    """
    special = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    require(not special, f"{flag} {path}: is not a regular file")  # a pipe would be waited for, on each rank
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MOST_SETTINGS + 1)
    except OSError as problem:
        nearest = nearest_path(path) if isinstance(problem, FileNotFoundError) else ""
        raise UserError(f"{flag} {path}: cannot be read ({problem.strerror}){nearest}") from None
    except UnicodeDecodeError as problem:
        raise UserError(f"{flag} {path}: is not UTF-8 text ({problem})") from None
    require(
        len(text) <= MOST_SETTINGS,
        f"{flag} {path}: is longer than {MOST_SETTINGS} characters, so it is not a settings file",
    )
    return text


@dataclass(frozen=True)
class RunFlags:
    """Output folder, seed, number format, AdamW and logging."""

    _argument_group_name: ClassVar[str] = "run"

    output_dir: str | None = flag("output folder for models, metrics and the resolved configuration (required)", None)
    overwrite_output_dir: bool = flag(
        "start from the beginning if --output_dir holds another run; an interrupted run with the same settings still "
        "resumes (see --resume)",
        False,
    )
    seed: int = flag("global seed; it makes a run reproducible", 1234)
    deterministic: bool = flag(
        "use PyTorch's deterministic algorithms, so that a run on a GPU repeats bit for bit; slower, and an operation "
        "without such an algorithm stops the run (not needed on a CPU)",
        False,
    )
    local_rank: int = flag("set by the deepspeed launcher", -1)
    dtype: Literal["bf16", "fp16", "fp32"] = flag("number format of weights and activations", "bf16")
    resize_vocabulary: bool = flag(
        "if the tokenizer has more tokens than the model has embeddings, add rows to the embedding and the head, each "
        "initialised with the mean of the existing rows",
        False,
    )
    compute_fp32_loss: bool = flag("no effect (kept for old scripts): losses are always computed in fp32", False)
    adam_beta1: float = flag("first beta of AdamW", 0.9)
    adam_beta2: float = flag("second beta of AdamW; above the square of the first", 0.95)
    adam_epsilon: float = flag("epsilon of AdamW, from 1.1e-19 to 1", 1e-8)
    report_to: list[Literal["none", "tensorboard", "wandb", "mlflow", "trackio"]] = flag_list(
        "one or several trackers that also receive the metrics; all but tensorboard need an extra, such as pip install "
        '"dschat_ppo[wandb]". none: no tracker, even with --enable_tensorboard',
        list,
        commas=True,
    )
    run_name: str | None = flag(
        "name of the run in wandb, mlflow and trackio; not given: WANDB_NAME, or the name of the output folder", None
    )
    project: str | None = flag(
        "project in wandb and trackio, experiment in mlflow; not given: WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME, "
        "MLFLOW_EXPERIMENT_ID or TRACKIO_PROJECT, or the name of the parent of the output folder",
        None,
    )
    enable_tensorboard: bool = flag("the same as --report_to tensorboard, in addition to that flag's trackers", False)
    tensorboard_path: str = flag(
        "TensorBoard folder; a relative path is inside --output_dir, unless it already leads there", "tensorboard"
    )
    profile: int | None = flag(
        "write a trace of this step (optimizer step; in step 3 PPO step) by torch's profiler to "
        "OUTPUT/profile/step_N_rank_R.json.gz, for Perfetto or chrome://tracing",
        None,
    )
    deepspeed: bool = flag(
        "no effect (kept for old scripts): training always runs on DeepSpeed; --deepspeed FILE.json is "
        "--deepspeed_config FILE.json",
        False,
    )
    deepspeed_config: str | None = flag(
        "JSON file of DeepSpeed settings that override those derived from the flags", None
    )
    config: str | None = flag("YAML file of flag values; flags on the command line override it", None)
    dry_run: bool = flag(
        "check flags, models and data, print the batches and the expected peak of memory, and end; reads no weights, "
        "starts no ranks and writes nothing to --output_dir",
        False,
    )
    dry_run_ranks: int | None = flag(
        "with --dry_run: the number of ranks to compute batches for; not given: that of the launch", None
    )

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise UserError("--output_dir is required: name the folder for the model and its metrics")
        require(
            "none" not in self.report_to or len(set(self.report_to)) == 1,
            f"--report_to {' '.join(self.report_to)}: none cannot be combined with other trackers; omit it or them",
        )
        require_not_negative(self, "seed")
        require_positive(self, "profile dry_run_ranks")
        require(self.dry_run_ranks is None or self.dry_run, "--dry_run_ranks needs --dry_run")
        require_fraction(self, "adam_beta1 adam_beta2")
        # AdamW divides m by sqrt(v), and |m| <= (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)) sqrt(v) for all gradients
        # (Cauchy-Schwarz on the two sums). So an update is at most the learning rate times a function of the betas.
        smallest, epsilon, beta1, beta2 = SMALLEST_EPSILON, self.adam_epsilon, self.adam_beta1, self.adam_beta2
        require(
            smallest <= epsilon <= 1,
            f"--adam_epsilon must be at least {smallest:.2g} and at most 1, got {epsilon}: a smaller one can make "
            "fp32 divide by 0, and with a larger one the weights hardly move",
        )
        for name, beta in (("adam_beta1", beta1), ("adam_beta2", beta2)):
            require(
                beta <= LARGEST_BETA,
                f"--{name} must be at most {LARGEST_BETA:g}, got {beta}: above, fp32 rounds gradients away",
            )
        require(
            beta1**2 < beta2,
            f"--adam_beta2 must be above the square of --adam_beta1 ({beta1**2:g}), got {beta2}: otherwise an "
            "update has no bound when small gradients follow large ones",
        )

    @property
    def folder(self) -> str:
        """`--output_dir` with `~` expanded, because a shell does not expand it in `--output_dir=~/out`."""
        assert self.output_dir is not None
        return os.path.expanduser(self.output_dir)

    @property
    def trackers(self) -> tuple[str, ...]:
        """The trackers of `--report_to` and `--enable_tensorboard`, each once."""
        if "none" in self.report_to:
            return ()
        return tuple(dict.fromkeys([*self.report_to, *(["tensorboard"] if self.enable_tensorboard else [])]))

    def idle(self) -> dict[str, str]:
        """Flags of trackers that have no effect with the other flags -> the reason."""
        found = {"enable_tensorboard": "--report_to none turns all trackers off"} if "none" in self.report_to else {}
        if not set(self.trackers) - {"tensorboard"}:
            found |= dict.fromkeys(("run_name", "project"), "no tracker of --report_to uses run or project names")
        return found

    @property
    def tensorboard_folder(self) -> Path:
        """`--tensorboard_path`; a relative path is inside `--output_dir`, unless it already leads there."""
        folder, board = Path(self.folder), Path(self.tensorboard_path).expanduser()
        return board if board.resolve().is_relative_to(folder.resolve()) else folder / board


@dataclass(frozen=True)
class SupervisedFlags:
    """Training of one model on rows of data (steps 1 and 2)."""

    _argument_group_name: ClassVar[str] = "training"

    model_name_or_path: str = flag("Hugging Face model: a folder or a hub name")
    max_seq_len: int = flag(
        "maximum tokens of a row, prompt and answer together; batches are padded to their longest row", 512
    )
    per_device_train_batch_size: int = flag("micro-batch size per device", 16)
    packing: bool = flag(
        "fill each row of a micro-batch with several samples, up to --max_seq_len tokens (pairs: two such rows for each"
        " packed row); attention stays inside a sample. An optimizer step then has more samples, and an epoch has fewer"
        " steps",
        False,
    )
    per_device_eval_batch_size: int = flag("evaluation batch size per device", 16)
    gradient_accumulation_steps: int = flag("micro-batches per optimizer step", 1)
    learning_rate: float = flag("peak learning rate, at most 1; 1e-5 to 2e-5 is usual for a pretrained model", 2e-5)
    weight_decay: float = flag("weight decay; biases and norm weights are exempt", 0.0)
    num_train_epochs: float = flag(EPOCHS_HELP.format("training rows"), 1)
    lr_scheduler_type: SCHEDULERS = flag("learning rate schedule, as in transformers, per optimizer step", "cosine")
    num_warmup_steps: int = flag("warm-up steps of the learning rate, in optimizer steps", 0)
    max_grad_norm: float = flag("clip gradients to this global norm; 0 = off", 1.0)
    zero_stage: ZERO_STAGES = flag(
        "ZeRO stage; in bf16 and fp16, 0 runs as 1, with the same numbers and less memory", 0
    )
    offload: bool = flag("keep optimizer states (and parameters at stage 3) in host memory", False)
    gradient_checkpointing: bool = flag("recompute activations in the backward pass", False)
    dropout: float | None = flag(
        "dropout in training, for every dropout of the model config; not given: that of the config (step 2: 0 if the "
        "policy itself is trained)",
        None,
    )
    router_loss_coef: float = flag(
        "weight of the load-balancing loss of a mixture of experts, over the tokens of an optimizer step (0.001 to 0.01"
        " is usual). Each step then needs a second forward pass without gradients; 0 = off",
        0.0,
    )
    eval_interval: int = flag(
        "evaluate every N optimizer steps, in addition to the start and the end of each epoch; 0 = only then", 0
    )
    eval_iters: int = flag("maximum evaluation batches per device; 0 = all", 100)
    eval_data_path: list[str] = flag_list("evaluation data sets; not given: see --eval_fraction", list, commas=True)
    eval_fraction: float = flag(
        "share of the training rows held out for evaluation if a data set has no eval, test or validation split", 0.05
    )
    validate_only: bool = flag(VALIDATE_ONLY, False)
    add_eot_token: bool = flag(
        "no effect (kept for old scripts): answers end with the chat template's end-of-turn token, or with EOS", False
    )

    def __post_init__(self) -> None:
        require(
            self.max_seq_len >= 2,
            f"--max_seq_len must be at least 2 (a prompt and an answer token), got {self.max_seq_len}",
        )
        require_positive(
            self,
            "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps learning_rate "
            "num_train_epochs",
        )
        require_not_negative(
            self, "weight_decay num_warmup_steps max_grad_norm router_loss_coef eval_interval eval_iters"
        )
        require(
            not self.offload or self.zero_stage > 0,
            "--offload needs --zero_stage 1, 2 or 3: stage 0 keeps everything on the device",
        )
        require_at_most(self, "num_train_epochs", MOST_EPOCHS, "2^31 - 1, the limit of all counts")
        require_fraction(self, "dropout eval_fraction")
        require_bounded_updates(self, "learning_rate", "weight_decay")
