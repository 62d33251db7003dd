"""Exit codes of a run by the exception that ends it."""

import errno

import pytest

from dschat_ppo.errors import NonFiniteError, StopRequested, StorageError, UnhealthyRun, UserError
from dschat_ppo.runtime.exit_codes import exit_code, peer_disconnected

GLOO = (
    "[../gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:34502: {}. This is typically caused by a remote worker"
)


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (StopRequested("saved"), 0),
        (ZeroDivisionError("x"), 1),
        (KeyboardInterrupt(), 1),
        (RuntimeError("shapes differ"), 1),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), 1),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 1),  # a web service, not a rank
        (UserError("--x"), 2),
        (FloatingPointError("nan"), 3),
        (NonFiniteError("nan"), 3),
        (StorageError("full"), 4),
        (UnhealthyRun("kl_spike"), 6),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 4),
        (OSError(errno.EROFS, "Read-only file system", "x"), 4),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "x"), 4),
        (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), 4),  # safetensors
        (RuntimeError(GLOO.format("Connection reset by peer")), 5),
        (RuntimeError(GLOO.format("Connection closed by peer")), 5),
    ],
    ids=str,
)
def test_the_exit_code_of_each_exception(problem, code):
    assert exit_code(problem) == code


def test_messages_of_a_disconnected_peer():
    assert peer_disconnected(RuntimeError("NCCL error: remote process exited or there was a network error"))
    assert not peer_disconnected(RuntimeError("NCCL error: invalid usage"))
    assert not peer_disconnected(OSError("Broken pipe"))
