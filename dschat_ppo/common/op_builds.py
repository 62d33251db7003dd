"""Operators that DeepSpeed compiles at first use, and the lock that a killed compilation leaves behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from dschat_ppo.common.logging import logger
from dschat_ppo.common.processes import own_names
from dschat_ppo.common.progress import beat

_COMPILERS = {"ninja", "c++", "g++", "cc1plus", "clang++", "nvcc", "cicc", "ptxas", "hipcc"}
PATIENCE_SECONDS = 30.0


def held_locks(operator: str) -> list[Path]:
    """Locks of a compilation of `operator` for this Python."""
    return _files(operator, "lock")


def is_built(operator: str) -> bool:
    """Whether `operator` was compiled for this Python before, or came with DeepSpeed."""
    from deepspeed.git_version_info import installed_ops

    return bool(installed_ops.get(operator) or _files(operator, f"{operator}.so"))


def _files(operator: str, name: str) -> list[Path]:
    """The files of this name where torch keeps what it compiles."""
    from torch.utils.cpp_extension import get_default_build_root

    own = os.environ.get("TORCH_EXTENSIONS_DIR")
    version = f"py{sys.version_info.major}{sys.version_info.minor}"
    places = [Path(own)] if own else Path(get_default_build_root()).glob(f"{version}*_*")
    return sorted(file for place in places if (file := place / operator / name).exists())


def wait_for_build(operator: str, patience: float = PATIENCE_SECONDS, poll: float = 1.0) -> bool:
    """Call this before an operator is loaded: loading waits for ever for the lock of a compilation that was killed.

    Says so where the operator will be compiled, which nobody else does.

    Returns when there is no lock, or when it was there for `patience` seconds in which no compiler of this user ran;
    then a warning names it. Loading goes on once it is taken away.

    Returns:
        Whether there is no lock.
    """
    if not is_built(operator):
        logger().info(f"DeepSpeed compiles its operator {operator}, once on this machine: this may take minutes")
    quiet_since = time.monotonic()
    while locks := held_locks(operator):
        if not _COMPILERS.isdisjoint(own_names()):
            quiet_since = time.monotonic()
            beat()
        if time.monotonic() - quiet_since >= patience:
            names = " ".join(map(str, locks))
            logger().warning(
                f"the lock of an earlier compilation of DeepSpeed's operator {operator} is there, and no compiler "
                f"runs: the compilation was killed, and the run waits until you take the lock away: rm {names}"
            )
            return False
        time.sleep(poll)
    return True
