"""One run at a time in an output folder."""

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
_MOST_BYTES = 2000
_A_LOOK_SECONDS = 0.5  # longer than `RunLock.look` of another run holds the lock
_held: set[int] = set()  # file descriptors of this process's locks


def _let_go_in_child() -> None:
    """A forked child shares the lock and would keep the folder locked after the run has ended."""
    for number in _held:
        os.close(number)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


class RunLock:
    """The lock of an output folder, held by every rank of a run until the last of them ends, however it ends.

    It is a `flock` on `.lock` in the folder: rank 0 takes it alone, which succeeds only where no rank of any run is
    left, and then shares it with the other ranks. The kernel gives it back when a process ends. Programs that are
    started (`subprocess`) do not inherit it; children forked by Python give it up at once; a child forked by foreign
    C code would keep it.
    """

    def __init__(self, number: int | None):
        self._number = number

    @classmethod
    def acquire(cls, folder: Path) -> RunLock:
        """Lock `folder`, which is made if it is not there. Collective.

        Where the file system knows no locks a warning says so, and nothing is locked.

        Raises:
            UserError: another run holds it, or the folder cannot be written; the same on all ranks.
        """
        processes = dist.gather_objects((socket.gethostname(), os.getpid()))
        first = _take_alone(folder, processes) if dist.is_main() else (None, None)
        locked = dist.broadcast_object(first[0] is not None)
        mine = first if dist.is_main() or not locked else _take_shared(folder)
        lock = cls(mine[0])
        problem = dist.first_problem(mine[1])
        if problem is not None:
            lock.release()
            raise UserError(problem)
        if not locked:
            logger().warning(f"--output_dir {folder}: its file system has no locks, so a second run is not kept out")
        return lock

    @classmethod
    def look(cls, folder: Path) -> None:
        """Refuse what `acquire` would, on rank 0 alone and before the ranks have met.

        A second run by the same command wants the same port too, and would get no further than to learn of that.

        Raises:
            UserError: another run holds the folder.
        """
        if dist.is_main() and os.path.exists(folder / FILE_NAME):
            number, problem = _take(folder, lambda number: fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB))
            cls(number).release()
            if problem:
                raise UserError(problem)

    def release(self) -> None:
        """Give up this rank's part of the lock; a second time does nothing."""
        if self._number is not None and self._number in _held:
            _held.remove(self._number)
            os.close(self._number)
        self._number = None


def _take_alone(folder: Path, processes: list[tuple[str, int]]) -> tuple[int | None, str | None]:
    """Rank 0: the lock's file descriptor, or why the run must not go on; neither where there are no locks."""
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
        # Not one step: should another run come in between, this one gives way.
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)

    return _take(folder, take)


def _take_shared(folder: Path) -> tuple[int | None, str | None]:
    """The other ranks' part, once rank 0 shares the lock."""
    return _take(folder, lambda number: fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB))


def _take(folder: Path, take: Callable[[int], None]) -> tuple[int | None, str | None]:
    try:
        number = os.open(folder / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as problem:
        return None, f"--output_dir {folder}: cannot be written ({problem.strerror})"
    try:
        _insist(take, number)
    except BlockingIOError:
        holder = os.pread(number, _MOST_BYTES, 0).decode("utf-8", errors="replace").strip()
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


def _insist(take: Callable[[int], None], number: int) -> None:
    """Try for as long as another run may hold the lock only to look at it."""
    deadline = time.monotonic() + _A_LOOK_SECONDS
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
