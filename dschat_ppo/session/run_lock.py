"""The lock of an output folder: one run at a time writes to it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import make_folder
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import UserError

FILE_NAME = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MAX_BYTES = 2000
_CHECK_SECONDS = 0.5  # longer than `RunLock.refuse_if_held` of another run holds the lock
_held: set[int] = set()  # file descriptors of this process's locks


def _release_in_child() -> None:
    """A forked child shares the lock, and would keep the folder locked after the run has ended."""
    for number in _held:
        os.close(number)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


class RunLock:
    """The lock of an output folder, held by every rank of a run until the last one ends, however it ends.

    It is a `flock` on `.lock` in the folder. Rank 0 takes it exclusively, which succeeds only if no rank of any run
    is left, and then shares it with the other ranks. The kernel releases it when a process
    ends. Programs started by `subprocess` do not inherit it; children forked by Python release it at once; a child
    forked by foreign C code would keep it.
    """

    def __init__(self, number: int | None):
        self._number = number

    @classmethod
    def acquire(cls, folder: Path) -> RunLock:
        """Lock `folder`, and make it if it does not exist. Collective.

        If another run holds the lock, all ranks raise the same `UserError`. If the file system has no locks, a warning
        is logged and nothing is locked.
        """
        processes = dist.gather_objects((socket.gethostname(), os.getpid()))
        mine = _take_exclusive(folder, processes) if dist.is_main() else (None, None)
        locked = dist.broadcast_object(mine[0] is not None)
        if locked and not dist.is_main():
            mine = _take(folder, lambda number: fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB))
        lock = cls(mine[0])
        problem = dist.first_problem(mine[1])
        if problem is not None:
            lock.release()
            raise UserError(problem)
        if not locked:
            logger().warning(f"--output_dir {folder}: its file system has no locks, so a second run is not kept out")
        return lock

    @classmethod
    def refuse_if_held(cls, folder: Path) -> None:
        """Raise the error of `acquire` on rank 0, before the ranks join. A second run of the same command uses the same
        port too; without this check it would report only the port."""
        if dist.is_main() and os.path.exists(folder / FILE_NAME):
            number, problem = _take(folder, lambda number: fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB))
            cls(number).release()
            if problem:
                raise UserError(problem)

    def release(self) -> None:
        """Release this rank's part of the lock. A second call has no effect."""
        if self._number is not None and self._number in _held:
            _held.remove(self._number)
            os.close(self._number)
        self._number = None


def _take_exclusive(folder: Path, processes: list[tuple[str, int]]) -> tuple[int | None, str | None]:
    """On rank 0: (file descriptor of the lock, why the run must not continue). Both None without locks."""
    try:
        make_folder(folder)
    except FileExistsError:
        return None, f"--output_dir {folder}: is a file; name a folder"
    except OSError as problem:
        return None, f"--output_dir {folder}: cannot be written ({problem.strerror})"

    def take(number: int) -> None:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(number, 0)
        os.pwrite(number, _describe(processes).encode("utf-8"), 0)
        # This is not atomic: if another run takes the lock in between, this run ends.
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)

    return _take(folder, take)


def _take(folder: Path, take: Callable[[int], None]) -> tuple[int | None, str | None]:
    """Open the lock file and call `take` with its descriptor; returns as `_take_exclusive`."""
    try:
        number = os.open(folder / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as problem:
        return None, f"--output_dir {folder}: cannot be written ({problem.strerror})"
    try:
        _retry(take, number)
    except BlockingIOError:
        holder = os.pread(number, _MAX_BYTES, 0).decode("utf-8", errors="replace").strip()
        os.close(number)
        return None, (
            f"--output_dir {folder} is being written by another run{f' ({holder})' if holder else ''}; wait for it, "
            "stop it, or name another folder"
        )
    except OSError as problem:
        os.close(number)
        if problem.errno in _NO_LOCKS:
            return None, None
        return None, f"--output_dir {folder}: cannot be locked ({problem.strerror})"
    _held.add(number)
    return number, None


def _retry(take: Callable[[int], None], number: int) -> None:
    """Try for as long as another run may hold the lock only to check it."""
    deadline = time.monotonic() + _CHECK_SECONDS
    while True:
        try:
            return take(number)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _describe(processes: list[tuple[str, int]]) -> str:
    """`pid 12, 13 on host a; pid 7 on host b; since ...`."""
    hosts: dict[str, list[int]] = {}
    for host, pid in processes:
        hosts.setdefault(host, []).append(pid)
    where = [f"pid {', '.join(map(str, pids))} on host {host}" for host, pids in hosts.items()]
    return "; ".join([*where, f"since {datetime.now().astimezone().isoformat(timespec='seconds')}"])
