"""The checkpoint manager: saves the state of a run when a checkpoint is due, and restores it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from dschat_ppo.checkpoint.engine_state import load_engine, rank_file, save_engine
from dschat_ppo.checkpoint.identity import RunIdentity
from dschat_ppo.checkpoint.state_files import BackgroundWriter, FileEntry, load_state
from dschat_ppo.checkpoint.store import CheckpointFolder, Manifest, checkpoint_name, describe_file
from dschat_ppo.common import dist, stop_requests
from dschat_ppo.common.atomic_files import storage_errors, write_file
from dschat_ppo.common.dist import on_gpu
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import METRICS, shown_path
from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.config.run_flags import SafetyFlags
from dschat_ppo.errors import StopRequested, StorageError, UnhealthyRun, counted
from dschat_ppo.models.saving import require_finite_weights
from dschat_ppo.monitor.writers import MetricsWriter, package_versions
from dschat_ppo.types import Engine

Result = TypeVar("Result")

SHARED = "shared.pt"


@dataclass(frozen=True)
class RankStates:
    """The `rank_state` of each rank of the saved run; the files may be large.

    `this_rank`: of this rank; None if the run was saved on another number of ranks. `read_all`
    reads those of all ranks that saved, from rank 0 on, one at a time, so that the ranks of now can
    divide them again.
    """

    this_rank: dict[str, Any] | None
    read_all: Callable[[], Iterator[dict[str, Any]]]


def load_saved(flag: str, state: Any, load: Callable[[Any], object]) -> None:
    """Restore a part of a trainer that is on now, by `flag`. If it was off when the checkpoint was
    saved (`--resume_force`), the state is None or empty: the part stays as it was built, and a line
    is logged."""
    if state:
        load(state)
    else:
        log_starts_from_scratch(flag)


def log_starts_from_scratch(flag: str) -> None:
    """Log that the checkpoint holds no state of the part that this flag enables."""
    logger().info(f"{flag}: was off when the checkpoint was saved, so it starts from scratch")


class Resumable(Protocol):
    """A trainer whose state is saved between two optimizer steps."""

    @property
    def engines_to_save(self) -> Mapping[str, Engine]:
        """Role -> DeepSpeed engine that trains."""

    @property
    def position(self) -> tuple[int, int]:
        """Steps done, and updates done of the step in progress (0 between two steps)."""

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation, at this position, is the best so far."""

    def shared_state(self) -> dict[str, Any]:
        """The state that is equal on all ranks: nested dicts and lists of tensors, texts and
        numbers."""

    def rank_state(self) -> dict[str, Any]:
        """The state of this rank, in the same form."""

    def load_state(self, shared: dict[str, Any], ranks: RankStates) -> None:
        """Load `shared_state` of rank 0 of the saved run, and `rank_state` of its ranks."""


def restore(folder: Path, trainer: Resumable, seed: int) -> Manifest:
    """Restore the state in an intact checkpoint folder into a freshly built trainer. Collective.
    With the ranks, ZeRO stages and dtype of the checkpoint, the run continues bit for bit (on a
    GPU: with `--deterministic`). With different ones it reads the data in the same order, but its
    numbers differ by rounding, and its dropout masks differ."""
    manifest = Manifest.read(folder)
    now = package_versions()
    changed = [
        f"{name} {before} -> {now.get(name)}"
        for name, before in manifest.versions.items()
        if before != now.get(name)
    ]
    if changed:
        logger().info(f"versions that changed since the checkpoint was saved: {', '.join(changed)}")
    if manifest.world_size != dist.world_size():
        saved_by = counted(manifest.world_size, "rank")
        logger().info(
            f"the checkpoint of {saved_by} is resharded for {counted(dist.world_size(), 'rank')}"
        )
    for role, engine in trainer.engines_to_save.items():
        if (folder / role).is_dir():
            load_engine(engine, folder / role)
        else:
            logger().info(
                f"{role}: was not trained when the checkpoint was saved, so it starts from scratch"
            )
    files = [folder / rank_file(rank) for rank in range(manifest.world_size)]
    rank_state = None
    if len(files) == dist.world_size():
        rank_state = load_state(files[dist.rank()], mapped=True)
    ranks = RankStates(rank_state, lambda: (load_state(file, mapped=True) for file in files))
    trainer.load_state(load_state(folder / SHARED), ranks)
    if rank_state is not None:
        restore_rng_state(rank_state["random"])
    else:
        seed_this_rank(seed + manifest.step)
    return manifest


