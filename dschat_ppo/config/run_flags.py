"""The flags of every run: outputs, seed, number format, optimizer; checkpoints and failures; what
it prints and keeps; memory, sequences and attention."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from dschat_ppo.config.schema import (
    check_values,
    flag,
    fraction,
    is_own_function,
    not_negative,
    positive,
    require,
    share,
)
from dschat_ppo.errors import UserError

AUTO, NEVER = "auto", "never"
_ONE_END = "answers end with the chat template's end-of-turn token, or with EOS after a text prompt"


def _check_report_to(names: list[str]) -> None:
    require(
        "none" not in names or len(set(names)) == 1,
        f"--report_to {' '.join(names)}: none cannot be combined with other trackers; omit it or"
        " them",
    )


def _check_tracker(names: list[str]) -> None:
    for name in names:
        require(is_own_function(name), f"--tracker {name}: expected FILE.py:CLASS")


@dataclass(frozen=True)
class RunFlags:
    """Output folder, seed, number format, optimizer and logging."""

    output_dir: str | None = flag(
        None, "output folder for models, metrics and the resolved configuration (required)"
    )
    overwrite_output_dir: bool = flag(
        False,
        "start from the beginning if --output_dir holds another run; an interrupted run with the"
        " same settings still resumes (see --resume)",
    )
    seed: int = not_negative(1234, "global seed; it makes a run reproducible")
    deterministic: bool = flag(
        False,
        "use PyTorch's deterministic algorithms, so that a run on a GPU repeats bit for bit;"
        " slower, and an operation without such an algorithm stops the run (not needed on a CPU)",
    )
    local_rank: int = flag(-1, "set by the deepspeed launcher")
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = flag(
        AUTO,
        "number format of weights and activations. auto: on a GPU bf16, or fp16 where it has no"
        " bf16 arithmetic; on a CPU the faster of bf16 and fp32, which is measured at the start; a"
        " run that resumes keeps its format",
    )
    save_dtype: Literal["bf16", "fp16", "fp32"] | None = flag(
        None,
        "number format of saved models; not given: that of the model from which each starts,"
        " whatever --dtype is",
    )
    resize_vocabulary: bool = flag(
        False,
        "if the tokenizer has more tokens than the model has embeddings, add rows to the embedding"
        " and the head, each initialised with the mean of the existing rows",
    )
    optimizer: Literal["adamw"] = flag("adamw", "optimizer of the weights that train")
    adam_beta1: float = fraction(0.9, "first beta of AdamW")
    adam_beta2: float = fraction(0.95, "second beta of AdamW")
    adam_epsilon: float = share(1e-8, "epsilon of AdamW")
    report_to: list[Literal["none", "tensorboard", "wandb", "trackio"]] = flag(
        [],
        "one or several trackers that also receive the metrics; all but tensorboard need an extra,"
        ' such as pip install "dschat_ppo[wandb]". none: no tracker, even with'
        " --enable_tensorboard",
        commas=True,
        check=_check_report_to,
    )
    tracker: list[str] = flag(
        [],
        "one or several trackers of your own, as FILE.py:CLASS, that receive the metrics too: a"
        " class with __init__(run_name, config), log(metrics, step) and close()",
        check=_check_tracker,
    )
    run_name: str | None = flag(
        None,
        "name of the run in wandb, trackio and those of --tracker; not given: WANDB_NAME, or the"
        " name of the output folder",
    )
    project: str | None = flag(
        None,
        "project in wandb and trackio; not given: WANDB_PROJECT or TRACKIO_PROJECT, or the name of"
        " the parent of the output folder",
    )
    enable_tensorboard: bool = flag(
        False, "the same as --report_to tensorboard, in addition to that flag's trackers"
    )
    tensorboard_path: str = flag(
        "tensorboard",
        "TensorBoard folder; a relative path is inside --output_dir, unless it already leads there",
    )
    profile: int | None = positive(
        None,
        "write a trace of this step (optimizer step; in step 3 PPO step) by torch's profiler to "
        "OUTPUT/profile/step_N_rank_R.json.gz, for Perfetto or chrome://tracing",
    )
    deepspeed_config: str | None = flag(
        None, "JSON file of DeepSpeed settings that override those derived from the flags"
    )
    config: str | None = flag(
        None, "YAML file of flag values; flags on the command line override it"
    )
    dry_run: bool = flag(
        False,
        "check flags, models and data, print the batches and the expected peak of memory, and end;"
        " reads no weights, starts no ranks and writes nothing to --output_dir; see --measure",
    )
    dry_run_ranks: int | None = positive(
        None,
        "with --dry_run: the number of ranks to compute batches for; not given: that of the launch",
    )

    measure: bool = flag(
        False,
        "with --dry_run: load the models, measure the parts of a step on the ranks of the launch,"
        " and print seconds a step and hours of the run; writes nothing to --output_dir",
    )

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise UserError(
                "--output_dir is required: name the folder for the model and its metrics"
            )
        check_values(self)
        if self.dry_run_ranks is not None and not self.dry_run:
            raise UserError("--dry_run_ranks needs --dry_run")
        if self.measure and not self.dry_run:
            raise UserError("--measure needs --dry_run")
        if self.measure and self.dry_run_ranks is not None:
            raise UserError(
                "--measure measures the ranks of the launch: omit --dry_run_ranks, and start as"
                " many as the run has"
            )

    @property
    def only_checks(self) -> bool:
        """Whether the run ends before its models are loaded (`--dry_run` without `--measure`)."""
        return self.dry_run and not self.measure

    @property
    def folder(self) -> str:
        """`--output_dir` with `~` expanded, because a shell does not expand it in
        `--output_dir=~/out`."""
        assert self.output_dir is not None
        return os.path.expanduser(self.output_dir)

    @property
    def trackers(self) -> tuple[str, ...]:
        """The trackers of `--report_to`, `--enable_tensorboard` and `--tracker`, each once."""
        if "none" in self.report_to:
            return ()
        names = list[str](self.report_to)
        if self.enable_tensorboard:
            names.append("tensorboard")
        names += self.tracker
        return tuple(dict.fromkeys(names))

    def idle(self) -> dict[str, str]:
        """Flags of trackers that have no effect with the other flags -> the reason."""
        reasons: dict[str, str] = {}
        if "none" in self.report_to:
            reasons["enable_tensorboard"] = "--report_to none disables all trackers"
            reasons["tracker"] = reasons["enable_tensorboard"]
        if not set(self.trackers) - {"tensorboard"}:
            reasons["run_name"] = "no tracker of this run uses run names"
        if not {"wandb", "trackio"} & set(self.trackers):
            reasons["project"] = "no tracker of --report_to uses project names"
        return reasons

    @property
    def tensorboard_folder(self) -> Path:
        """`--tensorboard_path`; a relative path is inside `--output_dir`, unless it already leads
        there."""
        folder = Path(self.folder)
        board = Path(self.tensorboard_path).expanduser()
        if board.resolve().is_relative_to(folder.resolve()):
            return board
        return folder / board


@dataclass(frozen=True)
class SafetyFlags:
    """Checkpoints, saved models, resuming and failures."""

    save_steps: int = not_negative(
        0, "save a checkpoint every N optimizer steps (in step 3: every N PPO steps); 0 = off"
    )
    save_minutes: float = not_negative(
        30.0, "save a checkpoint when the last one is this many minutes old; 0 = off"
    )
    save_total_limit: int = positive(
        2,
        "number of checkpoints to keep: the newest, and in addition the best of those saved right"
        " after an evaluation",
    )
    keep_final_checkpoint: bool = flag(
        False,
        "keep the checkpoints of a finished run, so that it can be continued with a higher"
        " --max_steps or --num_train_epochs; without the flag they are removed once the models are"
        " saved",
    )
    save_hf_steps: int = not_negative(
        0,
        "also save the model as a Hugging Face folder every N optimizer steps, to hf/step_N in"
        " --output_dir (step 3: every N PPO steps, with actor, critic and actor_ema in it); all"
        " folders are kept; 0 = off",
    )
    resume: str = flag(
        AUTO,
        "'auto' resumes from the newest intact checkpoint in --output_dir; 'never' starts from the"
        " beginning; a folder names the checkpoint to resume from",
    )
    resume_force: bool = flag(
        False, "resume even if flags or data that affect the result have changed"
    )
    collective_timeout: float = flag(
        1800.0,
        "seconds after which the run ends if no rank makes progress (the logs then have the"
        " stacks)",
        range="seconds_to_years",
    )
    on_nonfinite: Literal["stop", "skip"] = flag(
        "stop",
        "on a NaN or infinite loss, gradient, reward or advantage, stop before the update or skip"
        " the update; either way the batch is written to a file",
    )
    max_nonfinite_skips: int = positive(
        3, "with --on_nonfinite skip: stop after this many skipped updates in a row"
    )


@dataclass(frozen=True)
class OldFlags:
    """Flags of DeepSpeed-Chat's scripts that have no effect."""

    deepspeed: bool = flag(
        False,
        "training always runs on DeepSpeed; --deepspeed FILE.json is --deepspeed_config FILE.json",
    )
    compute_fp32_loss: bool = flag(False, "losses are always computed in fp32")
    add_eot_token: bool = flag(False, _ONE_END)
    eot_token: str | None = flag(None, _ONE_END)
    print_loss: bool = flag(False, "the loss is printed every --logging_steps steps in any case")
    num_padding_at_beginning: int | None = flag(None, "the attention mask gives the score position")
    enable_hybrid_engine: bool = flag(False, "the hybrid engine is always used")
    release_inference_cache: bool = flag(False, "the KV cache is always released after a rollout")


