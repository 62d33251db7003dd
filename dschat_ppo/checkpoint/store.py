"""The checkpoints of a run: `OUTPUT/checkpoints/step_000012/`, each described by its
`manifest.json`.

Every rank writes its files of a checkpoint into a folder `*.partial`, which gets its name when all
are on the disk. Only rank 0, which holds the lock of the output folder, makes, names and removes
folders.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Set
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from dschat_ppo.checkpoint.state_files import FileEntry
from dschat_ppo.common.atomic_files import (
    PARTIAL,
    checksum,
    remove_folder,
    sync_entries,
    sync_folder,
    write_file,
)
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import StorageError, UserError
from dschat_ppo.features import hooks

FORMAT = 2  # of the files of a checkpoint; raise it when they change. 1: DeepSpeed's own files
MANIFEST, LATEST = "manifest.json", "latest"
SET_ASIDE = ".set_aside"
_SEAL = "sha256"  # of the manifest itself
_NAME = re.compile(r"step_(\d+)(?:_update_(\d+))?")


def describe_file(path: Path) -> FileEntry:
    """The entry of a file in a manifest."""
    return {"bytes": path.stat().st_size, "sha256": checksum(path)}


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint."""

    kind: Literal["sft", "reward", "ppo"]
    step: int  # optimizer steps done (PPO steps in step 3)
    update: int  # updates done of the PPO step after it
    world_size: int
    # `RunIdentity.config`: flags, derived batch sizes and fingerprints of the inputs
    config: dict[str, Any]
    versions: dict[str, str]
    data: str  # fingerprint of the training rows
    files: dict[str, FileEntry]  # by path inside the folder
    best: bool  # whether the evaluation at this checkpoint is the best so far
    metrics_offset: int  # length of `metrics.jsonl` in bytes at this checkpoint
    saved_at: str  # ISO 8601
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write `folder/manifest.json` durably. It is the last file of a checkpoint."""
        content = asdict(self)
        write_file(
            folder / MANIFEST,
            f"{json.dumps({**content, _SEAL: _seal(content)}, indent=1)}\n".encode(),
        )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint folder. A `UserError` names the folder and the fault."""
        manifest = _read_manifest(folder)
        if isinstance(manifest, str):
            raise UserError(f"checkpoint {folder}: {manifest}")
        return manifest


