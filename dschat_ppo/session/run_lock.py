"""The lock of an output folder: one run at a time writes to it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import make_folder
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import UserError

FILE_NAME = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_HELD: dict[Path, int] = {}  # output folder -> file descriptor of its lock, a `flock` on `.lock` in it


def lock_folder(folder: Path) -> None:
    """On rank 0: lock `folder`, and make it if it does not exist, until this process ends, however it ends.

    `UserError` if another run holds the lock. Call it before the ranks join: a second run of the same command has the
    same port, and would report only that. Several steps may run one after another in one process, which keeps the
    locks. Programs started by `subprocess` do not inherit them, and children forked by Python release them at once.
    """
    if not dist.is_main() or folder.resolve() in _HELD:
        return
    try:
        make_folder(folder)
        number = os.open(folder / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except FileExistsError:
        raise UserError(f"--output_dir {folder}: is a file; name a folder") from None
    except OSError as problem:
        raise UserError(f"--output_dir {folder}: cannot be written ({problem.strerror})") from None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(number, 1000).decode(errors="replace").strip()
        os.close(number)
        raise UserError(
            f"--output_dir {folder} is being written by another run{f' ({holder})' if holder else ''}; wait for it, "
            "stop it, or name another folder"
        ) from None
    except OSError as problem:
        os.close(number)
        if problem.errno not in _NO_LOCKS:
            raise UserError(f"--output_dir {folder}: cannot be locked ({problem.strerror})") from None
        logger().warning(f"--output_dir {folder}: its file system has no locks, so a second run is not kept out")
        return
    _HELD[folder.resolve()] = number
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    with suppress(OSError):  # a full disk; the text is for a second run's message alone
        os.ftruncate(number, 0)
        os.write(number, f"pid {os.getpid()} on host {socket.gethostname()}; since {since}".encode())


def release_locks() -> None:
    """Release the locks of this process: in a forked child, which would keep a folder locked after the run."""
    for number in _HELD.values():
        os.close(number)
    _HELD.clear()


os.register_at_fork(after_in_child=release_locks)
