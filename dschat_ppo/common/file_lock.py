"""One process at a time: a lock on a file, which the kernel releases when its holder ends, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dschat_ppo.common.logging import logger
from dschat_ppo.common.stop_requests import raise_if_stop_requested

POLL_SECONDS = 0.5


@contextmanager
def locked(path: Path, waits: str, doing: str, quiet_seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock. While another process holds it for longer than `quiet_seconds`, log the line `waits` once, and
    leave the wait at a stop request, which says that the run `doing`."""
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