class CheckpointManager:
    """Saves checkpoints while training continues. `saved` is the position of the checkpoint in this
    folder from which the run resumes, or None; `how_to_resume` is for the message of a stop. The
    methods are collective.

    The files of a checkpoint are written in the background. At a later call of `save_if_due`, when
    every rank has written its files, the checkpoint is committed: it gets its name, and `latest`
    names it.
    """

    def __init__(
        self,
        output: Path,
        trainer: Resumable,
        flags: SafetyFlags,
        identity: RunIdentity,
        metrics: MetricsWriter,
        saved: tuple[int, int] | None = None,
        how_to_resume: str = "run the same command again to resume",
    ):
        self._folder = CheckpointFolder(output)
        self._trainer = trainer
        self._flags = flags
        self._identity = identity
        self._metrics = metrics
        self._how_to_resume = how_to_resume
        self._files = BackgroundWriter()
        # of a checkpoint that is written in the background, not committed
        self._pending: Manifest | None = None
        self._saved = saved
        self._saved_at = time.monotonic()  # of the newest checkpoint, or of the start

    def save_if_due(self) -> None:
        """Save a checkpoint if one is due. If a stop was requested, save the state and raise
        `StopRequested`. The trainer calls it where its state can be saved."""
        is_asked_to_stop, is_due, is_writing = self._any(
            [
                stop_requests.requested(),
                dist.is_main() and self._is_due(),
                not self._files.done(),
            ]
        )
        if self._pending is not None and not is_writing:
            self._commit()
        if is_asked_to_stop:
            raise StopRequested(
                f"stopped as asked, saved as {self._save_now()}; {self._how_to_resume}"
            )
        if is_due:
            self._save()

    def stop_requested(self) -> bool:
        """Whether a stop was requested on any rank."""
        return self._any([stop_requests.requested()])[0]

    def stop_if(self, reason: str | None) -> None:
        """Save a checkpoint and end the run by `UnhealthyRun` if rank 0 has a reason."""
        reason = dist.broadcast_object(reason)
        if reason is not None:
            raise UnhealthyRun(f"{reason} (saved as {self._save_now()}; {self._how_to_resume})")

    def finish(self) -> None:
        """Save the current state, unless it is saved already, and wait until it is on the disk."""
        if self._saved != self._trainer.position:
            self._save()
        if self._pending is not None:
            self._commit()

    def _save_now(self) -> str:
        """`finish`; returns the path of the checkpoint, for a message."""
        self.finish()
        return shown_path(self._folder.root / checkpoint_name(*self._trainer.position))

    def _any(self, conditions: list[bool]) -> list[bool]:
        """Whether each of this rank's conditions holds on any rank."""
        holds_here = torch.tensor(conditions, dtype=torch.int32, device=dist.device())
        holds_anywhere = dist.all_reduce(holds_here, "max")
        return [bool(flag) for flag in holds_anywhere.tolist()]

    def _is_due(self) -> bool:
        """Whether a checkpoint is due by `--save_steps` or `--save_minutes`."""
        step, update = self._trainer.position
        every = self._flags.save_steps
        minutes = self._flags.save_minutes
        by_count = every > 0 and update == 0 and step % every == 0
        by_time = minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes
        return self._saved != (step, update) and (by_count or by_time)

    def _save(self) -> None:
        """Commit the previous checkpoint, then copy the state and start to write it. Collective. If
        a weight is not finite, it raises `NonFiniteError`, and the previous checkpoint remains the
        newest."""
        if self._pending is not None:
            self._commit()
        started = time.perf_counter()
        trainer = self._trainer
        for role, engine in trainer.engines_to_save.items():
            require_finite_weights(role, engine)
        step, update = trainer.position
        name = checkpoint_name(step, update)
        folder = self._on_main(lambda: self._folder.make_partial(name, trainer.engines_to_save))
        for role, engine in trainer.engines_to_save.items():
            save_engine(engine, folder / role, self._files)
        rank_state = {"random": capture_rng_state(), **trainer.rank_state()}
        self._files.save(rank_state, folder / rank_file(dist.rank()))
        if dist.is_main():
            self._files.save(trainer.shared_state(), folder / SHARED)
        self._pending = Manifest(
            kind=self._identity.kind,
            step=step,
            update=update,
            world_size=dist.world_size(),
            config=self._identity.config,
            versions=package_versions(),
            data=self._identity.data,
            files={},
            best=trainer.is_best,
            metrics_offset=self._metrics.saved_offset(),
            saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        self._saved = trainer.position
        self._saved_at = time.monotonic()
        logger().info(
            f"checkpoint {name}: copied in {time.perf_counter() - started:.1f} s, being written"
        )

    def _commit(self) -> None:
        """Wait for the files of all ranks, and give the checkpoint its name. Collective."""
        assert self._pending is not None
        pending = self._pending
        self._pending = None
        name = checkpoint_name(pending.step, pending.update)
        written: dict[Path, FileEntry] = {}
        problem = None
        try:
            with storage_errors(self._folder.root):
                written = self._files.wait()
        except StorageError as failure:  # on the ranks where it occurs
            problem = str(failure)
        first_problem = dist.first_problem(problem)
        if first_problem is not None:
            raise StorageError(first_problem)
        folder = self._folder.partial(name)
        files: dict[str, FileEntry] = {}
        for written_by_rank in dist.gather_objects(written):
            for path, entry in written_by_rank.items():
                files[str(path.relative_to(folder))] = entry
        self._on_main(lambda: self._publish(name, pending, files))
        size = sum(entry["bytes"] for entry in files.values())
        logger().info(f"checkpoint {name}: saved, {size / 2**20:.1f} MiB")

    def _publish(self, name: str, manifest: Manifest, files: dict[str, FileEntry]) -> None:
        """Add the metrics and the manifest, which lists the `files`, to the checkpoint; give it its
        name, and remove checkpoints that are too many. On rank 0."""
        folder = self._folder.partial(name)
        metrics = (self._folder.root.parent / METRICS).read_bytes()
        write_file(folder / METRICS, metrics[: manifest.metrics_offset])
        all_files = {**files, METRICS: describe_file(folder / METRICS)}
        replace(manifest, files=all_files).write(folder)
        self._folder.commit(name)
        for removed in self._folder.prune(self._flags.save_total_limit, protect={name}):
            logger().info(f"checkpoint {removed}: removed (--save_total_limit)")

    def _on_main(self, write: Callable[[], Result]) -> Result:
        """What `write` returns on rank 0, on every rank; all ranks raise its `StorageError`."""
        return dist.on_main(storage_errors(self._folder.root)(write))


def capture_rng_state() -> dict[str, Any]:
    """The state of the global random generators of Python, numpy and torch (CPU and this rank's
    GPU), for `save_state`."""
    kind, keys, *rest = np.random.get_state()
    gpu_state = None
    if on_gpu():
        gpu_state = torch.cuda.get_rng_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
        "gpu": gpu_state,
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Set the global generators to the state of `capture_rng_state`. If only the state or only the
    machine has a GPU, the GPU's generator stays."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["gpu"] is not None and on_gpu():
        torch.cuda.set_rng_state(state["gpu"])
