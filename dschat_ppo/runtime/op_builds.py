"""Operators that DeepSpeed compiles at first use: one folder for each environment, one compilation at a time, and a
check of the compiled files.

torch before 2.14 locks a compilation by a file that only its owner removes. If the owner is killed, every later run
waits forever. And ninja trusts names and times: after a power loss an object or a library can be empty, truncated or
full of zeros and still be newer than its source, and would be linked and loaded in every later run.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dschat_ppo.common import ranks
from dschat_ppo.common.atomic_files import checksum, remove_folder, sync_folder, write_file
from dschat_ppo.common.heartbeat import running_clock, watchdog_paused
from dschat_ppo.common.logging import logger, quiet_prints
from dschat_ppo.errors import UserError, in_one_line
from dschat_ppo.runtime.processes import find_process, processes_at
from dschat_ppo.runtime.stop_requests import raise_if_stop_requested, requested, subprocesses_may_stop

OWN_LOCK, TORCH_LOCK = "dschat_ppo.lock", "lock"
LIBRARIES = "dschat_ppo.whole"  # name and SHA-256 of each library, written when all files are on the disk
LIMIT_SECONDS = 3600.0  # a compilation takes minutes
POLL_SECONDS = 0.5
_LOG_AFTER_SECONDS = 5.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def guard_builds() -> None:
    """Let DeepSpeed compile operators in this environment's folder, in one process at a time. Every rank calls this
    before it loads an operator. `TORCH_EXTENSIONS_DIR`, if the user sets it, is the folder."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    if not hasattr(OpBuilder.jit_load, "__wrapped__"):
        OpBuilder.jit_load = _guarded(OpBuilder.jit_load)


def offer_all_reduce() -> bool:
    """Tell DeepSpeed, and return, whether to load its all-reduce in shared memory: on a CPU, if all ranks can share it.
    Otherwise DeepSpeed would probe all its operators, some by a compiler, to learn about this one, and load it for a
    single rank too."""
    from deepspeed import ops
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None:
        return False
    is_loaded = ranks.world_size() > 1 and ranks.machines() == 1 and builder.is_compatible()
    ops.__compatible_ops__ = {builder.NAME: is_loaded}
    return is_loaded


def folder_of_environment() -> Path:
    """The folder for operators of this Python with these libraries, so that no other environment recompiles them."""
    import deepspeed
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    versions = f"py{platform.python_version()}_torch{torch.__version__}_deepspeed{deepspeed.__version__}"
    place = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]  # the commands of the compiler hold its paths
    return Path(get_default_build_root(), "dschat_ppo", f"{versions}_{place}")


def _guarded(jit_load: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's function that compiles and loads an operator, with lock, check and message around it."""

    @functools.wraps(jit_load)
    def load(builder: Any, *args: Any, **kwargs: Any) -> Any:
        # only here, because this imports torch's compilation of extensions
        root = os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder_of_environment()))
        folder = Path(root, builder.name)
        with watchdog_paused(), exclusive(folder) as locked, _announced(folder):
            if locked and _remove_if_damaged(folder):
                _print(f"{folder} is damaged, or was compiled by an earlier version: it is compiled again")
            with explained(builder.name, folder):
                loaded = jit_load(builder, *args, **kwargs)
            if locked:
                _record_libraries(folder)
            return loaded

    return load


def load_operator(builder: str) -> None:
    """Load an operator of DeepSpeed, such as "CPUAdamBuilder", compiled if needed, before the models are loaded."""
    from deepspeed.accelerator import get_accelerator

    with quiet_prints(), subprocesses_may_stop("compiled an operator"):
        get_accelerator().create_op_builder(builder).load()


@contextmanager
def explained(name: str, folder: Path) -> Iterator[None]:
    """Turn what DeepSpeed and torch raise where operator `name` cannot be compiled or loaded into a `UserError`. It
    says what is missing or out of date. Other errors pass, and so do all during a stop, which ends compilers."""
    from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException

    try:
        yield
    except (RuntimeError, OSError, ImportError, CUDAMismatchException, MissingCUDAException) as problem:
        reason = None if requested() else _reason(problem, folder)
        if reason is None:
            raise
        raise UserError(f"DeepSpeed's operator {name} cannot be {reason}") from problem


def _reason(problem: Exception, folder: Path) -> str | None:
    """Why an operator cannot be compiled or loaded, and what to do; None if the cause is unknown."""
    from torch.utils.cpp_extension import get_cxx_compiler, is_ninja_available

    text = str(problem)
    if isinstance(problem, ImportError):
        return (
            f"loaded: it was compiled for another torch or Python ({in_one_line(problem)}); remove the folder {folder} "
            "and run the same command again, which compiles it again"
        )
    if not is_ninja_available():
        return "compiled without ninja: pip install ninja, and check that it is in PATH"
    compiler = get_cxx_compiler()
    if shutil.which(compiler) is None:
        return f"compiled without a C++ compiler, and there is no '{compiler}': install g++, or name a compiler by CXX"
    if "Python.h" in text:
        return "compiled without the header files of Python (Python.h): install python3-dev"
    if "CUDA_HOME" in text or "nvcc" in text:
        return "compiled without CUDA's compiler nvcc: install the CUDA toolkit, and name its folder by CUDA_HOME"
    if "does not match the version torch was compiled with" in text:
        return f"compiled ({in_one_line(problem)}): name the folder of torch's CUDA version by CUDA_HOME"
    return None


@contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Hold the lock of an operator's folder: no other process compiles there, and torch's lock does not exist.

    The kernel releases the lock when its holder ends, however it ends. This waits, up to `LIMIT_SECONDS`, for another
    holder and for a compiler that a killed process has left running, and removes torch's lock once no process has it
    open.

    Yields whether the lock is held. Where the file system has no locks it is not: then a warning is logged, and another
    process may compile there at any time.
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
        if locked := _try_lock(lock, folder):
            _wait(folder, lambda: _lock_holder(lock))
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        _wait(folder, lambda: _unlocked_compiler(folder))
        yield locked


def _wait(folder: Path, obstacle: Callable[[], str | None]) -> None:
    """Wait until there is no obstacle, and log what it is."""
    start, is_logged = running_clock(), False
    while (found := obstacle()) is not None:
        waited = running_clock() - start
        message = f"this rank waits for DeepSpeed's operator {folder.name}: {found}"
        if waited > LIMIT_SECONDS:
            raise UserError(f"{message}; {LIMIT_SECONDS / 60:g} minutes are over: end that process, or remove {folder}")
        if waited > _LOG_AFTER_SECONDS and not is_logged:
            logger().info(message)
            is_logged = True
        raise_if_stop_requested("waited for an operator")
        time.sleep(min(POLL_SECONDS, 0.02 + waited))  # ranks that find an operator compiled wait for a moment only


def _try_lock(lock: Any, folder: Path) -> bool:
    """Take the lock if it is free. Returns whether the file system has locks."""
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


def _lock_holder(lock: Any) -> str | None:
    """The process that holds the lock; None: this process does, from now on."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        return f"process {lock.read().strip() or '(unknown)'} is compiling it"
    return None


def _unlocked_compiler(folder: Path) -> str | None:
    """The process that compiles in the folder without this project's lock. None: none does; torch's lock is removed.

    Compilers run in the folder. torch keeps its lock open, and closes it just before it removes it: a lock that no
    process has open at two checks is stale. From 2.14 on the kernel locks the file, which then stays and stops nobody.
    """
    from torch.utils import cpp_extension

    lock, stops = folder / TORCH_LOCK, hasattr(cpp_extension, "FileBaton")
    for check in range(2):
        try:
            owner = lock.stat().st_uid if stops else None
        except FileNotFoundError:
            owner = None
        if owner is not None and (find_process(os.getpid()) is None or os.geteuid() not in (0, owner)):
            return f"the lock {lock}, whose owner cannot be found"
        others = processes_at(folder, lock)
        if others:
            return f"process {min(others)} is compiling there"
        if owner is None:
            return None
        time.sleep(POLL_SECONDS * (1 - check))
    with suppress(FileNotFoundError):
        lock.unlink()
        _print(f"removed {lock}: the compilation that made it was killed")
    return None


@contextmanager
def _announced(folder: Path) -> Iterator[None]:
    """Print a line once a compiler runs for longer than ninja needs to find nothing to do, and one when it is done."""
    done, start, is_announced = threading.Event(), time.monotonic(), threading.Event()

    def poll() -> None:
        before: set[int] = set()
        while not done.wait(POLL_SECONDS):
            compilers = processes_at(folder)
            if compilers & before:
                _print(
                    f"DeepSpeed compiles its operator {folder.name} in {folder}: one to three minutes, once for this "
                    "environment"
                )
                is_announced.set()
                return
            before = compilers

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if is_announced.is_set():
        _print(f"DeepSpeed's operator {folder.name}: compiled in {time.monotonic() - start:.0f} s")


def _print(line: str) -> None:
    """To stderr: any rank may compile, and DeepSpeed's prints to stdout are suppressed."""
    print(line, file=sys.stderr, flush=True)


def _remove_if_damaged(folder: Path) -> bool:
    """Remove all compiled files, and return True, unless the libraries are those of `_record_libraries`. Lock held."""
    libraries = _libraries(folder)
    if libraries and _recorded_libraries(folder) == libraries:
        return False
    removed = [path for path in folder.iterdir() if path.name != OWN_LOCK]
    for path in removed:
        if path.is_dir() and not path.is_symlink():
            remove_folder(path)
        else:
            path.unlink()
    return bool(removed)


def _record_libraries(folder: Path) -> None:
    """Sync all compiled files to the disk, then write the checksums of the libraries. The lock is held."""
    libraries = _libraries(folder)
    if _recorded_libraries(folder) != libraries:
        sync_folder(folder)
        write_file(folder / LIBRARIES, json.dumps(libraries, indent=1).encode())


def _libraries(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of the libraries in the folder."""
    return {path.name: checksum(path) for path in sorted(folder.glob("*.so"))}


def _recorded_libraries(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / LIBRARIES).read_bytes()))
    except (OSError, ValueError, TypeError):  # it is missing, or this project did not write it
        return {}
