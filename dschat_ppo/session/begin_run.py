"""What every step does before it loads a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dschat_ppo.checkpoint.config_diff import compare, report
from dschat_ppo.checkpoint.folder import CheckpointFolder
from dschat_ppo.checkpoint.metrics_copy import keep_aside, restore_metrics
from dschat_ppo.checkpoint.saved_config import CONFIG, read_config, write_config
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import remove_folder
from dschat_ppo.common.logging import logger, quiet_libraries, table
from dschat_ppo.common.seeding import choose_algorithms, seed_everything
from dschat_ppo.config.cli import flatten, notes
from dschat_ppo.config.safety_flags import AUTO, NEVER
from dschat_ppo.config.schema import RunFlags
from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.monitor.writers import METRICS, RESULT, is_finished
from dschat_ppo.runtime import watchdog
from dschat_ppo.runtime.process_group import init_process_group
from dschat_ppo.runtime.rank_log import keep_log
from dschat_ppo.session.run_lock import RunLock

_LOCKED: dict[Path, RunLock] = {}  # output folders of this process, until it ends


def begin(step: str, config: Any, run: RunFlags, models: list[str]) -> tuple[torch.device, Path]:
    """Join the ranks, lock the output folder and check it against the models that are read and against earlier runs,
    seed, and say what changes nothing.

    Returns:
        This rank's device and the output folder.

    Raises:
        UserError: another run writes to the folder, or it holds a model that is read or what an earlier run with other
            settings left; or the device lacks the number format.
        StopRequested: the folder holds the outputs of this very run; nothing is left to do.
    """
    folder = Path(run.folder)
    written = [(folder / part).resolve() for part in (".", "actor", "actor_ema", "critic", "best/actor", "best/critic")]
    if any(Path(model).expanduser().resolve() in written for model in models):
        raise UserError(f"--output_dir {folder} would be written over a model that is read; name another folder")
    quiet_libraries()
    is_ours = folder.resolve() in _LOCKED  # several steps may follow one another in one process
    if not is_ours:
        RunLock.look(folder)
    choose_algorithms(run.deterministic)
    device = init_process_group(run.folder)
    if not is_ours:
        _LOCKED[folder.resolve()] = RunLock.acquire(folder)
    keep_log(folder)
    watchdog.start(config.safety.collective_timeout)
    _look_at_earlier_outputs(folder, config, run)
    seed_everything(run.seed)
    _check_dtype(run.dtype)
    for line in notes(step, config):
        logger().info(f"note: {line}")
    return device, folder


def _look_at_earlier_outputs(folder: Path, config: Any, run: RunFlags) -> None:
    """What an earlier run left must be a state to go on from, or a beginning of the same run. Collective."""
    problem, done = dist.broadcast_object(_earlier_outputs(folder, config, run) if dist.is_main() else None)
    if problem:
        raise UserError(problem)
    if done:
        raise StopRequested(done)


def _earlier_outputs(folder: Path, config: Any, run: RunFlags) -> tuple[str | None, str | None]:
    """(why the run must not write there, or None; why there is nothing left to do, or None)."""
    for name in (METRICS, RESULT, CONFIG):
        if (folder / name).is_dir():
            return f"{folder / name} is a folder, but the run writes a file of that name; move it away", None
    try:
        CheckpointFolder(folder).clear_partials()  # first of all: it may put one back
        return _look_at_what_is_held(folder, config, run)
    except OSError as problem:
        return f"--output_dir {folder}: cannot be written ({problem.strerror})", None


def _look_at_what_is_held(folder: Path, config: Any, run: RunFlags) -> tuple[str | None, str | None]:
    """See `_earlier_outputs`.

    Raises:
        OSError: what has to be written or renamed cannot be.
    """
    held = [name for name in (RESULT, METRICS, "config.json") if (folder / name).exists()]
    held += [path.name for path in folder.glob("*.safetensors")] + CheckpointFolder(folder).names()
    if run.overwrite_output_dir or not held:
        return None, None
    resume, force = config.safety.resume, config.safety.resume_force
    refusal = f"--output_dir {folder} holds earlier outputs ({held[0]})"
    ways_out = "name another folder or add --overwrite_output_dir"
    if resume == NEVER or (resume != AUTO and not Path(resume).resolve().is_relative_to(folder.resolve())):
        return f"{refusal}; to resume there give --resume auto, else {ways_out}", None
    is_done = is_finished(folder)
    if CheckpointFolder(folder).names() and (not is_done or resume != AUTO or force):
        if RESULT in held and not is_done:
            logger().warning(f"{folder / RESULT} is damaged, so the run does not count as done")
        return None, None  # `choose` says whether it can be gone on from
    if RESULT in held and not is_done:
        return f"{folder / RESULT} is damaged, and there is no checkpoint to finish that run from; {ways_out}", None
    saved = read_config(folder)
    if saved is None:
        return f"{refusal}; {ways_out}", None
    changes = [change for change in compare(saved, flatten(config)) if change.matters]
    if changes:
        if CheckpointFolder(folder).names():  # of a finished run, as the others have been left to `choose`
            ways_out = f"add --resume_force to train on from its last checkpoint, or to start over {ways_out}"
        return f"{refusal} of a run with other settings:\n{report(changes)}\n{ways_out}", None
    if is_done:
        more = "raise --num_train_epochs and add --resume_force to train on; --overwrite_output_dir starts over"
        return None, f"{folder / RESULT} is there: this run is done ({more})"
    _keep_old_metrics(folder)
    return None, None


def _keep_old_metrics(folder: Path) -> None:
    """The earlier run ended before its first checkpoint: this one begins anew, and says so."""
    if not (folder / METRICS).exists():
        return
    kept = keep_aside(folder / METRICS)
    logger().warning(
        f"--output_dir {folder}: an earlier run with these settings ended before its first checkpoint; starting over "
        f"(its metrics are kept as {kept.name})"
    )


def open_outputs(folder: Path, config: Any, run: RunFlags, resumed: Path | None = None) -> None:
    """Make the output folder ready and save the resolved configuration. Collective.

    In a run that begins at the beginning what marks an earlier one is removed. In one that goes on `metrics.jsonl` is
    checked, see `restore_metrics`.

    Args:
        folder: of the outputs.
        config: of the step.
        run: its flags.
        resumed: the checkpoint in this folder that the run goes on from, or None.

    Raises:
        UserError: the folder cannot be written.
    """
    problem = dist.broadcast_object(_write_start(folder, config, run, resumed) if dist.is_main() else None)
    if problem:
        raise UserError(problem)


def _write_start(folder: Path, config: Any, run: RunFlags, resumed: Path | None) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if resumed is not None:
            restore_metrics(folder, resumed)
        elif run.overwrite_output_dir or (folder / CONFIG).exists():  # else it is no run's of ours
            _remove_earlier(folder, run)
        (folder / RESULT).unlink(missing_ok=True)  # not before: it tells that what is removed is of a finished run
        write_config(config, folder)
    except OSError as problem:
        return f"--output_dir {folder}: cannot be written ({problem.strerror or problem})"
    return None


def _remove_earlier(folder: Path, run: RunFlags) -> None:
    """What an earlier run left and this one may not write over: answers of evaluations, models that only some runs
    make, checkpoints, dumps and TensorBoard files."""
    if saved := CheckpointFolder(folder).names():
        logger().warning(f"--output_dir {folder}: checkpoints of an earlier run are removed ({', '.join(saved)})")
    for answers in (folder / "eval").glob("step_*.jsonl"):
        answers.unlink()
    parts = ["best", "best.old", "best.partial", "checkpoints", "nonfinite"]
    for part in [*parts, "actor_ema", "critic"] if run.overwrite_output_dir else parts:
        if (folder / part).is_dir():
            remove_folder(folder / part)
    board = run.tensorboard_folder
    if board.resolve().is_relative_to(folder.resolve()):  # a board elsewhere may hold other runs
        for events in board.glob("events.out.tfevents.*"):
            events.unlink()


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """A `UserError` from inside gets the flag's name in front, and a hint where a score head is at fault."""
    try:
        yield
    except UserError as problem:
        hint = " (are actor and critic swapped?)" if "score.weight" in str(problem) else ""
        raise UserError(f"{flag} {problem}{hint}") from problem.__cause__


def _check_dtype(dtype: str) -> None:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    supported = {
        "bf16": accelerator.is_bf16_supported(),
        "fp16": accelerator.is_fp16_supported(),
        "fp32": True,
    }
    if not supported[dtype]:
        usable = ", ".join(name for name, usable in supported.items() if usable)
        raise UserError(f"--dtype {dtype}: this {accelerator.device_name()} does not support it; use one of {usable}")


def tensorboard_folder(run: RunFlags) -> Path | None:
    """Where TensorBoard files go, or None if they were not asked for."""
    return run.tensorboard_folder if run.enable_tensorboard else None


def show_plan(title: str, rows: list[tuple[str, str]], warmup_steps: int, total_steps: int) -> None:
    """Print the batch table; warn if the learning rate would never reach its peak."""
    logger().info(table(title, rows))
    if warmup_steps >= total_steps:
        logger().warning(
            f"--num_warmup_steps {warmup_steps} is not below the {total_steps} optimizer steps in all: the learning "
            "rate never reaches its peak"
        )
