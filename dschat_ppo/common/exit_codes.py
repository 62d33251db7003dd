"""The exit codes of a run, which exception ends it with which code, and whether memory ran out."""

from __future__ import annotations

import errno
import os

from dschat_ppo.errors import StopRequested, StorageError, UnhealthyRun, UserError

DONE = 0  # finished, or stopped on request with everything saved
UNEXPECTED = 1  # any other exception; also a second Ctrl-C
USER_ERROR = 2  # flags, data or models that the user has to correct
NOT_FINITE = 3  # NaN or infinity
NOT_WRITTEN = 4  # the disk is full, or the output may not be written
RANK_LOST = 5  # a rank hangs, or its process has ended
INTERRUPTED = 130  # of the `dschat-*` commands after Ctrl-C, as of a program that SIGINT ends
UNHEALTHY = 6  # a health event ended it (--stop_on_health), with everything saved

HOW_TO_RESUME = "run the same command again to resume from the newest checkpoint"

_CANNOT_WRITE = tuple(os.strerror(error) for error in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))
# The messages of gloo, NCCL and the store of torch.distributed when the process at the other end
# has ended.
_DISCONNECTED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "recvValue failed",
    "failed to recv",
    "Connection was likely closed",
    "remote process exited",
    "ncclRemoteError",
    "ncclSystemError",
    "NCCL communicator was aborted",
)


def exit_code(problem: BaseException) -> int:
    """The code with which an exception ends the run."""
    if isinstance(problem, StopRequested):
        return DONE
    if isinstance(problem, StorageError) or any(text in str(problem) for text in _CANNOT_WRITE):
        return NOT_WRITTEN
    if isinstance(problem, UserError):
        return USER_ERROR
    if isinstance(problem, UnhealthyRun):
        return UNHEALTHY
    if isinstance(problem, FloatingPointError):
        return NOT_FINITE
    if peer_disconnected(problem):
        return RANK_LOST
    return UNEXPECTED


def peer_disconnected(problem: BaseException) -> bool:
    """Whether a collective failed because the process of another rank has ended, judged by the
    library's message."""
    return isinstance(problem, RuntimeError) and any(text in str(problem) for text in _DISCONNECTED)


_MESSAGES = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def ran_out_of_memory(problem: BaseException) -> bool:
    """Whether memory ran out, also if another error replaced that one, as at the end of a CUDA
    graph capture."""
    seen: BaseException | None = problem
    while seen is not None:
        of_torch = type(seen).__name__ == "OutOfMemoryError" or any(
            message in str(seen) for message in _MESSAGES
        )
        # torch is not imported here
        if isinstance(seen, MemoryError) or (isinstance(seen, RuntimeError) and of_torch):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
