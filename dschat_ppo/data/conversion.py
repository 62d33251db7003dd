"""A data file becomes a table of `datasets` in a process of its own first: a malformed file can crash pyarrow."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import datasets
from datasets import Dataset

from dschat_ppo.errors import UserError, reading
from dschat_ppo.runtime import stop_requests
from dschat_ppo.runtime.processes import signal_at_parents_end

POLL_SECONDS = 0.5
EMPTY = "the data set is empty"
_NO_ROWS = ("corresponds to no data", "BatchSize must be greater than 0, got 0")  # `datasets` of JSON, of Parquet


def load_table(builder: str, settings: dict[str, Any]) -> Dataset:
    """The rows of one file: `builder` ("json", "csv", "parquet") and `settings` are those of `datasets`."""
    try:
        return datasets.load_dataset(builder, split="train", **settings)
    except datasets.exceptions.DatasetGenerationError as problem:  # it says only that something is wrong
        raise problem.__cause__ or problem from None


def conversion_error(builder: str, settings: dict[str, Any]) -> str | None:
    """Convert a file in a forked process; what is wrong with it, `EMPTY` for no rows, or None.

    The result stays in the cache of `datasets`, where `load_table` finds it. So the file is read once, and a file that
    crashes its reader ends the forked process alone.

    Raises:
        StopRequested: the run is asked to stop.
        EOFError: the process has ended because the run is asked to stop; see `stopping.helpers_may_end`.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(theirs, os.getpid(), builder, settings), daemon=True)
    process.start()
    theirs.close()
    try:
        while not ours.poll(POLL_SECONDS):
            stop_requests.end_if_asked("prepared the data")
        return ours.recv()
    except EOFError:  # it ended without a word
        process.join()
        if stop_requests.requested():
            raise
        code = process.exitcode or 0
        end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"its reader ended with {end}: the file is damaged or nested too deeply, or memory is short"
    finally:  # after a second Ctrl-C it still works
        process.kill()
        process.join()


def _try(answer: Connection, parent: int, builder: str, settings: dict[str, Any]) -> None:
    """In the forked process: convert, and answer."""
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was asked
        return
    faulthandler.disable()  # of a crash the parent says in one line what it means
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        with reading("cannot be read as a table"):
            rows = load_table(builder, settings)
            rows.data.table.validate(full=True)  # nothing else looks whether text in Parquet is UTF-8
        answer.send(None if len(rows) else EMPTY)
    except UserError as problem:
        answer.send(EMPTY if any(text in str(problem) for text in _NO_ROWS) else str(problem))