def _seal(content: dict[str, Any]) -> str:
    """Checksum of the manifest itself, independent of the layout of its JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _read_manifest(folder: Path) -> Manifest | str:
    """The manifest of a checkpoint folder, or the fault because of which it cannot be used."""
    try:
        if not (folder / MANIFEST).is_file():
            return f"{MANIFEST} is missing"
        content = json.loads((folder / MANIFEST).read_bytes())
        if content["format"] != FORMAT:
            version = content["versions"]["dschat_ppo"]
            time = content["saved_at"]
            return (
                f"is of format {content['format']}, and this installation reads format {FORMAT}:"
                f" finish or export that run with the one that saved it (dschat_ppo {version}, at"
                f" {time})"
            )
        seal = content.pop(_SEAL)
        if seal != _seal(content):
            return f"{MANIFEST}: checksum differs: the file changed on disk"
        return Manifest(**{field.name: content[field.name] for field in fields(Manifest)})
    except OSError as problem:
        return f"{MANIFEST} cannot be read ({problem.strerror})"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is damaged: it does not describe a checkpoint"


def damage(folder: Path, checksums: bool = True) -> str | None:
    """The first fault of a checkpoint folder; None: it is intact. All sizes are checked before the
    first checksum, because checksums read everything."""
    manifest = _read_manifest(folder)
    if isinstance(manifest, str):
        return manifest
    name = ""
    try:
        for name, entry in manifest.files.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes instead of {entry['bytes']}"
        if checksums:
            for name, entry in manifest.files.items():
                if checksum(folder / name) != entry["sha256"]:
                    return f"{name}: checksum differs: the file changed on disk"
    except OSError as problem:
        return f"{name} cannot be read ({problem.strerror})"
    return None


def checkpoint_name(step: int, update: int = 0) -> str:
    """Name of the checkpoint after `step` complete steps and `update` updates of the next one."""
    name = f"step_{step:06d}"
    if update:
        name += f"_update_{update:04d}"
    return name


class CheckpointFolder:
    """`checkpoints/` inside the output folder."""

    def __init__(self, output: Path):
        self.root = output / "checkpoints"

    def names(self, since: tuple[int, int] = (0, 0)) -> list[str]:
        """Names of the checkpoints, damaged or not, oldest first, from a position (step, update)
        on."""
        if not self.root.is_dir():
            return []
        checkpoints = []  # (position, name)
        for path in self.root.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                position = (int(match[1]), int(match[2] or 0))
                checkpoints.append((position, path.name))
        return [name for position, name in sorted(checkpoints) if position >= since]

    def clear_partials(self) -> None:
        """Remove what a crash left incomplete. Once at the start, with the lock held."""
        for path in list(self.root.glob(f"*{PARTIAL}")):
            if path.is_dir():
                remove_folder(path)
            else:
                path.unlink()

    def partial(self, name: str) -> Path:
        """The folder for the files of checkpoint `name`, until `commit`."""
        return self.root / f"{name}{PARTIAL}"

    def make_partial(self, name: str, subfolders: Iterable[str] = ()) -> Path:
        """An empty `partial` folder, with empty subfolders in it."""
        path = self.partial(name)
        remove_folder(path)
        path.mkdir(parents=True)
        for subfolder in subfolders:
            (path / subfolder).mkdir(parents=True)
        return path

    def commit(self, name: str) -> None:
        """Give the complete folder its name, once its files and manifest are on the disk.
        `StorageError`: files are missing or truncated."""
        partial = self.partial(name)
        target = self.root / name
        fault = damage(partial, checksums=False)
        if fault:
            raise StorageError(
                f"checkpoint {partial} was not saved whole: {fault}; something removed or changed"
                " files while they were written; run the same command again"
            )
        sync_folder(partial)
        if target.exists():
            self._set_aside(name)
        os.rename(partial, target)
        sync_entries(self.root)
        sync_entries(self.root.parent)
        write_file(self.root / LATEST, name.encode())  # for people and scripts

    def newest_intact(self) -> tuple[str | None, list[str]]:
        """(name of the newest intact checkpoint or None, a line for each fault after it). (None,
        []): none was ever saved here."""
        complaints: list[str] = []
        set_aside = [path.name for path in sorted(self.root.glob(f"*{SET_ASIDE}*"))]
        if not self.names() and (set_aside or (self.root / LATEST).exists()):
            hint = ""
            if set_aside:
                hint = f" (set aside: {', '.join(set_aside)}; name one by --resume)"
            complaints.append(f"{self.root}: the checkpoints that were saved there are gone{hint}")
        for name in reversed(self.names()):
            fault = damage(self.root / name)
            if fault is None:
                return name, complaints
            complaints.append(f"checkpoint {self.root / name}: {fault}")
        return None, complaints

    def best(self) -> str | None:
        """The checkpoint of the best evaluation: the newest one whose manifest has `best`."""
        for name in reversed(self.names()):
            manifest = _read_manifest(self.root / name)
            if isinstance(manifest, Manifest) and manifest.best:
                return name
        return None

    def prune(self, limit: int, protect: Set[str] = frozenset()) -> list[str]:
        """Remove the oldest checkpoints, so that the newest `limit` intact ones stay; returns the
        removed names. Manifests and sizes tell which are intact. Nothing is removed while the
        newest checkpoint is damaged, or fewer than `limit` are intact. `best`, and those named by
        `protect`, always stay."""
        names = self.names()
        intact = [name for name in names if damage(self.root / name, checksums=False) is None]
        if len(intact) < limit or intact[-1] != names[-1]:
            return []
        protected = {*protect, self.best()}
        older = names[: names.index(intact[-limit])]
        removed = [name for name in older if name not in protected]
        for name in removed:
            self._remove(name)
        return removed

    def removable(self) -> list[Path]:
        """What `remove_all` removes: the newest checkpoint last, so that another removal follows if
        the process ends in between. Checkpoints set aside stay."""
        paths = [self.root / LATEST]
        for names in hooks("checkpoint_folders.FOLDERS"):  # of a feature, next to the checkpoints
            paths += [self.root / name for name in names]
        paths += [self.root / name for name in self.names()]
        return [path for path in paths if path.exists()]

    def remove_all(self) -> None:
        """Remove all checkpoints and what stands beside them, without those set aside."""
        names = self.names()
        for path in self.removable():
            if path.name in names:
                self._remove(path.name)
            elif path.is_dir():
                remove_folder(path)
            else:
                path.unlink()
        if self.root.is_dir() and not any(self.root.iterdir()):
            self.root.rmdir()

    def _remove(self, name: str) -> None:
        """Remove a checkpoint; it loses its name first, so that no incomplete folder ever has
        it."""
        os.rename(self.root / name, self.partial(name))
        remove_folder(self.partial(name))

    def set_aside_after(self, checkpoint: Path) -> None:
        """Rename the checkpoints that are later than this one, so that no run resumes from them."""
        manifest = Manifest.read(checkpoint)
        for name in self.names(since=(manifest.step, manifest.update + 1)):
            renamed = self._set_aside(name)
            logger().warning(
                f"{self.root / name} is later than {checkpoint.name}: set aside as {renamed.name}"
            )
        sync_entries(self.root)  # after a power loss the old names must not be there again

    def _set_aside(self, name: str) -> Path:
        """Rename a checkpoint, so that no run resumes from it; returns its new path."""
        target = self.root / f"{name}{SET_ASIDE}"
        suffix = 1
        while target.exists():
            target = self.root / f"{name}{SET_ASIDE}{suffix}"
            suffix += 1
        return (self.root / name).rename(target)
