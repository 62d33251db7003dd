"""The output folder of a run: lock it, check what an earlier run left there, prepare it for this
run, remove the checkpoints of a finished run, unless `--keep_final_checkpoint` is given, and keep
models while the run trains: `hf/step_N/` every so many steps, and `best/`."""

from __future__ import annotations

import fcntl
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from dschat_ppo.checkpoint.identity import differences, format_diff, lies_in_output
from dschat_ppo.checkpoint.store import CheckpointFolder, Manifest, checkpoint_name, damage
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import (
    OLD,
    PARTIAL,
    make_folder,
    remove_folder,
    replace_folder,
    storage_errors,
    sync_entries,
    write_file,
)
from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import (
    CONFIG,
    HEALTH,
    LOCK,
    METRICS,
    PPO_ROLES,
    REPORT,
    RESULT,
    SAMPLES,
    STARTS,
    shown_path,
)
from dschat_ppo.config.run_flags import AUTO, NEVER, RunFlags
from dschat_ppo.config.step_config import StepConfig, defaults_of, flatten
from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.features import hooks
from dschat_ppo.models.model_folders import CONFIG_FILES, is_model_folder, named_base
from dschat_ppo.models.weight_headers import checkpoint_shapes
from dschat_ppo.monitor.step_trace import FOLDER as TRACES
from dschat_ppo.monitor.trackers import RUN_IDS
from dschat_ppo.monitor.writers import is_finished, write_config

BEST = "best"
HF = "hf"


def refuse_model_folders(folder: Path, models: list[str]) -> None:
    """Refuse an output folder to which the run would write over a model that it reads, or over
    its base."""
    read = [os.path.expanduser(model) for model in models]
    for folder_or_name in tuple(read):
        base = named_base(folder_or_name, "model")
        if base is not None:
            read.append(base)
    written = [(folder / name).resolve() for name in (".", *PPO_ROLES)]
    replaced = [(folder / name).resolve() for name in (BEST, HF)]  # with everything in them
    for model in read:
        path = Path(model).resolve()
        if path in written or any(path.is_relative_to(parent) for parent in replaced):
            raise UserError(
                f"--output_dir {folder} would be written over a model that is read; name another"
                " folder"
            )


# output folder -> file descriptor of `.lock` in it, which a lock of `lockf` is on
_LOCKS: dict[Path, int] = {}


def lock_folder(folder: Path) -> None:
    """On rank 0: lock `folder`, and make it if it does not exist, until this process ends, however
    it ends.

    `UserError` if another run holds the lock. Call it before the ranks join: a second run of the
    same command has the same port, and would report only that. Several steps may run one after
    another in one process, which keeps the locks; its children do not inherit them. Whatever else
    in it opens and closes `.lock` would release the lock.
    """
    if not dist.is_main() or folder.resolve() in _LOCKS:
        return
    with writing(folder):
        make_folder(folder)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both
        holder = os.read(descriptor, 1000).decode(errors="replace").strip()
        os.close(descriptor)
        if holder:
            holder = f" ({holder})"
        raise UserError(
            f"--output_dir {folder} is being written by another run{holder}; wait for it, stop it,"
            " or name another folder"
        ) from None
    except OSError:
        os.close(descriptor)
        logger().warning(
            f"--output_dir {folder}: its file system has no locks, so a second run is not kept out"
        )
        return
    _LOCKS[folder.resolve()] = descriptor
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    holder = f"pid {os.getpid()} on host {socket.gethostname()}; since {since}"
    with suppress(OSError):  # a full disk; the text is for a second run's message alone
        os.ftruncate(descriptor, 0)
        os.write(descriptor, holder.encode())


