"""One run from its start to the end of its training: locked folder, ranks, checkpoint to resume
from, metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from dschat_ppo.checkpoint.identity import (
    RunIdentity,
    RunInputs,
    find_checkpoint,
    identify_run,
    lies_in_output,
)
from dschat_ppo.checkpoint.manager import CheckpointManager, Resumable, restore
from dschat_ppo.checkpoint.store import CheckpointFolder, Manifest, checkpoint_name
from dschat_ppo.common import dist, stop_requests
from dschat_ppo.common.logging import logger, quiet_libraries
from dschat_ppo.common.paths import VALIDATION, shown_path
from dschat_ppo.common.seeding import seed_everything, set_deterministic
from dschat_ppo.config.run_flags import AUTO, NEVER, RunFlags
from dschat_ppo.config.step_config import StepConfig, flatten
from dschat_ppo.cpu_kernels.operations import kernels
from dschat_ppo.errors import StopRequested, UserError, counted, nearest_path
from dschat_ppo.features import hooks
from dschat_ppo.models.loading import DTYPES
from dschat_ppo.monitor.step_trace import StepTrace
from dschat_ppo.monitor.trackers import Tracking, check_own_tracker, require_trackers
from dschat_ppo.monitor.writers import MetricsWriter, record_start
from dschat_ppo.run import watchdog
from dschat_ppo.run.output_folder import (
    check_earlier_outputs,
    check_shared_folder,
    lock_folder,
    prepare_output_folder,
    refuse_model_folders,
    writing,
)
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.run.rank_log import open_log


def join_ranks(config: StepConfig) -> None:
    """Lock the output folder and join the ranks. Collective. `--dry_run` touches no folder, and
    joins no ranks unless they measure (`--measure`)."""
    run = config.run
    folder = folder_of(config)
    refuse_model_folders(folder, [name for _, name in config.models.values()])
    quiet_libraries()
    for check_ranks in hooks("refusals.check_ranks"):
        check_ranks(config, dist.world_size())
    if run.only_checks:
        return
    set_deterministic(run.deterministic)  # before anything runs on a GPU
    if not run.measure:
        lock_folder(folder)
    init_process_group(run.folder)
    for begin_rank in hooks("runs.begin_rank"):  # of features, before anything is computed
        begin_rank(config)
    watchdog.start(config.safety.collective_timeout)
    dist.share_rows(config.ranks_of_row)
    if not run.measure:
        check_shared_folder(folder)
        open_log(folder)


def folder_of(config: StepConfig) -> Path:
    """The folder that a run writes to. If it trains nothing, that is one inside `--output_dir`, in
    place of an earlier validation."""
    folder = Path(config.run.folder)
    if config.validate_only:
        return folder / VALIDATION
    return folder


def begin_run(
    config: StepConfig, check: Callable[[], None] = lambda: None
) -> tuple[torch.device, Path]:
    """Begin a run after `join_ranks`, with a number format in place of `--dtype auto`: compare the
    output folder with the flags, seed the random numbers, and check that the device has the number
    format. Collective.

    The folder of a training run is only checked here; `open_session` prepares it, which knows the
    checkpoint. That of `--validate_only`, which has no checkpoint, is prepared at once. With
    `--dry_run` the folder is not looked at, and without `--measure` nothing but `check` runs.

    Args:
        config: the flags.
        check: every rank calls it first, to check flags of the step. Later, a mistake in a flag
            would be reported as a setting that differs from that of the earlier run in the folder.

    Returns:
        This rank's device and the output folder.

    Raises:
        StopRequested: the same run has finished in the folder.
        UserError: the folder, a flag or the number format cannot be used.
    """
    run = config.run
    folder = folder_of(config)

    def check_folder() -> None:
        with writing(folder):
            if config.validate_only:
                prepare_output_folder(folder, config)
            else:
                check_earlier_outputs(folder, config)

    check()
    if not config.validate_only:
        for name in run.tracker:
            dist.on_main(partial(check_own_tracker, name))
    if not run.dry_run:
        dist.on_main(check_folder)
        if not config.validate_only:
            dist.on_main(lambda: require_trackers(run.trackers))
            # checks of features, outside of this machine too; collective
            for begin_training in hooks("runs.begin_training"):
                begin_training(config)
    if not run.only_checks:
        seed_everything(run.seed)
        _check_dtype(run.dtype)
    return dist.device(), folder


def end_dry_run(run: RunFlags, resume: str, steps: int | None) -> None:
    """End a run with `--dry_run` (`StopRequested`), after its last checks, unless it measures;
    `steps` None: nothing is trained."""
    if steps is not None and run.profile is not None and run.profile > steps:
        raise UserError(f"--profile {run.profile}: this run has {steps} steps; name one of them")
    if run.measure and steps is None:
        raise UserError("--measure measures a step of training: omit --validate_only")
    if run.dry_run:
        if resume not in (AUTO, NEVER) and not os.path.isdir(resume):
            raise UserError(f"--resume {resume}: there is no such folder{nearest_path(resume)}")
    if run.only_checks:
        raise StopRequested(
            f"dry run for {counted(dist.world_size(), 'rank')}: flags, models and data are valid;"
            f" no weight was read, and nothing was written to {run.folder}"
        )


def end_measured_run(run: RunFlags, measured: str) -> NoReturn:
    """Log what a run with `--measure` has measured, and end it (`StopRequested`)."""
    logger().info(measured)
    raise StopRequested(
        f"dry run for {counted(dist.world_size(), 'rank')}: flags, models and data are valid;"
        f" nothing was written to {run.folder}"
    )


def _check_dtype(dtype: str) -> None:
    """Check that this device computes in the number format, and warn if it does so slowly. On a CPU
    compile the kernels of the format."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    usable = []
    if accelerator.is_bf16_supported():
        usable.append("bf16")
    if accelerator.is_fp16_supported():
        usable.append("fp16")
    usable.append("fp32")
    if dtype not in usable:
        raise UserError(
            f"--dtype {dtype}: this {accelerator.device_name()} does not support it; use one of"
            f" {', '.join(usable)}"
        )
    # compiled here, so that no rank waits for another in a forward pass
    if not dist.on_gpu() and dtype != "fp16":
        kernels(DTYPES[dtype])
    if dtype != "bf16":
        return
    if dist.on_gpu():
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            logger().warning(
                f"--dtype bf16: {torch.cuda.get_device_name()} has no bf16 arithmetic, and torch"
                " emulates it slowly; use --dtype fp16"
            )
        return
    mkldnn = torch.backends.mkldnn
    if not (mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        logger().warning(
            "--dtype bf16: this processor has no bf16 arithmetic (AVX-512 or AMX), and torch"
            " emulates it slowly; --dtype fp32 is several times as fast"
        )


def open_session(
    output: Path, config: StepConfig, inputs: RunInputs, derived: dict[str, int], steps: int
) -> Session:
    """Find the checkpoint to resume from, and prepare the locked output folder. Collective; before
    any model is loaded. `derived`: batch sizes, see `checkpoint.identity.PRODUCTS`; `steps`:
    planned ones, in step 3 PPO steps."""
    _raise_if_any_rank_is_to_stop()
    identity = identify_run(config, inputs, derived)
    overwrite = config.run.overwrite_output_dir
    checkpoint = dist.on_main(lambda: find_checkpoint(output, config.safety, identity, overwrite))
    if checkpoint is not None:
        saved = Manifest.read(checkpoint)
        if saved.step > steps or (saved.step == steps and saved.update > 0):
            raise UserError(
                f"{checkpoint} is beyond the end of this run, which has {steps} steps: raise"
                " --num_train_epochs or --max_steps, or name an earlier checkpoint by --resume"
            )
        profiled = config.run.profile
        if profiled is not None and profiled <= saved.step:
            logger().info(
                f"note: --profile {profiled} has no effect: {checkpoint} is beyond that step"
            )
    resumed = None
    if checkpoint is not None and lies_in_output(checkpoint, output):
        resumed = checkpoint

    def prepare_folder() -> None:
        with writing(output):
            prepare_output_folder(output, config, resumed)

    dist.on_main(prepare_folder)
    return Session(output, identity, config, checkpoint)


@dataclass(frozen=True)
class Session:
    """A run in its output folder. `checkpoint`: the folder of the checkpoint from which it resumes,
    or None."""

    output: Path
    identity: RunIdentity
    config: StepConfig
    checkpoint: Path | None

    @property
    def trace(self) -> StepTrace:
        return StepTrace(self.output, self.config.run.profile)

    @contextmanager
    def training(self, trainer: Resumable) -> Iterator[tuple[MetricsWriter, CheckpointManager]]:
        """Restore the trainer if the run resumes; inside the block it trains, with metrics and
        checkpoints. Collective. The end of the block saves the last checkpoint."""
        _raise_if_any_rank_is_to_stop()
        first_step = 1
        resumed = None
        saved = None
        if self.checkpoint is not None:
            manifest = restore(self.checkpoint, trainer, self.config.run.seed)
            logger().info(
                f"resuming from {shown_path(self.checkpoint)}: {manifest.step} steps are done"
            )
            metrics_offset = 0
            if lies_in_output(self.checkpoint, self.output):
                metrics_offset = manifest.metrics_offset
            first_step = manifest.step + 1
            resumed = (metrics_offset, first_step)
            name = checkpoint_name(manifest.step, manifest.update)
            this_runs = CheckpointFolder(self.output).root / name
            if self.checkpoint.resolve() == this_runs.resolve():
                saved = (manifest.step, manifest.update)
        if dist.is_main():
            record_start(self.output, first_step, dist.world_size())
        run = self.config.run
        safety = self.config.safety
        tracking = None
        if run.trackers:
            flags = flatten(self.config)
            tracking = Tracking(
                run.trackers, self.output, run.tensorboard_folder, run.project, run.run_name, flags
            )
        command = "the command again with --resume auto"
        if safety.resume == AUTO:
            command = "the same command again"
        with MetricsWriter(self.output, tracking, resumed) as metrics:
            checkpoints = CheckpointManager(
                self.output,
                trainer,
                safety,
                self.identity,
                metrics,
                saved=saved,
                how_to_resume=f"run {command} to resume",
            )
            yield metrics, checkpoints
            checkpoints.finish()


def _raise_if_any_rank_is_to_stop() -> None:
    """Before training there is nothing to save. Collective."""
    flag = torch.tensor([stop_requests.flag_is_set()], dtype=torch.int32, device=dist.device())
    if dist.all_reduce(flag, "max"):
        raise StopRequested("stopped as asked before training began; run the same command again")


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Prefix a `UserError` of the block with the flag, unless it names another, and add a hint
    about score heads."""
    try:
        yield
    except UserError as problem:
        hint = ""
        if "score.weight" in str(problem):
            hint = " (are actor and critic swapped?)"
        prefix = f"{flag} "
        if str(problem).startswith("--"):
            prefix = ""
        raise UserError(f"{prefix}{problem}{hint}") from problem.__cause__
