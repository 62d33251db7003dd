"""Files and folders that are whole or not there, whenever the machine stops.

A disk may be slow. Each block that is read or written sends a heartbeat, and the watchdog is paused while the kernel
flushes its buffers, which is one call however much there is. Nothing here waits for another rank.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dschat_ppo.common.heartbeat import heartbeat, watchdog_paused

PARTIAL = ".partial"
_BLOCK_BYTES = 2**22


def blocks_of(path: Path) -> Iterator[bytes]:
    """The content of a file, block by block."""
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            heartbeat()
            yield block


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    for block in blocks_of(path):
        digest.update(block)
    return digest.hexdigest()


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file beside its place, sync it to the disk, and rename it into its place.

    Raises:
        OSError: it cannot be written; the old content is still there.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            for start in range(0, len(content), _BLOCK_BYTES):
                file.write(content[start : start + _BLOCK_BYTES])
                heartbeat()
            file.flush()
            sync_file(file.fileno())
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):  # the first failure is the one to tell
            partial.unlink()
        raise
    sync_entries(path.parent)


def sync_file(number: int) -> None:
    """Have the content of an open file, given by its descriptor, on the disk before this returns."""
    with watchdog_paused():
        os.fsync(number)


def sync_folder(folder: Path) -> None:
    """Have every file and folder below `folder`, and itself, on the disk before this returns."""
    for place, _, names in os.walk(folder):
        for name in names:
            _sync(Path(place) / name)
        _sync(Path(place))


def sync_entries(folder: Path) -> None:
    """Have the names in `folder` (new, renamed, removed) on the disk before this returns."""
    _sync(folder)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, and have their names on the disk before this returns."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_entries(folder.parent)


def empty_folder(path: Path) -> Path:
    """`path` as a new folder; what was there is removed."""
    remove_folder(path)
    make_folder(path)
    return path


def move_files_up(partial: Path) -> None:
    """Let the finished files in `partial` take their places in the folder above it, each at once, weights last."""
    sync_folder(partial)
    for file in sorted(partial.iterdir(), key=lambda file: file.suffix == ".safetensors"):
        os.replace(file, partial.parent / file.name)
    partial.rmdir()
    sync_entries(partial.parent)


def replace_folder(folder: Path, finished: Path) -> None:
    """Let `finished` take the place of `folder`, which stands beside it as `*.old` until then."""
    sync_folder(finished)
    old = folder.with_name(f"{folder.name}.old")
    remove_folder(old)
    if folder.exists():
        os.rename(folder, old)
    os.rename(finished, folder)
    sync_entries(folder.parent)
    remove_folder(old)


def remove_folder(folder: Path) -> None:
    """Take a folder away with all that is in it, if it is there."""
    if folder.exists():
        with watchdog_paused():
            shutil.rmtree(folder)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        sync_file(number)
    finally:
        os.close(number)