def check_shared_folder(folder: Path) -> None:
    """Check that the machines share the output folder: rank 0 writes a file in it, and the others
    look for it. Collective; nothing on one machine."""
    if dist.machines() == 1:
        return
    # new: no machine remembers its absence
    path = folder / dist.broadcast_object(f".shared_{uuid.uuid4().hex}")

    def write_empty_file() -> None:
        with writing(folder):
            path.touch()

    dist.on_main(write_empty_file)
    unaware_host = None
    if not path.exists():
        unaware_host = os.uname().nodename
    unaware_hosts = sorted(set(filter(None, dist.gather_objects(unaware_host))))
    if dist.is_main():
        path.unlink()
    if unaware_hosts:
        raise UserError(
            f"--output_dir {folder}: machine {unaware_hosts[0]} does not see what the first machine"
            " writes there: name a folder that all machines share"
        )


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an `OSError` of the block into a `UserError`."""
    try:
        yield
    except OSError as problem:
        raise UserError(
            f"--output_dir {folder}: cannot be written ({problem.strerror or problem})"
        ) from problem


def check_earlier_outputs(folder: Path, config: StepConfig) -> None:
    """Accept in the output folder only outputs from which this run may resume, or of the same run
    before its first checkpoint, whose metrics get another name. `StopRequested` if the same run has
    finished there; nothing is left to do. Where there is a checkpoint to resume from,
    `find_checkpoint` decides. Files and checkpoints that were not finished are removed. On rank
    0."""
    store = CheckpointFolder(folder)
    store.clear_partials()
    clear_partials(folder)
    checkpoints = store.names()
    outputs = [name for name in (RESULT, METRICS, *CONFIG_FILES) if (folder / name).exists()]
    outputs += [path.name for path in folder.glob("*.safetensors")] + checkpoints
    if config.run.overwrite_output_dir or not outputs:
        return
    resume = config.safety.resume
    is_done = is_finished(folder)
    refusal = f"--output_dir {folder} holds earlier outputs ({outputs[0]})"
    ways_out = "name another folder or add --overwrite_output_dir"
    if resume == NEVER or (resume != AUTO and not lies_in_output(Path(resume), folder)):
        raise UserError(f"{refusal}; to resume there give --resume auto, else {ways_out}")
    if resume != AUTO or (checkpoints and (not is_done or config.safety.resume_force)):
        return
    saved = read_config(folder)
    if saved is None:
        raise UserError(f"{refusal} and no readable {CONFIG}; {ways_out}")
    if not is_done:
        if outputs != [METRICS]:
            raise UserError(f"{refusal} and no checkpoint to resume from; {ways_out}")
        _, complaints = store.newest_intact()
        if complaints:  # its checkpoints were removed by hand, or set aside
            return
        old_metrics = keep_old_metrics(folder / METRICS)
        logger().warning(
            f"--output_dir {folder}: an earlier run ended before its first checkpoint; starting"
            f" over (its metrics are kept as {old_metrics.name})"
        )
        return
    changes = differences(saved, flatten(config), defaults_of(type(config)))
    if not changes:
        raise StopRequested(_message_of_a_done_run(folder, config, saved))
    if not checkpoints:
        raise UserError(
            f"{refusal} of a finished run with other settings, and no checkpoint to continue from "
            f"(--keep_final_checkpoint); {ways_out}. What changed:\n{format_diff(changes)}"
        )


def earlier_dtype(config: StepConfig) -> tuple[str, str] | None:
    """(number format, where it is from) of the run that this one continues, or that has finished in
    its folder; None: it starts from scratch, or `find_checkpoint` will refuse it. On rank 0."""
    folder = Path(config.run.folder)
    resume = config.safety.resume
    if config.validate_only or resume == NEVER:
        return None
    if resume != AUTO:
        checkpoints = [Path(resume)]
    elif is_finished(folder):
        if config.run.overwrite_output_dir:
            return None
        saved = read_config(folder)
        if saved is None or "dtype" not in saved:
            return None
        return saved["dtype"], f"as the run in {folder}"
    else:
        store = CheckpointFolder(folder)
        checkpoints = [store.root / name for name in reversed(store.names())]
    for checkpoint in checkpoints:
        if damage(checkpoint, checksums=False) is None:
            return str(Manifest.read(checkpoint).config["dtype"]), f"as in {checkpoint.name}"
    return None


def read_config(folder: Path) -> dict[str, Any] | None:
    """The flags of the earlier run in an output folder, by name; None if `config.yaml` cannot be
    read."""
    try:
        saved = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # ValueError: not UTF-8, or an invalid date
        return None
    if isinstance(saved, dict):
        return saved
    return None


def _message_of_a_done_run(folder: Path, config: StepConfig, saved: dict[str, Any]) -> str:
    """Why nothing is left to do in the folder of a finished run of these settings. Removes what a
    crash left of the removal of its checkpoints."""
    advice = "to train longer, start another run from its model; --overwrite_output_dir starts over"
    is_kept = config.safety.keep_final_checkpoint or saved.get("keep_final_checkpoint") is not False
    store = CheckpointFolder(folder)
    if is_kept and store.names():
        advice = (
            "to train longer, raise --num_train_epochs or --max_steps, and add --resume_force if"
            " the learning rate depends on the length; --overwrite_output_dir starts over"
        )
    elif not is_kept and store.removable() and not remove_checkpoints(folder):
        advice = (
            "but a saved model cannot be read: add --resume_force to save it again from the last"
            " checkpoint"
        )
    # a feature says what it would have done at the end of the run, or ""
    advice += "".join(
        advice_when_done(config) for advice_when_done in hooks("runs.advice_when_done")
    )
    return f"{folder / RESULT} is there: this run is done ({advice})"


def prepare_output_folder(folder: Path, config: StepConfig, resumed: Path | None = None) -> None:
    """Prepare the output folder and save the resolved configuration. On rank 0. A run that starts
    from scratch removes the outputs of an earlier run; one that resumes, from the checkpoint
    `resumed` in this folder, restores its metrics.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if resumed is not None:
        restore_metrics(folder, resumed)
    elif config.run.overwrite_output_dir or (folder / CONFIG).exists():
        # without both, another program made what the folder holds
        remove_earlier_outputs(folder, config.run)
    # last: it marks the outputs above as those of a finished run
    (folder / RESULT).unlink(missing_ok=True)
    write_config(flatten(config), folder)


