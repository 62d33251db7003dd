"""Forked processes that prepare data: they end with the run, and the run ends with one line if one is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

from datasets import Dataset, Features, concatenate_datasets

from dschat_ppo.common.processes import signal_when_parent_ends
from dschat_ppo.common.stop_requests import raise_if_stop_requested
from dschat_ppo.errors import StopRequested, UserError

Result = TypeVar("Result")

_BATCH_ROWS = 512  # enough for the tokenizer; rows of 10k tokens then take some 100 MB in a worker
FEW_ROWS = 5000  # below it one process is done before others have started
_POLL_SECONDS = 0.5
_SIGNAL_SECONDS = 1.0  # for the signal that ended a process to reach this one too
_ENDED = (
    "a process that prepares data has ended (its own message, if any, is above), most often because memory ran out: "
    "lower --preprocessing_num_workers and run the same command again"
)


def worker_count(chosen: int | None, rows: int) -> int:
    """How many processes prepare `rows` rows: `chosen`, or one per usable core (other ranks wait); one for few rows."""
    if chosen is not None:
        return chosen
    return len(os.sched_getaffinity(0)) if rows >= FEW_ROWS else 1


def mapped(
    table: Dataset, function: Callable[..., Any], features: Features | None, key: str, folder: Path,
    chosen: int | None, doing: str,
) -> Dataset:  # fmt: skip
    """`function(batch, indices)` of all rows, in `worker_count(chosen, ...)` processes; written to `folder`."""
    workers = max(1, min(len(table), worker_count(chosen, len(table))))
    bounds = [len(table) * number // workers for number in range(workers + 1)]

    def part(number: int) -> Dataset:
        first, end = bounds[number : number + 2]
        return table.select(range(first, end)).map(
            lambda batch, indices: function(batch, [first + index for index in indices]), batched=True,
            batch_size=_BATCH_ROWS, with_indices=True, remove_columns=table.column_names, new_fingerprint=key,
            cache_file_name=str(folder / f"rows_{number}.arrow"), features=features,
        )  # fmt: skip

    return concatenate_datasets(in_processes(workers, part, doing))


def in_processes(count: int, work: Callable[[int], Result], doing: str) -> list[Result]:
    """[work(0), ..., work(count - 1)], each in a forked process of its own; without forks for a `count` of 1.

    An error of `work` is raised here; one that nobody expects is a `RuntimeError` with its traceback. `UserError` if a
    process ends without a result, and `StopRequested` if the run is to stop while it `doing`; then the others are
    killed.
    """
    if count == 1:
        return [work(0)]
    fork, processes = multiprocessing.get_context("fork"), []
    results: dict[int, Any] = {}
    waiting: dict[Any, int] = {}  # the end of a pipe -> number of the process at its other end
    try:
        for number in range(count):
            reader, writer = fork.Pipe(duplex=False)
            process = fork.Process(target=_send, args=(writer, work, number, os.getpid()))
            process.start()
            processes.append(process)
            waiting[reader] = number
            writer.close()  # the end of the process closes the pipe
        while waiting:
            raise_if_stop_requested(doing)
            for ready in connection.wait(list(waiting), _POLL_SECONDS):
                found = _receive(ready, doing)
                if isinstance(found, Exception):
                    raise found
                results[waiting.pop(ready)] = found
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[number] for number in range(count)]


def _send(writer: Any, work: Callable[[int], object], number: int, parent: int) -> None:
    """Body of a process."""
    signal_when_parent_ends(signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for each process
    found: object
    try:
        found = work(number)
    except (UserError, OSError, StopRequested) as problem:
        found = problem
    except Exception:  # noqa: BLE001  the process that waits raises it
        found = RuntimeError(f"in a process that prepares data:\n{traceback.format_exc()}")
    writer.send(found)


def _receive(reader: Any, doing: str) -> object:
    try:
        return reader.recv()
    except EOFError:
        time.sleep(_SIGNAL_SECONDS)
        raise_if_stop_requested(doing)
        raise UserError(_ENDED) from None
