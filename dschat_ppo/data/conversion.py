"""Conversion of a data file to a `datasets` table, first in a child process: a malformed file can crash pyarrow."""

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
from dschat_ppo.runtime.processes import signal_when_parent_ends

POLL_SECONDS = 0.5
EMPTY = "the data set is empty"
_NO_ROWS = ("corresponds to no data", "BatchSize must be greater than 0, got 0")  # `datasets` of JSON, of Parquet


def load_table(builder: str, settings: dict[str, Any]) -> Dataset:
    """Load one file with the `datasets` builder "json", "csv" or "parquet" and its settings."""
    try:
        return datasets.load_dataset(builder, split="train", **settings)
    except datasets.exceptions.DatasetGenerationError as problem:  # its own text names no cause
        raise problem.__cause__ or problem from None


def conversion_error(builder: str, settings: dict[str, Any]) -> str | None:
    """Convert a file in a forked child process.

    The table stays in the cache of `datasets`, where `load_table` finds it. The file is therefore converted once, and a
    file that crashes the reader ends only the child.

    Returns:
        None on success, `EMPTY` for a file without rows, or the reason why the file cannot be read.

    Raises:
        StopRequested: the run receives a stop request.
        EOFError: the child ended because of a stop request; see `stop_requests.subprocesses_may_stop`.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_convert, args=(sender, os.getpid(), builder, settings), daemon=True)
    process.start()
    sender.close()
    try:
        while not receiver.poll(POLL_SECONDS):
            stop_requests.raise_if_stop_requested("prepared the data")
        return receiver.recv()
    except EOFError:  # the child ended without a result
        process.join()
        if stop_requests.requested():
            raise
        code = process.exitcode or 0
        end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"its reader ended with {end}: the file is damaged or nested too deeply, or memory is short"
    finally:  # also after a second Ctrl-C, while the child still converts
        process.kill()
        process.join()


def _convert(sender: Connection, parent: int, builder: str, settings: dict[str, Any]) -> None:
    """Body of the child process: convert, then send the result of `conversion_error`."""
    signal_when_parent_ends(signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the signal was set up
        return
    faulthandler.disable()  # the parent reports a crash in one line
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        with reading("cannot be read as a table"):
            rows = load_table(builder, settings)
            rows.data.table.validate(full=True)  # the only check that text in Parquet is UTF-8
        sender.send(None if len(rows) else EMPTY)
    except UserError as problem:
        sender.send(EMPTY if any(text in str(problem) for text in _NO_ROWS) else str(problem))
