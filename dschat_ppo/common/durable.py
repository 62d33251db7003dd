"""Files and folders that are whole or not there, whenever the machine stops."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

PARTIAL = ".partial"


def sync_folder(folder: Path) -> None:
    """Have every file and folder below `folder`, and itself, on the disk before this returns."""
    for place, _, names in os.walk(folder):
        for name in names:
            _sync(Path(place) / name)
        _sync(Path(place))


def sync_entries(folder: Path) -> None:
    """Have the names in `folder` (new, renamed, removed) on the disk before this returns."""
    _sync(folder)


def empty_folder(path: Path) -> Path:
    """`path` as a new folder; what was there is removed."""
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def move_files_up(partial: Path) -> None:
    """Let the finished files in `partial` take their places in the folder above it, each at once."""
    sync_folder(partial)
    for file in partial.iterdir():
        os.replace(file, partial.parent / file.name)
    partial.rmdir()
    sync_entries(partial.parent)


def replace_folder(folder: Path, finished: Path) -> None:
    """Let `finished` take the place of `folder`, which stands beside it as `*.old` until then."""
    sync_folder(finished)
    old = folder.with_name(f"{folder.name}.old")
    if old.exists():
        shutil.rmtree(old)
    if folder.exists():
        os.rename(folder, old)
    os.rename(finished, folder)
    sync_entries(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
