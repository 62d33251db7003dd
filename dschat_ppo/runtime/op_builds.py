"""Operators that DeepSpeed compiles at first use: one folder for each environment, one compilation at a time.

torch before 2.14 locks a compilation by a file that only its owner removes. If the owner is killed, every later run
would wait forever.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dschat_ppo.common import ranks
from dschat_ppo.common.atomic_files import sync_folder
from dschat_ppo.common.heartbeat import running_clock, watchdog_paused
from dschat_ppo.common.logging import logger, quiet_prints
from dschat_ppo.errors import UserError, in_one_line
from dschat_ppo.runtime.processes import processes_at
from dschat_ppo.runtime.stop_requests import raise_if_stop_requested, requested, subprocesses_may_stop

OWN_LOCK, TORCH_LOCK = "dschat_ppo.lock", "lock"
WHOLE = "dschat_ppo.whole"  # made when all compiled files are on the disk
LIMIT_SECONDS = 3600.0  # a compilation takes minutes
POLL_SECONDS, _LOG_AFTER_SECONDS = 0.5, 5.0
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
    """DeepSpeed's function that compiles and loads an operator, with a lock and messages around it."""

    @functools.wraps(jit_load)
    def load(builder: Any, *args: Any, **kwargs: Any) -> Any:
        # only here, because this imports torch's compilation of extensions
        folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder_of_environment())), builder.name)
        with watchdog_paused(), exclusive(folder), explained(builder.name, folder):
            is_compiled = (folder / WHOLE).exists()
            if not is_compiled:  # what a killed compilation or a power loss left; ninja trusts names and times
                for left in [*folder.glob("*.o"), *folder.glob("*.so"), *folder.glob(".ninja_*")]:
                    left.unlink()
                # to stderr: any rank may compile, and DeepSpeed's prints to stdout are suppressed
                text = f"DeepSpeed compiles its operator {builder.name} in {folder}: one to three minutes, once"
                print(text, file=sys.stderr, flush=True)
            start, loaded = time.monotonic(), jit_load(builder, *args, **kwargs)
            if not is_compiled:
                sync_folder(folder)
                (folder / WHOLE).touch()
                seconds = time.monotonic() - start
                print(f"DeepSpeed's operator {builder.name}: compiled in {seconds:.0f} s", file=sys.stderr, flush=True)
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
            f"loaded: it is damaged, or was compiled for another torch or Python ({in_one_line(problem)}); remove the "
            f"folder {folder} and run the same command again, which compiles it again"
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
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of an operator's folder, which the kernel releases when its holder ends, however it ends.

    Waits for another holder, and for a compiler that a killed process has left running. Then torch's own lock is of a
    dead process, and is removed. Where the file system has no locks, a warning is logged and nothing is locked.
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
        start, is_logged = running_clock(), False
        while (others := _others(lock, folder)) is not None:
            waited = running_clock() - start
            message = f"this rank waits for DeepSpeed's operator {folder.name}: {others} is compiling it"
            if waited > LIMIT_SECONDS:
                minutes = LIMIT_SECONDS / 60
                raise UserError(f"{message}; {minutes:g} minutes are over: end that process, or remove {folder}")
            if waited > _LOG_AFTER_SECONDS and not is_logged:
                logger().info(message)
                is_logged = True
            raise_if_stop_requested("waited for an operator")
            time.sleep(min(POLL_SECONDS, 0.02 + waited))  # ranks that find an operator compiled wait for a moment only
        yield


def _others(lock: Any, folder: Path) -> str | None:
    """The process that compiles in the folder; None: this process holds the lock from now on."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "another process"
    except OSError as problem:
        if problem.errno not in _NO_LOCKS:
            raise
        logger().warning(f"{folder}: its file system has no locks; let one run compile before you start a second one")
        return None
    if compilers := processes_at(folder):  # compilers run in the folder
        return f"process {min(compilers)}"
    (folder / TORCH_LOCK).unlink(missing_ok=True)
    return None
