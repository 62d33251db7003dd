"""Worker processes that prepare data: detect that one was killed, and end them with the process that started them."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

from dschat_ppo.common.heartbeat import TimeLeft
from dschat_ppo.errors import UserError
from dschat_ppo.runtime import stop_requests
from dschat_ppo.runtime.exit_codes import DONE, USER_ERROR
from dschat_ppo.runtime.processes import children
from dschat_ppo.runtime.watchdog import end_process

POLL_SECONDS = 0.5
IDLE_SECONDS = 60.0
FEW_ROWS = 5000  # below it one process is done before others have started
STOP_SECONDS = 10.0  # for the pool to end when its workers are killed
_TOKENIZER_THREADS = "TOKENIZERS_PARALLELISM"
_WORKER_KILLED = (
    "a process that prepares data was killed, most often because memory ran out: lower --preprocessing_num_workers and "
    "run the same command again"
)


@dataclass
class _Pipe:
    """A pipe whose write end only the process that opened it holds; None outside `data_workers`."""

    reader: int | None = None
    writer: int | None = None


_PIPE = _Pipe()


def worker_count(chosen: int | None, rows: int) -> int:
    """How many processes prepare `rows` rows: `chosen`, or one per usable core (other ranks wait); one for few rows."""
    if chosen is not None:
        return chosen
    return len(os.sched_getaffinity(0)) if rows >= FEW_ROWS else 1


@contextmanager
def data_workers(count: int | None) -> Iterator[None]:
    """For one `Dataset.map` over `count` processes, any of which may be killed.

    `datasets` notices when its pool replaced a worker, and this raises a `UserError`. But a worker that is killed while
    it waits for a task holds the lock of the pool: then all others, and the end of the pool, wait forever. A thread
    detects that and ends the process.

    Workers, and the manager of their queue, end with the process, even if it is killed. The tokenizer of a worker uses
    one thread.
    """
    if count is None or count < 2:
        yield
        return
    threads = os.environ.get(_TOKENIZER_THREADS)
    os.environ[_TOKENIZER_THREADS] = "false"
    done = threading.Event()
    thread = threading.Thread(target=_watch_workers, args=(done,), daemon=True)
    thread.start()
    _register_fork_handler()
    _PIPE.reader, _PIPE.writer = os.pipe()
    try:
        yield
    except RuntimeError as problem:
        if "abruptly died" not in str(problem):
            raise
        raise UserError(_WORKER_KILLED) from problem
    finally:
        os.close(_PIPE.reader)
        os.close(_PIPE.writer)
        _PIPE.reader = _PIPE.writer = None
        done.set()
        thread.join()
        del os.environ[_TOKENIZER_THREADS]
        if threads is not None:
            os.environ[_TOKENIZER_THREADS] = threads


@cache
def _register_fork_handler() -> None:
    """Once in a process, since it cannot be undone."""
    os.register_at_fork(after_in_child=_end_with_parent)


def _end_with_parent() -> None:
    """For a forked process: kill it when the process that opened the pipe has ended. The kernel's parent-death signal
    does not serve: it comes when the thread that forked ends, and the thread of the pool that replaces workers ends
    before the pool."""
    if _PIPE.writer is not None:
        os.close(_PIPE.writer)
        _PIPE.writer = None
    if _PIPE.reader is not None:
        threading.Thread(target=_kill_when_pipe_closes, args=(_PIPE.reader,), daemon=True).start()


def _kill_when_pipe_closes(reader: int) -> None:
    """Takes no CPU time, which `_watch_workers` would take for progress."""
    os.read(reader, 1)  # no process writes: it returns when the write end is closed
    os.kill(os.getpid(), signal.SIGKILL)


def _watch_workers(done: threading.Event) -> None:
    """End the process when the pool is lost: workers exist, and none has used the CPU for `IDLE_SECONDS`.

    Once the run is to stop, kill the workers, and those with which the pool replaces them: the launcher's signal ends
    only the first ones, which the pool may not notice, and a Ctrl-C without a launcher ends none. The end of the pool
    may then wait forever too, for the lock of a killed worker. There is nothing to save, so the process ends.
    """
    before, ticks, idle, stop_since = set(children()), -1, TimeLeft(IDLE_SECONDS), math.inf
    while not done.wait(POLL_SECONDS):
        workers = {pid: process for pid, process in children().items() if pid not in before}
        now = sum(process.ticks for process in workers.values())
        if now != ticks or not workers:
            ticks, idle = now, TimeLeft(IDLE_SECONDS)
        is_lost = idle.seconds() < 0
        if stop_requests.flag_is_set():
            stop_since = min(stop_since, time.monotonic())
        if is_lost or stop_since < math.inf:
            for pid in workers:  # else they would outlive the process
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if time.monotonic() - stop_since > STOP_SECONDS:
            message = f"stopped ({stop_requests.reason()}) while it prepared the data; run the same command again\n"
            end_process(message, DONE)
        if is_lost:
            end_process(f"error: {_WORKER_KILLED}\n", USER_ERROR)