def restore_metrics(output: Path, checkpoint: Path) -> None:
    """Make `metrics.jsonl` begin with the lines that it had when the checkpoint was saved; a file
    with other lines is kept under another name. `MetricsWriter` cuts off what follows them, since
    these steps are repeated."""
    path = output / METRICS
    saved = _bytes_of(checkpoint / METRICS)
    content = _bytes_of(path)
    if content.startswith(saved):
        return
    old_file = ""
    if content:
        old_file = f", and the old file is kept as {keep_old_metrics(path).name}"
    write_file(path, saved)
    logger().warning(
        f"{path} is not as the run wrote it: it is restored from checkpoint"
        f" {checkpoint.name}{old_file}"
    )


def _bytes_of(file: Path) -> bytes:
    """The content of a file; empty if there is none."""
    if file.exists():
        return file.read_bytes()
    return b""


def keep_old_metrics(path: Path) -> Path:
    """Rename `metrics.jsonl` to the first free `metrics.N.jsonl` in its folder; return that
    path."""
    names = (path.with_name(f"metrics.{index}.jsonl") for index in count(1))
    free_name = next(name for name in names if not name.exists())
    path.rename(free_name)
    sync_entries(path.parent)
    return free_name


def remove_earlier_outputs(folder: Path, run: RunFlags) -> None:
    """Remove the outputs of an earlier run that this run would not write over."""
    checkpoints = ", ".join(CheckpointFolder(folder).names())
    if checkpoints:
        logger().warning(
            f"--output_dir {folder}: checkpoints of an earlier run are removed ({checkpoints})"
        )
    for responses in (folder / "eval").glob("step_*.jsonl"):
        responses.unlink()
    for file in (STARTS, REPORT, HEALTH, SAMPLES, RUN_IDS):
        (folder / file).unlink(missing_ok=True)
    names = [BEST, f"{BEST}{OLD}", f"{BEST}{PARTIAL}", HF, "checkpoints", "nonfinite", TRACES]
    if run.overwrite_output_dir:
        names += [role for role in PPO_ROLES if role != "actor"]  # which each run writes over
    for name in names:
        if (folder / name).is_dir():
            remove_folder(folder / name)
    board = run.tensorboard_folder
    # a TensorBoard folder elsewhere may hold other runs
    if board.resolve().is_relative_to(folder.resolve()):
        for events in board.glob("events.out.tfevents.*"):
            events.unlink()


