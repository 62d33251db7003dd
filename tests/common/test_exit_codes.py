"""Exit codes of a run by the exception that ends it."""

import errno

import pytest

from dschat_ppo.common.exit_codes import exit_code
from dschat_ppo.errors import NonFiniteError, StopRequested, StorageError, UnhealthyRun, UserError


@pytest.mark.parametrize(("problem", "code"), [
    (StopRequested("saved"), 0), (ZeroDivisionError("x"), 1), (KeyboardInterrupt(), 1), (UserError("--x"), 2),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), 1), (FloatingPointError("nan"), 3),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 1),  # a web service, not a rank
    (NonFiniteError("nan"), 3), (StorageError("full"), 4), (UnhealthyRun("kl_spike"), 6),
    (OSError(errno.ENOSPC, "No space left on device", "x"), 4), (OSError(errno.EROFS, "Read-only file system", "x"), 4),
    (OSError(errno.EDQUOT, "Disk quota exceeded", "x"), 4), (RuntimeError("NCCL error: invalid usage"), 1),
    (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), 4),  # safetensors
    (RuntimeError("[../gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:34502: Connection reset by peer"), 5),
    (RuntimeError("NCCL error: remote process exited or there was a network error"), 5),
], ids=str)  # fmt: skip
def test_the_exit_code_of_each_exception(problem, code):
    assert exit_code(problem) == code
