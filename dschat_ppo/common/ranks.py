"""The number of this process among the ranks, from the variables that the launcher sets, and a port
for those that have no launcher; without torch (see `common/dist.py`)."""

from __future__ import annotations

import os
import socket


def world_size() -> int:
    """Number of ranks, which the launcher sets: known before the process group exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process among all ranks."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The number of this process among the ranks of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Number of ranks on this machine; all ranks, if the launcher does not set it."""
    return int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", world_size())))


def machines() -> int:
    """Number of machines, which have the same number of ranks, in order."""
    return world_size() // local_world_size()


def is_main() -> bool:
    """True on rank 0, which writes files and prints."""
    return rank() == 0


def free_port() -> int:
    """A port of this machine that no program uses, at which ranks can meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
