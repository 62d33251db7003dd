"""Shared memory (/dev/shm) of the ranks of one machine. Docker gives a container 64 MiB of it."""

from __future__ import annotations

import os
from pathlib import Path

from dschat_ppo.common import ranks
from dschat_ppo.errors import UserError

SHARED_MEMORY = Path("/dev/shm")
MIB = 2**20
CPU_RANK_BYTES = 66 * MIB  # DeepSpeed's buffer for all-reduce on a CPU
MORE = "give the container more (docker run --shm-size 8g, or --ipc host), or remount it: mount -o remount,size=8g"
_NCCL_MESSAGE = "shared memory segment"


def require_shared_memory(rank_bytes: int, folder: Path = SHARED_MEMORY) -> None:
    """Check that shared memory has `rank_bytes` for each rank of this machine; they take them once all have joined.

    The system reserves no memory for a file there. A rank that writes to a page for which there is none ends with a bus
    error, without a message.
    """
    if not folder.is_dir():
        return
    needed, space = ranks.local_world_size() * rank_bytes, os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free < needed:
        raise UserError(
            f"{folder} has {free // MIB} MiB free, and the {ranks.local_world_size()} ranks of this machine need "
            f"{-(-needed // MIB)} MiB of shared memory: {MORE} {folder}"
        )


def lacks_shared_memory(problem: BaseException) -> bool:
    """Whether NCCL could not make a segment of shared memory, judged by its message."""
    return isinstance(problem, RuntimeError) and _NCCL_MESSAGE in str(problem)
