"""Write and replace files and folders so that after a crash or a power loss each is complete or
absent; locks.

Each block that is read or written sends a heartbeat, and the watchdog is paused while the kernel
flushes its buffers: a single call, for any amount of data on a slow disk. Nothing here but `locked`
waits for another rank.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dschat_ppo.common.heartbeat import heartbeat, watchdog_paused
from dschat_ppo.common.logging import logger
from dschat_ppo.common.stop_requests import raise_if_stop_requested
from dschat_ppo.errors import StorageError

# endings of the names of what is not complete yet, and of a folder that is being replaced
PARTIAL = ".partial"
OLD = ".old"
_BLOCK_BYTES = 2**22


def read_blocks(path: Path) -> Iterator[bytes]:
    """The content of a file, block by block."""
    with path.open("rb", buffering=0) as file:
        block = file.read(_BLOCK_BYTES)
        while block:
            heartbeat()
            yield block
            block = file.read(_BLOCK_BYTES)


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    for block in read_blocks(path):
        digest.update(block)
    return digest.hexdigest()


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file as `*.partial`, sync it to the disk, and rename it. On an error the old content
    remains."""
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
        with suppress(OSError):  # report the first failure
            partial.unlink()
        raise
    sync_entries(path.parent)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """An `OSError` of the block, which writes `path`, becomes a `StorageError` that names it and
    the way out."""
    try:
        yield
    except OSError as problem:
        raise StorageError(
            f"{path}: cannot be written ({problem.strerror or problem}); {way_out(problem.errno)},"
            " then run the same command again"
        ) from problem


def way_out(error: int | None) -> str:
    """What to do when a file cannot be written, by the number of the error (`errno`)."""
    if error in (errno.ENOSPC, errno.EDQUOT):
        return "free space"
    if error == errno.EFBIG:
        return "raise the limit on the size of a file (ulimit -f; some file systems have one too)"
    if error == errno.ENOENT:
        return "something has removed a folder while it was written to: find out what"
    if error in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "let this user write there"
    return "correct that"


def sync_file(descriptor: int) -> None:
    """Flush the content of an open file to the disk."""
    with watchdog_paused():
        os.fsync(descriptor)


def sync_entries(path: Path) -> None:
    """Flush a file, or the names in a folder (new, renamed, removed), to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush `folder` and every file and folder below it to the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync_entries(Path(parent, name))
        sync_entries(Path(parent))


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and flush their names to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_entries(folder.parent)


def empty_folder(path: Path) -> Path:
    """Make `path` a new, empty folder; old content is removed."""
    remove_folder(path)
    make_folder(path)
    return path


def move_files_up(partial: Path) -> None:
    """Move the finished files in `partial` into its parent folder, each atomically, weights
    last."""
    sync_folder(partial)
    for file in sorted(partial.iterdir(), key=lambda file: file.suffix == ".safetensors"):
        os.replace(file, partial.parent / file.name)
    partial.rmdir()
    sync_entries(partial.parent)


def replace_folder(folder: Path, finished: Path) -> None:
    """Replace `folder` by `finished`. Until that is done, the old folder exists as `*.old`."""
    sync_folder(finished)
    old = folder.with_name(f"{folder.name}{OLD}")
    remove_folder(old)
    if folder.exists():
        os.rename(folder, old)
    os.rename(finished, folder)
    sync_entries(folder.parent)
    remove_folder(old)


def remove_folder(folder: Path) -> None:
    if folder.exists():
        with watchdog_paused():
            shutil.rmtree(folder)


POLL_SECONDS = 0.5


@contextmanager
def locked(path: Path, waits: str, doing: str, quiet_seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock. While another process holds it for longer than `quiet_seconds`, log the line
    `waits` once, and leave the wait at a stop request, which says that the run `doing`."""
    lock = FileLock(path)
    with suppress(Timeout):
        lock.acquire(timeout=quiet_seconds)
    if not lock.is_locked:
        logger().info(waits)
    while not lock.is_locked:
        raise_if_stop_requested(doing)
        with suppress(Timeout):
            lock.acquire(timeout=POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()
