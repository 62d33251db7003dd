"""Forked processes that prepare data: they end with the run, and the run ends with one line if one is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from datasets import Dataset, Features, concatenate_datasets

from dschat_ppo.common.processes import signal_when_parent_ends
from dschat_ppo.common.stop_requests import raise_if_stop_requested
from dschat_ppo.errors import UserError

Result = TypeVar("Result")

_BATCH_ROWS = 512  # enough for the tokenizer; rows of 10k tokens then take some 100 MB in a worker
FEW_ROWS = 5000  # below it one process is done before others have started
_POLL_SECONDS = 0.5
_SIGNAL_SECONDS = 1.0  # for the signal that ended a process to reach this one too
_WORK: list[Callable[[int], Any]] = []  # of the processes, which inherit it by their fork: it need not be pickled
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
            cache_file_name=str(folder / f"rows_{number:05d}.arrow"), features=features,
        )  # fmt: skip

    return concatenate_datasets(in_processes(workers, part, doing))


def in_processes(count: int, work: Callable[[int], Result], doing: str) -> list[Result]:
    """[work(0), ..., work(count - 1)], in `count` forked processes; without forks for a `count` of 1.

    An error of `work` is raised here. `UserError` if a process ends without a result, and `StopRequested` if the run is
    to stop while it `doing`; then the others are killed.
    """
    if count == 1:
        return [work(0)]
    _WORK[:] = [work]
    pool = futures.ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _begin, (os.getpid(),))
    try:
        results = [pool.submit(_work, number) for number in range(count)]
        while (found := futures.wait(results, _POLL_SECONDS, futures.FIRST_EXCEPTION)).not_done:
            for result in found.done:
                result.result()  # raises its error
            raise_if_stop_requested(doing)
        return [result.result() for result in results]
    except BrokenProcessPool:
        time.sleep(_SIGNAL_SECONDS)
        raise_if_stop_requested(doing)
        raise UserError(_ENDED) from None
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown()
        _WORK.clear()


def _begin(parent: int) -> None:
    signal_when_parent_ends(signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for each process


def _work(number: int) -> Any:
    return _WORK[0](number)
