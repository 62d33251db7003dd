"""Operators that DeepSpeed compiles at first use: one folder for each environment, one compilation at a time.

torch guards a compilation by a file that only its owner removes. If the owner is killed, every later run waits for
ever.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.op_files import discard_damaged, mark_whole
from dschat_ppo.runtime.processes import look_up, processes_at
from dschat_ppo.runtime.stop_requests import end_if_asked

OWN_LOCK, TORCH_LOCK = "dschat_ppo.lock", "lock"
LIMIT_SECONDS = 3600.0  # a compilation takes minutes
POLL_SECONDS = 0.5
_SAY_AFTER_SECONDS = 5.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def guard_builds() -> None:
    """Compile operators in this environment's folder, by one process at a time.

    Every rank calls this before it loads an operator. A `TORCH_EXTENSIONS_DIR` of the user names the folder instead.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder_of_environment()))
    if not hasattr(OpBuilder.jit_load, "__wrapped__"):
        OpBuilder.jit_load = _guarded(OpBuilder.jit_load)


def folder_of_environment() -> Path:
    """The folder for operators of this Python with these libraries; other environments would compile them again."""
    import deepspeed
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    versions = f"py{platform.python_version()}_torch{torch.__version__}_deepspeed{deepspeed.__version__}"
    place = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]  # the commands of the compiler hold its paths
    return Path(get_default_build_root(), "dschat_ppo", f"{versions}_{place}")


def _guarded(jit_load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(jit_load)
    def load(builder: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(os.environ["TORCH_EXTENSIONS_DIR"], builder.name)
        with watchdog_paused(), alone_in(folder) as alone, _announced(folder):
            if alone and discard_damaged(folder, frozenset({OWN_LOCK})):
                _say(f"{folder} is not as a compilation left it, or is of an earlier version: it is compiled again")
            loaded = jit_load(builder, *args, **kwargs)
            if alone:
                mark_whole(folder)
            return loaded

    return load


@contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Hold the lock of an operator's folder: no process compiles there, and torch's lock is not there.

    The kernel releases the lock when its holder ends, however it ends. This waits for a compiler that a killed process
    has left running, and removes torch's lock once no process has it open.

    Gives whether the lock is held. Where the file system has no locks it is not, a warning says so, and another
    process may compile there at any time.

    Raises:
        UserError: the folder cannot be written, or somebody is in the way for `LIMIT_SECONDS`.
        StopRequested: the run is to stop.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / OWN_LOCK).open("a+", encoding="ascii")
    except OSError as problem:
        raise UserError(
            f"{folder}: cannot be written ({problem.strerror}), and DeepSpeed compiles an operator there; set "
            "TORCH_EXTENSIONS_DIR to another folder"
        ) from None
    with lock:
        if locked := _knows_locks(lock, folder):
            _wait(folder, lambda: _holder(lock))
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        _wait(folder, lambda: _left_behind(folder))
        yield locked


def _wait(folder: Path, obstacle: Callable[[], str | None]) -> None:
    """Until there is no obstacle; a line says what it is."""
    began, said = time.monotonic(), False
    while (found := obstacle()) is not None:
        waited = time.monotonic() - began
        what = f"DeepSpeed's operator {folder.name} waits for {found}"
        if waited > LIMIT_SECONDS:
            raise UserError(f"{what}; {LIMIT_SECONDS / 60:g} minutes are over: end that process, or remove {folder}")
        if waited > _SAY_AFTER_SECONDS and not said:
            logger().info(what)
            said = True
        end_if_asked("waited for an operator")
        time.sleep(POLL_SECONDS)


def _knows_locks(lock: Any, folder: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as problem:
        if problem.errno not in _NO_LOCKS:
            raise
        logger().warning(f"{folder}: its file system has no locks; let one run compile before you start a second one")
        return False
    return True


def _holder(lock: Any) -> str | None:
    """Who holds the lock; None: this process does, from now on."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        return f"process {lock.read().strip() or '(unknown)'}, which compiles it"
    return None


def _left_behind(folder: Path) -> str | None:
    """Who is at work in the folder without this project's lock; None once nobody is, and torch's lock is removed.

    Compilers run in the folder. torch keeps its lock open, and closes it just before it removes it: a lock that nobody
    has open at two looks is stale.
    """
    lock = folder / TORCH_LOCK
    for look in range(2):
        try:
            owner = lock.stat().st_uid
        except FileNotFoundError:
            owner = None
        if owner is not None and (look_up(os.getpid()) is None or os.geteuid() not in (0, owner)):
            return f"the lock {lock}, whose owner cannot be looked up"
        others = processes_at(folder, lock)
        if others:
            return f"process {min(others)}, which compiles there"
        if owner is None:
            return None
        time.sleep(POLL_SECONDS * (1 - look))
    with suppress(FileNotFoundError):
        lock.unlink()
        _say(f"removed {lock}: the compilation that made it was killed")
    return None


@contextmanager
def _announced(folder: Path) -> Iterator[None]:
    """Print a line once a program runs in the folder for longer than ninja takes to find that nothing is to be done."""
    over = threading.Event()

    def look() -> None:
        seen: set[int] = set()
        while not over.wait(POLL_SECONDS):
            at_work = processes_at(folder)
            if at_work & seen:
                _say(f"DeepSpeed compiles its operator {folder.name} in {folder}: this may take minutes")
                return
            seen = at_work

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _say(line: str) -> None:
    """On whichever rank compiles, and where DeepSpeed's own prints are swallowed."""
    print(line, file=sys.stderr, flush=True)
