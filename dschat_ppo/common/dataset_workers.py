"""Forked processes that prepare data: they end with the run, and the run ends with one line if one
is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from dschat_ppo.common.processes import signal_when_parent_ends
from dschat_ppo.common.stop_requests import raise_if_stop_requested
from dschat_ppo.errors import UserError

Result = TypeVar("Result")

FEW_ROWS = 5000  # below it one process is done before others have started
_POLL_SECONDS = 0.5
_SIGNAL_SECONDS = 1.0  # for the signal that ended a process to reach this one too
# of the processes, which inherit it by their fork: it need not be pickled
_WORK: list[Callable[[int], Any]] = []
_A_PROCESS_ENDED = (
    "a process that prepares data has ended (its own message, if any, is above), most often because"
    " memory ran out: lower --preprocessing_num_workers and run the same command again"
)


def worker_count(chosen: int | None, rows: int) -> int:
    """How many processes prepare `rows` rows: `chosen`, or one per usable core (other ranks wait);
    one for few rows."""
    if chosen is None:
        chosen = 1
        if rows >= FEW_ROWS:
            chosen = len(os.sched_getaffinity(0))
    return max(1, min(rows, chosen))


def in_processes(count: int, work: Callable[[int], Result], doing: str) -> list[Result]:
    """[work(0), ..., work(count - 1)], in `count` forked processes; without forks for a `count` of
    1.

    An error of `work` is raised here. `UserError` if a process ends without a result, and
    `StopRequested` if the run is to stop while it `doing`; then the others are killed.
    """
    if count == 1:
        return [work(0)]
    _WORK[:] = [work]
    pool = futures.ProcessPoolExecutor(
        count, multiprocessing.get_context("fork"), _begin_worker, (os.getpid(),)
    )
    try:
        calls = [pool.submit(_work, index) for index in range(count)]
        while True:
            done, not_done = futures.wait(calls, _POLL_SECONDS, futures.FIRST_EXCEPTION)
            if not not_done:
                break
            for call in done:
                call.result()  # raises its error
            raise_if_stop_requested(doing)
        return [call.result() for call in calls]
    except BrokenProcessPool:
        time.sleep(_SIGNAL_SECONDS)
        raise_if_stop_requested(doing)
        raise UserError(_A_PROCESS_ENDED) from None
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown()
        _WORK.clear()


def _begin_worker(parent: int) -> None:
    signal_when_parent_ends(signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for each process


def _work(index: int) -> Any:
    return _WORK[0](index)
