"""The start of every step, before it loads a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger, quiet_libraries, table
from dschat_ppo.common.phases import announce
from dschat_ppo.common.seeding import seed_everything, set_deterministic
from dschat_ppo.config.cli import notes
from dschat_ppo.config.memory_flags import check_sequence_parallel_size
from dschat_ppo.config.run_flags import AUTO, NEVER, RunFlags
from dschat_ppo.config.steps import PPOConfig, StepConfig
from dschat_ppo.cpu_kernels.library import kernels
from dschat_ppo.errors import StopRequested, UserError, counted, nearest_path
from dschat_ppo.monitor.trackers import check_trackers
from dschat_ppo.runtime import watchdog
from dschat_ppo.runtime.op_builds import load_operator
from dschat_ppo.runtime.process_group import init_process_group
from dschat_ppo.runtime.rank_log import open_log
from dschat_ppo.session.output_folder import (
    check_earlier_outputs,
    check_shared_folder,
    lock_folder,
    prepare_output_folder,
    refuse_model_folders,
    refuse_pipes,
)
from dschat_ppo.session.start_and_end import VALIDATION

FEW_STEPS, FEW_EVAL_ROWS = 20, 8  # fewer are warned of


def begin_run(
    step: str, config: StepConfig, models: list[str], validate_only: bool = False,
    check: Callable[[], None] = lambda: None,
) -> tuple[torch.device, Path]:  # fmt: skip
    """Lock the output folder, join the ranks, check the folder, seed, and print notes on flags without effect; returns
    this rank's device and the output folder. Collective. `StopRequested`: the same run has finished in the folder.

    With `--dry_run`, only check flags and print notes: no ranks are joined, and the output folder is not touched.

    Args:
        models: the models that it reads.
        validate_only: the run trains nothing and writes to a folder inside `--output_dir`, whatever training left in
            the latter; it replaces what an earlier validation wrote.
        check: checks flags of the step; it is called before the folder is compared with the configuration, so that a
            mistake in a flag is not reported as a setting that has changed.
    """
    run, memory = config.run, config.memory
    folder = Path(run.folder) / VALIDATION if validate_only else Path(run.folder)
    refuse_model_folders(folder, models)
    refuse_pipes(Path(run.folder))
    quiet_libraries()
    check_sequence_parallel_size(memory, dist.world_size())
    if run.dry_run:
        check()
    else:
        _join(config, folder, validate_only, check)
    for line in notes(step, config):
        logger().info(f"note: {line}")
    return dist.device(), folder


def _join(config: StepConfig, folder: Path, validate_only: bool, check: Callable[[], None]) -> None:
    """See `begin_run`. Collective."""
    run, memory = config.run, config.memory
    set_deterministic(run.deterministic)  # before anything runs on a GPU
    lock_folder(folder)
    init_process_group(run.folder)
    watchdog.start(config.safety.collective_timeout)
    dist.share_rows(memory.sequence_parallel_size)
    check_shared_folder(folder)
    open_log(folder)
    check()
    if validate_only:
        prepare_output_folder(folder, config, run)
    else:
        check_earlier_outputs(folder, config, run)
        dist.on_main(lambda: check_trackers(run.trackers))
    seed_everything(run.seed)
    _check_dtype(run.dtype)
    offloads = config.ppo.offload if isinstance(config, PPOConfig) else config.fit.offload
    if memory.offload_optimizer or offloads:
        announce("load operators")
        load_operator("CPUAdamBuilder")  # fails here where it cannot be compiled, before models are loaded


def end_dry_run(run: RunFlags, resume: str, steps: int | None) -> None:
    """End a run with `--dry_run` (`StopRequested`), after its last checks; `steps` None: nothing is trained."""
    if steps is not None and run.profile is not None and run.profile > steps:
        raise UserError(f"--profile {run.profile}: this run has {steps} steps; name one of them")
    if run.dry_run:
        if resume not in (AUTO, NEVER) and not os.path.isdir(resume):
            raise UserError(f"--resume {resume}: there is no such folder{nearest_path(resume)}")
        raise StopRequested(
            f"dry run for {counted(dist.world_size(), 'rank')}: flags, models and data are valid; no weight was "
            f"read, and nothing was written to {run.folder}"
        )


def _check_dtype(dtype: str) -> None:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    usable = ["bf16"] * accelerator.is_bf16_supported() + ["fp16"] * accelerator.is_fp16_supported() + ["fp32"]
    if dtype not in usable:
        raise UserError(
            f"--dtype {dtype}: this {accelerator.device_name()} does not support it; use one of {', '.join(usable)}"
        )
    if dtype == "bf16" and not dist.on_gpu():
        kernels()  # compiled here, so that no rank waits for another in a forward pass
    elif dtype == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        logger().warning(
            f"--dtype bf16: {torch.cuda.get_device_name()} has no bf16 arithmetic, and torch emulates it slowly; "
            "use --dtype fp16"
        )


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Prefix a `UserError` of the block with the flag, unless it names another, and add a hint about score heads."""
    try:
        yield
    except UserError as problem:
        hint = " (are actor and critic swapped?)" if "score.weight" in str(problem) else ""
        prefix = "" if str(problem).startswith("--") else f"{flag} "
        raise UserError(f"{prefix}{problem}{hint}") from problem.__cause__


def show_plan(title: str, rows: list[tuple[str, str]], *warmups: tuple[int, int]) -> None:
    """Log the table of batch sizes; warn of each (warm-up steps, optimizer steps) whose rate would never peak."""
    logger().info(table(title, rows))
    for warmup, total in warmups:
        if warmup >= total:
            compared = "longer than" if warmup > total else "as long as"
            logger().warning(
                f"the warm-up ({warmup} steps) is {compared} the run ({total} optimizer steps): the learning "
                "rate never reaches its peak (--num_warmup_steps, --warmup_ratio)"
            )


def warn_of_little_data(steps: int | None, eval_rows: int | None) -> None:
    """Warn of a run that is too short to train a model, or whose evaluation has too few rows to tell how well. None: a
    flag ends the run early, as in a trial; there is no evaluation, or a flag takes a few of its rows."""
    few = [counted(steps, "optimizer step")] if steps is not None and steps < FEW_STEPS else []
    if steps is not None and eval_rows is not None and eval_rows < FEW_EVAL_ROWS:
        few.append(counted(eval_rows, "evaluation row"))
    if few:
        logger().warning(
            f"this step has only {' and '.join(few)}, usually too few to train or to judge a model: "
            "use more data, a larger share of it (--data_split) or more passes (--num_train_epochs)"
        )
