"""Saves the state of a run when it is time, and puts it back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

import dschat_ppo
from dschat_ppo.checkpoint.engine_state import BackgroundWriter, has_layout_of, load_engine, save_engine
from dschat_ppo.checkpoint.folder import CheckpointFolder, checkpoint_name
from dschat_ppo.checkpoint.manifest import FileEntry, Manifest, describe_file
from dschat_ppo.checkpoint.reshard import load_engine_resharded
from dschat_ppo.checkpoint.resumable import RankStates, Resumable
from dschat_ppo.checkpoint.resume import RunIdentity
from dschat_ppo.checkpoint.rng_state import random_state, restore_random_state
from dschat_ppo.checkpoint.state_file import load_state, save_state
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import PARTIAL
from dschat_ppo.common.logging import logger
from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.config.safety_flags import SafetyFlags
from dschat_ppo.errors import StopRequested, StorageError
from dschat_ppo.models.finite_weights import require_finite_weights
from dschat_ppo.monitor.writers import METRICS, MetricsWriter
from dschat_ppo.runtime import stop_requests
from dschat_ppo.types import Engine

SHARED = "shared.pt"
PACKAGES = ("torch", "deepspeed", "transformers")


Written = tuple[dict[str, FileEntry], str | None]  # files by their path in the checkpoint, or why there are none


def rank_file(rank: int) -> str:
    """Name of the file with the state of one rank."""
    return f"rank_{rank}.pt"


def restore(folder: Path, subject: Resumable, seed: int) -> Manifest:
    """Put the state in a checkpoint folder into a freshly built trainer. Collective.

    On the ranks, ZeRO stages and dtype that it was saved with the run goes on to the last bit (on a GPU: with
    `--deterministic`); on others it goes on in the same order of data, with numbers that differ by rounding and other
    dropout.

    Args:
        folder: an intact checkpoint.
        subject: the trainer.
        seed: of the run.
    """
    manifest = Manifest.read(folder)
    _say_other_versions(manifest.versions, _versions())
    for role, engine in subject.engines_to_save.items():
        if not (folder / role).is_dir():
            logger().info(f"{role}: was not trained when the checkpoint was saved, so it begins anew")
            continue
        with _flags_of_optimizer(engine):
            if has_layout_of(engine, folder / role):
                load_engine(engine, folder / role)
            else:
                logger().info(
                    f"{role}: saved by {manifest.world_size} ranks, with another layout of its states; divided anew"
                )
                load_engine_resharded(engine, folder / role)
    own = load_state(folder / rank_file(dist.rank())) if manifest.world_size == dist.world_size() else None
    everybody = range(manifest.world_size)
    ranks = RankStates(own, lambda: (load_state(folder / rank_file(rank)) for rank in everybody))
    subject.load_state(load_state(folder / SHARED), ranks)
    if own is not None:
        restore_random_state(own["random"])
    else:
        seed_this_rank(seed + manifest.step)
    return manifest


def _versions() -> dict[str, str]:
    """Package -> version, of what a run computes with."""
    return {"dschat_ppo": dschat_ppo.__version__, **{name: version(name) for name in PACKAGES}}


def _say_other_versions(saved: dict[str, str], now: dict[str, str]) -> None:
    changed = [f"{name} {saved.get(name)} -> {here}" for name, here in now.items() if saved.get(name) != here]
    if changed:
        logger().info(f"versions that changed since the checkpoint was saved: {', '.join(changed)}")


@contextmanager
def _flags_of_optimizer(engine: Engine) -> Iterator[None]:
    """Learning rate and its schedule, betas, epsilon and weight decay stay those that the engine was built with, where
    the states that are loaded inside hold others (`--resume_force`)."""
    scheduler, names = engine.lr_scheduler, ("betas", "eps", "weight_decay")
    rates = list(scheduler.base_lrs)
    settings = [{name: group[name] for name in names} for group in engine.optimizer.param_groups]
    yield
    for group, setting in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(setting)
    scheduler.base_lrs = rates
    for group, rate, factor in zip(engine.optimizer.param_groups, rates, scheduler.lr_lambdas, strict=True):
        group["lr"] = rate * factor(scheduler.last_epoch)  # of a schedule that may be longer than the saved one
    scheduler._last_lr = [group["lr"] for group in engine.optimizer.param_groups]


class CheckpointManager:
    """A `Checkpointer` that saves checkpoints while training goes on.

    The files of a checkpoint are written in the background; at a later boundary, when every rank has written its own,
    it gets its name and `latest` moves.

    Args:
        output: `--output_dir`.
        subject: the trainer.
        flags: when to save.
        about: what goes into the manifest.
        writer: of the metrics, whose length belongs to the state.
        saved: position of the checkpoint in this folder that the run goes on from, or None.
        to_go_on: what the user does after a stop.
    """

    def __init__(
        self, output: Path, subject: Resumable, flags: SafetyFlags, about: RunIdentity, writer: MetricsWriter,
        saved: tuple[int, int] | None = None, to_go_on: str = "run the same command again to go on",
    ):  # fmt: skip
        self._folder = CheckpointFolder(output)
        self._subject = subject
        self._flags = flags
        self._about = about
        self._metrics = writer
        self._to_go_on = to_go_on
        self._files = BackgroundWriter()
        self._pending: Manifest | None = None  # written in the background, not committed
        self._shared_file: Written = {}, None
        self._saved = saved
        self._saved_at = time.monotonic()

    def save_if_due(self) -> None:
        """See `Checkpointer`."""
        mine = [stop_requests.requested(), dist.is_main() and self._is_time(), not self._files.done()]
        stop, due, writing = self._any(mine)
        if self._pending is not None and not writing:
            self._commit()
        if stop:
            self.finish()
            place = self._folder.root / checkpoint_name(*self._subject.position)
            raise StopRequested(f"stopped as asked, saved as {place}; {self._to_go_on}")
        if due:
            self._save()

    def stop_requested(self) -> bool:
        """See `Checkpointer`."""
        return self._any([stop_requests.requested()])[0]

    def finish(self) -> None:
        """Save the state as it is now, unless it is saved already, and wait until it is on the disk. Collective."""
        if self._saved != self._subject.position:
            self._save()
        if self._pending is not None:
            self._commit()

    def _any(self, mine: list[bool]) -> list[bool]:
        flags = dist.all_reduce(torch.tensor(mine, dtype=torch.int32, device=dist.device()), "max")
        return [bool(flag) for flag in flags.tolist()]

    def _is_time(self) -> bool:
        step, update = self._subject.position
        every, minutes = self._flags.save_steps, self._flags.save_minutes
        by_count = every > 0 and update == 0 and step % every == 0 and self._saved != (step, update)
        return by_count or (minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes)

    def _save(self) -> None:
        """Copy the state and begin to write it; what is still being written is waited for first.

        Raises:
            NonFiniteError: a weight is not finite; the checkpoints before stay the newest.
        """
        if self._pending is not None:
            self._commit()
        started, subject = time.perf_counter(), self._subject
        for role, engine in subject.engines_to_save.items():
            require_finite_weights(role, engine)
        name = checkpoint_name(*subject.position)
        self._on_main(lambda: self._make_folders(name))
        folder = self._partial(name)
        for role, engine in subject.engines_to_save.items():
            save_engine(engine, folder / role, self._files)
        own = {"random": random_state(), **subject.rank_state()}
        self._files.save(own, str(folder / rank_file(dist.rank())))
        self._shared_file = self._save_shared(folder)
        self._pending = self._manifest()
        self._saved, self._saved_at = subject.position, time.monotonic()
        logger().info(f"checkpoint {name}: copied in {time.perf_counter() - started:.1f} s, being written")

    def _save_shared(self, folder: Path) -> Written:
        """What all ranks have in common and a copy of the metrics, by rank 0 and at once: they are small."""
        if not dist.is_main():
            return {}, None
        try:
            with self._folder.writing():
                save_state(folder / SHARED, self._subject.shared_state())
                self._metrics.copy_to(folder / METRICS)
                return {name: describe_file(folder / name) for name in (SHARED, METRICS)}, None
        except StorageError as problem:
            return {}, str(problem)

    def _partial(self, name: str) -> Path:
        return self._folder.root / f"{name}{PARTIAL}"

    def _make_folders(self, name: str) -> None:
        folder = self._folder.partial(name)
        for role in self._subject.engines_to_save:
            (folder / role / "state").mkdir(parents=True)

    def _manifest(self) -> Manifest:
        step, update = self._subject.position
        return Manifest(
            kind=self._about.kind,
            step=step,
            update=update,
            world_size=dist.world_size(),
            config=self._about.config,
            versions=_versions(),
            data=self._about.data,
            files={},
            best=self._subject.is_best,
            metrics_offset=self._metrics.saved_offset(),
            saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    def _commit(self) -> None:
        """Wait for the files of all ranks, and let the checkpoint appear under its name. Collective."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        name = checkpoint_name(pending.step, pending.update)
        found = [part for rank in dist.gather_objects([self._shared_file, self._files_of_rank(name)]) for part in rank]
        for _, problem in found:
            if problem is not None:
                raise StorageError(problem)
        everything = {path: entry for part, _ in found for path, entry in part.items()}
        self._on_main(lambda: self._commit_on_main(name, pending, everything))
        size = sum(entry["bytes"] for entry in everything.values())
        logger().info(f"checkpoint {name}: saved, {size / 2**20:.1f} MiB")

    def _files_of_rank(self, name: str) -> Written:
        """What this rank has written in the background, once it is on the disk."""
        files: dict[str, FileEntry] = {}
        try:
            with self._folder.writing():
                for path, (size, digest) in self._files.wait().items():
                    files[str(path.relative_to(self._partial(name)))] = {"bytes": size, "sha256": digest}
        except StorageError as problem:
            return {}, str(problem)
        return files, None

    def _commit_on_main(self, name: str, pending: Manifest, files: dict[str, FileEntry]) -> None:
        replace(pending, files=files).write(self._partial(name))
        self._folder.commit(name)
        for removed in self._folder.prune(self._flags.save_total_limit, protect={name}):
            logger().info(f"checkpoint {removed}: removed (--save_total_limit)")

    def _on_main(self, act: Callable[[], None]) -> None:
        """Do something to the disk on rank 0; if it cannot be done, all ranks raise `StorageError`."""
        problem = None
        if dist.is_main():
            try:
                with self._folder.writing():
                    act()
            except StorageError as raised:
                problem = str(raised)
        problem = dist.broadcast_object(problem)
        if problem is not None:
            raise StorageError(problem)
