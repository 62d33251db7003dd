"""The folder of a run's checkpoints: each gets its name when it is complete; old ones are removed. Only rank 0 of the
run that holds the lock of the output folder uses this."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from dschat_ppo.checkpoint.manifest import Manifest, damage, read_manifest
from dschat_ppo.common.atomic_files import PARTIAL, remove_folder, sync_entries, sync_folder, write_text
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import StorageError

REMOVED = ".removed"  # is being removed
REPLACED = ".replaced"  # intact, until the new one of its name is in place
QUARANTINED = ".set_aside"
LATEST = "latest"
_NAME = re.compile(r"step_(\d+)(?:_update_(\d+))?")


def checkpoint_name(step: int, update: int = 0) -> str:
    """Name of the checkpoint after `step` complete steps and `update` updates of the next one."""
    return f"step_{step:06d}" + (f"_update_{update:04d}" if update else "")


class CheckpointFolder:
    """`checkpoints/` inside the output folder."""

    def __init__(self, output: Path):
        self.root = output / "checkpoints"

    def names(self, since: tuple[int, int] = (0, 0)) -> list[str]:
        """Names of the checkpoints, damaged or not, oldest first, from a position (step, update) on."""
        found = []
        for path in self.root.iterdir() if self.root.is_dir() else []:
            number = _NAME.fullmatch(path.name)
            if number and path.is_dir():
                found.append(((int(number[1]), int(number[2] or 0)), path.name))
        return [name for position, name in sorted(found) if position >= since]

    def clear_partials(self) -> None:
        """Remove what a crash left incomplete. Once at the start, with the lock held. A checkpoint that was being
        replaced by one of the same name gets its name back if the new one is not there."""
        for path in list(self.root.iterdir()) if self.root.is_dir() else []:
            if path.name.endswith(REPLACED):
                place = path.with_name(path.name.removesuffix(REPLACED))
                if not place.exists():
                    os.rename(path, place)
                    continue
            if path.name.endswith((PARTIAL, REMOVED, REPLACED)):
                _remove(path)

    def partial(self, name: str) -> Path:
        """Make a new, empty folder for the files of checkpoint `name`, until `commit`."""
        path = self.root / f"{name}{PARTIAL}"
        if path.exists():
            _remove(path)
        path.mkdir(parents=True)
        return path

    def commit(self, name: str) -> None:
        """Give the complete folder its name, once its files and manifest are on the disk. `latest` is written last. An
        older checkpoint of that name is replaced. `StorageError`: files are missing or truncated."""
        partial, place = self.root / f"{name}{PARTIAL}", self.root / name
        fault = damage(partial, checksums=False)
        if fault:
            raise StorageError(
                f"checkpoint {partial} was not saved whole: {fault}; something removed or changed files while they "
                "were written; run the same command again"
            )
        sync_folder(partial)
        replaced = place.with_name(f"{name}{REPLACED}")
        if place.exists():
            os.rename(place, replaced)
        os.rename(partial, place)
        sync_entries(self.root)
        sync_entries(self.root.parent)
        if replaced.exists():
            _remove(replaced)
        write_text(self.root / LATEST, name)

    def best(self) -> str | None:
        """The checkpoint of the best evaluation: the newest one whose manifest has `best`."""
        for name in reversed(self.names()):
            manifest = read_manifest(self.root / name)
            if isinstance(manifest, Manifest) and manifest.best:
                return name
        return None

    def newest_intact(self, checksums: bool = True) -> tuple[str | None, list[str]]:
        """(name of the newest intact checkpoint or None, a line for each fault). (None, []): none was ever saved here.
        Without `checksums` it checks only manifests and sizes."""
        names = self.names()
        complaints = self._faults_of_latest(names)
        for name in reversed(names):
            fault = damage(self.root / name, checksums)
            if fault is None:
                return name, complaints
            complaints.append(f"checkpoint {self.root / name}: {fault}")
        return None, complaints

    def prune(self, limit: int, protect: Set[str] = frozenset()) -> list[str]:
        """Remove the oldest checkpoints, so that the newest `limit` intact ones stay; returns the removed names.
        Manifests and sizes tell which are intact. Nothing is removed while the newest checkpoint is damaged, or fewer
        than `limit` are intact. `best`, and those named by `protect`, always stay."""
        if limit < 1:
            raise ValueError(f"at least one checkpoint must stay, so the limit cannot be {limit}")
        names = self.names()
        whole = [name for name in names if damage(self.root / name, checksums=False) is None]
        if len(whole) < limit or whole[-1] != names[-1]:
            return []
        kept = {*protect, self.best()}
        doomed = [name for name in names[: names.index(whole[-limit])] if name not in kept]
        self._remove_checkpoints(doomed)
        return doomed

    def remove_all(self) -> int:
        """Remove all checkpoints, the newest last, and return their size in bytes. Quarantined ones stay."""
        names = self.names()
        size = sum(file.stat().st_size for name in names for file in (self.root / name).rglob("*") if file.is_file())
        self._remove_checkpoints(names)
        (self.root / LATEST).unlink(missing_ok=True)
        if self.root.is_dir() and not any(self.root.iterdir()):
            self.root.rmdir()
        return size

    def _remove_checkpoints(self, names: list[str]) -> None:
        for name in names:
            removed = self.root / f"{name}{REMOVED}"
            os.rename(self.root / name, removed)  # no incomplete checkpoint ever has its name
            _remove(removed)

    def quarantine_after(self, checkpoint: Path) -> None:
        """Rename the checkpoints that are later than this one, so that no run resumes from them."""
        manifest = Manifest.read(checkpoint)
        for name in self.names(since=(manifest.step, manifest.update + 1)):
            places = (self.root / f"{name}{QUARANTINED}{number or ''}" for number in count())
            place = next(place for place in places if not place.exists())
            (self.root / name).rename(place)
            logger().warning(f"{self.root / name} is later than {checkpoint.name}: quarantined as {place.name}")
        sync_entries(self.root)  # after a power loss the old names must not be there again

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an `OSError` in the block into a `StorageError`."""
        try:
            yield
        except OSError as problem:
            try:
                newest, _ = self.newest_intact(checksums=False)
            except OSError:  # a folder that cannot be written may be unreadable too
                newest = None
            intact = f"the newest intact checkpoint is {newest}" if newest else "no intact checkpoint is there"
            raise StorageError(
                f"checkpoint {self.root}: cannot be written ({problem.strerror or problem}); {intact}; correct this, "
                "then run the same command again"
            ) from problem

    def _faults_of_latest(self, names: list[str]) -> list[str]:
        path = self.root / LATEST
        try:
            latest = path.read_bytes().decode("utf-8", errors="replace").strip() if path.exists() else None
        except OSError as problem:
            return [f"{path} cannot be read ({problem.strerror})"]
        if latest is None:
            return [f"{path} is missing"] if names else []
        if not latest:
            return [f"{path} is empty"]
        if latest not in names:
            return [f"{path} names '{latest}', which is not there"]
        if latest != names[-1]:
            return [f"{path} names {latest}, but {names[-1]} was saved after it"]
        return []


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        path.unlink()