WITHOUT_EFFECT = {  # flag -> why, for a note
    flag_field.name: flag_field.metadata["help"] for flag_field in fields(OldFlags)
}


@dataclass(frozen=True)
class ConsoleFlags:
    """Console."""

    logging_steps: int = positive(
        10,
        "print a line of metrics every N optimizer steps (step 3: every N PPO steps), and at the"
        " first and the last step; metrics.jsonl always has every step",
    )
    verbose: bool = flag(
        False, "also print the informational messages of DeepSpeed and transformers, on every rank"
    )

    def prints(self, step: int, total: int) -> bool:
        """Whether the run prints a line after `step`, counted from 1, of `total`."""
        return step in (1, total) or step % self.logging_steps == 0


@dataclass(frozen=True)
class MemoryFlags:
    """Memory, division of sequences, and attention."""

    offload_optimizer: bool = flag(
        False,
        "keep optimizer states and fp32 weights in host memory and update them on the CPU;"
        " parameters stay on the device (needs ZeRO stage 1, 2 or 3; --offload moves the parameters"
        " of stage 3 too)",
    )
    offload_activations: bool = flag(
        False,
        "keep in host memory the activations that the backward pass needs; with gradient"
        " checkpointing, these are the inputs of the layers (no effect on a CPU)",
    )
    attn_implementation: Literal["auto", "sdpa", "eager"] = flag(
        "auto",
        "attention of scoring and training, in all models; generation has its own. auto: PyTorch's"
        " scaled dot product attention, for packed rows on a GPU its variable-length"
        " FlashAttention, and on a CPU a compiled kernel (fp32: up to 256 tokens); eager: products"
        " and a softmax",
    )
    zero_hpz_partition_size: int = positive(
        1,
        "ZeRO++: number of ranks, usually those of one machine, that together hold a second copy of"
        " the weights for the backward pass; 1 = off (needs ZeRO stage 3)",
    )
