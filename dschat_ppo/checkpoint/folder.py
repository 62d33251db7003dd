"""The checkpoints of a run: a folder each, which appears under its name when it is whole, and how old ones go.

All of this is for one process (rank 0) of the run that holds the lock of the output folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

from dschat_ppo.checkpoint.manifest import Manifest, damage, read_manifest
from dschat_ppo.checkpoint.state_file import write_text
from dschat_ppo.common.atomic_files import PARTIAL, remove_folder, sync_entries, sync_folder
from dschat_ppo.errors import StorageError

REMOVED = ".removed"  # on its way out
REPLACED = ".replaced"  # whole, until the new one of its name is in place
LATEST = "latest"
_NAME = re.compile(r"step_(\d+)(?:_update_(\d+))?")


def checkpoint_name(step: int, update: int = 0) -> str:
    """Name of the checkpoint after `step` whole steps, and `update` updates of the next one."""
    return f"step_{step:06d}" + (f"_update_{update:04d}" if update else "")


class CheckpointFolder:
    """`checkpoints/` inside an output folder.

    Args:
        output: `--output_dir`.
    """

    def __init__(self, output: Path):
        self.root = output / "checkpoints"

    def names(self, since: tuple[int, int] = (0, 0)) -> list[str]:
        """Names of the checkpoints that are there, damaged or not, oldest first; from a position (step, update) on."""
        found = []
        for path in self.root.iterdir() if self.root.is_dir() else []:
            number = _NAME.fullmatch(path.name)
            if number and path.is_dir():
                found.append(((int(number[1]), int(number[2] or 0)), path.name))
        return [name for position, name in sorted(found) if position >= since]

    def clear_partials(self) -> None:
        """Take away what a crash left half done. Once at the start, with the lock held.

        A checkpoint that was being replaced by one of the same name is put back if the new one is not there.

        Raises:
            OSError: something cannot be removed.
        """
        for path in list(self.root.iterdir()) if self.root.is_dir() else []:
            if path.name.endswith(REPLACED):
                place = path.with_name(path.name.removesuffix(REPLACED))
                if not place.exists():
                    os.rename(path, place)
                    continue
            if path.name.endswith((PARTIAL, REMOVED, REPLACED)):
                _remove(path)

    def partial(self, name: str) -> Path:
        """A new, empty folder for the files of checkpoint `name`, until `commit`.

        Raises:
            OSError: it cannot be made.
        """
        path = self.root / f"{name}{PARTIAL}"
        if path.exists():
            _remove(path)
        path.mkdir(parents=True)
        return path

    def commit(self, name: str) -> None:
        """Give the finished files their name, once they and their manifest are on the disk; `latest` moves last.

        A checkpoint of that name that is there already (damaged, say) is replaced.

        Raises:
            RuntimeError: files are missing or cut; it is not committed.
            OSError: the disk refuses.
        """
        partial, place = self.root / f"{name}{PARTIAL}", self.root / name
        fault = damage(partial, checksums=False)
        if fault:
            raise RuntimeError(f"checkpoint {name} was not saved whole: {fault}")
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
        """The checkpoint of the best evaluation: the newest whose manifest says that it was the best so far."""
        for name in reversed(self.names()):
            manifest = read_manifest(self.root / name)
            if isinstance(manifest, Manifest) and manifest.best:
                return name
        return None

    def newest_intact(self, checksums: bool = True) -> tuple[str | None, list[str]]:
        """The checkpoint to go on from.

        Args:
            checksums: False trusts manifests and sizes.

        Returns:
            (name of the newest intact checkpoint, or None; what was found wrong on the way, a line each). No line and
            no name: no checkpoint was ever saved here.
        """
        names = self.names()
        complaints = self._complaints_of_latest(names)
        for name in reversed(names):
            fault = damage(self.root / name, checksums)
            if fault is None:
                return name, complaints
            complaints.append(f"checkpoint {self.root / name}: {fault}")
        return None, complaints

    def prune(self, limit: int, protect: Set[str] = frozenset()) -> list[str]:
        """Remove the oldest checkpoints, so that the newest `limit` whole ones stay, by manifests and sizes.

        Nothing is removed while the newest checkpoint is damaged, or fewer than `limit` are whole; `best`, and
        those of `protect`, stay in any case.

        Args:
            limit: 1 or more.
            protect: names.

        Returns:
            Names of those removed.

        Raises:
            ValueError: `limit` is below 1.
            OSError: one cannot be removed.
        """
        if limit < 1:
            raise ValueError(f"at least one checkpoint stays, so a limit of {limit} is none")
        names = self.names()
        whole = [name for name in names if damage(self.root / name, checksums=False) is None]
        if len(whole) < limit or whole[-1] != names[-1]:
            return []
        kept = {*protect, self.best()}
        doomed = [name for name in names[: names.index(whole[-limit])] if name not in kept]
        for name in doomed:
            removed = self.root / f"{name}{REMOVED}"
            os.rename(self.root / name, removed)  # half a checkpoint never stands under its name
            _remove(removed)
        return doomed

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A failure to write inside becomes the user's to mend.

        Raises:
            StorageError: for an `OSError` from inside.
        """
        try:
            yield
        except OSError as problem:
            raise StorageError(
                f"checkpoint {self.root}: cannot be written ({problem.strerror or problem}); {self._to_go_on_from()}; "
                "mend that, then run the same command again"
            ) from problem

    def _to_go_on_from(self) -> str:
        try:
            newest, _ = self.newest_intact(checksums=False)
        except OSError:  # what cannot be written may be unreadable too
            newest = None
        return f"the newest intact checkpoint is {newest}" if newest else "no intact checkpoint is there"

    def _complaints_of_latest(self, names: list[str]) -> list[str]:
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
