"""Convert a data file in a child process: a malformed file can crash the library that reads it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

from dschat_ppo.errors import UserError, reading
from dschat_ppo.runtime import stop_requests
from dschat_ppo.runtime.processes import signal_when_parent_ends

POLL_SECONDS = 0.5
_OUT_OF_MEMORY = "memory is too short to convert it whole: free memory, split the file, or read it with --streaming"


def conversion_error(convert: Callable[[], None]) -> str | None:
    """Run `convert` in a forked child process, so that a file that crashes the reader ends only the child. Returns
    None, or the reason why the file cannot be read.

    Raises:
        EOFError: the child ended because of a stop request; see `stop_requests.subprocesses_may_stop`.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_convert, args=(sender, os.getpid(), convert), daemon=True)
    process.start()
    sender.close()
    try:
        while not receiver.poll(POLL_SECONDS):
            stop_requests.raise_if_stop_requested("prepared the data")
        problem: str | None = receiver.recv()
        return problem
    except EOFError:  # the child ended without a result
        process.join()
        if stop_requests.requested():
            raise
        code = process.exitcode or 0
        if code == -signal.SIGKILL:  # the system's choice when memory is short
            return _OUT_OF_MEMORY
        end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"its reader ended with {end}: the file is damaged or nested too deeply"
    finally:  # also after a second Ctrl-C, while the child still converts
        process.kill()
        process.join()


def _convert(sender: Connection, parent: int, convert: Callable[[], None]) -> None:
    """Body of the child process: convert, then send the result of `conversion_error`."""
    signal_when_parent_ends(signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the signal was set up
        return
    faulthandler.disable()  # the parent reports a crash in one line
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        with reading("cannot be read as a table"):
            try:
                convert()
            except MemoryError:  # pyarrow's derives from it
                raise UserError(_OUT_OF_MEMORY) from None
        sender.send(None)
    except UserError as problem:
        sender.send(str(problem))