def remove_checkpoints(output: Path) -> bool:
    """Remove the checkpoints of a run whose `result.json` is written, on rank 0. If the run ends in
    between, the same command removes the rest (`check_earlier_outputs`). They stay, and False is
    returned, if a saved model cannot be read: only they can give that model again."""
    models = [output]
    if not is_model_folder(output):  # step 3
        folders = [output / role for role in PPO_ROLES]
        models = [folder for folder in folders if folder.name == "actor" or folder.is_dir()]
    try:
        for model in models:
            if not checkpoint_shapes(str(model)):
                raise UserError(f"{model} holds no weights")
    except UserError as problem:  # or an incomplete file
        logger().warning(f"checkpoints are kept, because a saved model cannot be read: {problem}")
        return False
    try:
        with watchdog_paused():
            CheckpointFolder(output).remove_all()
    except OSError as problem:
        logger().warning(
            f"{output / 'checkpoints'} cannot be removed ({problem.strerror or problem})"
        )
    else:
        logger().info("checkpoints: removed (--keep_final_checkpoint keeps them, to train longer)")
    return True


@dataclass(frozen=True)
class KeptModels:
    """Writes the models of a run, whole or not at all; `StorageError` on every rank if they cannot
    be written."""

    output: Path  # `--output_dir`
    every: int  # `--save_hf_steps`; 0 = never
    keeps_best: bool  # whether `best/` is wanted
    save: Callable[[Path], object]  # writes the models as they are now to a new folder. Collective

    @property
    def best(self) -> Path:
        return self.output / BEST

    def is_due(self, step: int) -> bool:
        """Whether the models after `step` steps are kept in `hf/`."""
        return self.every > 0 and step % self.every == 0

    def save_step(self, step: int) -> None:
        """Keep the models after `step` steps; a folder that an interrupted run left is replaced.
        Collective."""
        folder = self.output / HF / checkpoint_name(step)
        self._replace(folder)
        logger().info(f"models of step {step}: saved to {shown_path(folder)}")

    def save_best(self) -> None:
        """Keep the models as the best ones, in place of those before. Collective."""
        self._replace(self.best)

    def _replace(self, folder: Path) -> None:
        # what a crash left of it, the start has removed
        partial = folder.with_name(f"{folder.name}{PARTIAL}")
        self.save(partial)
        dist.on_main(storage_errors(folder)(lambda: replace_folder(folder, partial)))


def best_is_lost(folder: Path, step: int) -> bool:
    """Whether a resumed run does not find in `folder` the models of `step`, its best so far: it had
    another `--output_dir`, or did not keep them. Collective."""
    is_lost = not dist.broadcast_object(folder.is_dir())
    if is_lost:
        logger().info(
            f"{folder} does not hold the models of step {step}, the best so far; looking for the"
            " best again"
        )
    return is_lost


def clear_partials(output: Path) -> None:
    """Remove what a crash left incomplete in `best/` and `hf/`; a folder that was being replaced
    gets its name back. Once at the start, on rank 0, with the lock held."""
    for folder in [*output.glob(f"{BEST}.*"), *(output / HF).glob("step_*.*")]:
        complete = folder.with_suffix("")
        if folder.suffix == OLD and not complete.exists():
            folder.rename(complete)
            sync_entries(folder.parent)
        elif folder.suffix in (OLD, PARTIAL):
            remove_folder(folder)
