"""Operators that DeepSpeed compiles at first use: one folder for each environment, one compilation at a time.

torch before 2.14 locks a compilation by a file that only its owner removes. If the owner is killed, every later run
would wait forever.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dschat_ppo.common.atomic_files import locked, make_folder
from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.logging import quiet_prints
from dschat_ppo.common.stop_requests import requested, subprocesses_may_stop
from dschat_ppo.errors import UserError, in_one_line

OWN_LOCK, TORCH_LOCK = "dschat_ppo.lock", "lock"
_QUIET_SECONDS = 5.0  # ranks that find an operator compiled load it in turn


def guard_builds() -> None:
    """Let DeepSpeed compile operators in this environment's folder, in one process at a time. Every rank calls this
    before it loads an operator. `TORCH_EXTENSIONS_DIR`, if the user sets it, is the folder."""
    from deepspeed import ops
    from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException, OpBuilder

    jit_load = OpBuilder.jit_load
    if hasattr(jit_load, "__wrapped__"):
        return

    @functools.wraps(jit_load)
    def load(builder: Any, *args: Any, **kwargs: Any) -> Any:
        # only here, because this imports torch's compilation of extensions
        folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder_of_environment())), builder.name)
        try:
            with watchdog_paused(), _exclusive(folder):
                if not list(folder.glob("*.so")):
                    # to stderr: any rank may compile, and DeepSpeed's prints to stdout are suppressed
                    text = f"DeepSpeed compiles its operator {folder.name} in {folder}: one to three minutes, once"
                    print(text, file=sys.stderr, flush=True)
                return jit_load(builder, *args, **kwargs)
        except (RuntimeError, OSError, ImportError, CUDAMismatchException, MissingCUDAException) as problem:
            if requested():  # a stop ends compilers
                raise
            raise UserError(
                f"DeepSpeed's operator {folder.name} cannot be compiled or loaded ({in_one_line(problem)}): it needs "
                "ninja, a C++ compiler (g++, or that of CXX), the header files of Python (python3-dev) and, on a GPU, "
                f"nvcc of torch's CUDA version (CUDA_HOME). If they are there, remove the folder {folder}, which "
                "another torch or Python may have made, and run the same command again"
            ) from problem

    OpBuilder.jit_load = load
    # Else DeepSpeed would compile its all-reduce in shared memory, for the layers of its own tensor parallelism.
    ops.__compatible_ops__ = {}


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of an operator's folder. Then torch's own lock is of a dead process, and is removed."""
    try:
        make_folder(folder)
    except OSError as problem:
        where = "set TORCH_EXTENSIONS_DIR to another folder for DeepSpeed's operators"
        raise UserError(f"{folder}: cannot be written ({problem.strerror}): {where}") from None
    waits = f"this rank waits for DeepSpeed's operator {folder.name}: another process is compiling it"
    with locked(folder / OWN_LOCK, waits, "waited for an operator", _QUIET_SECONDS):
        (folder / TORCH_LOCK).unlink(missing_ok=True)
        yield


def folder_of_environment() -> Path:
    """The folder for operators of this Python with these libraries, so that no other environment recompiles them."""
    import deepspeed
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    versions = f"py{platform.python_version()}_torch{torch.__version__}_deepspeed{deepspeed.__version__}"
    place = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]  # the commands of the compiler hold its paths
    return Path(get_default_build_root(), "dschat_ppo", f"{versions}_{place}")


def load_operator(builder: str) -> None:
    """Load an operator of DeepSpeed, such as "CPUAdamBuilder", compiled if needed, before the models are loaded."""
    from deepspeed.accelerator import get_accelerator

    with quiet_prints(), subprocesses_may_stop("compiled an operator"):
        get_accelerator().create_op_builder(builder).load()
