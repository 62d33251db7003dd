"""The processes that prepare data, and what happens when one of them, or the one that started them, is killed."""

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

from dschat_ppo.errors import UserError
from dschat_ppo.runtime import stop_requests
from dschat_ppo.runtime.first_failure import DONE, USER_ERROR
from dschat_ppo.runtime.processes import children
from dschat_ppo.runtime.watchdog import give_up

POLL_SECONDS = 0.5
IDLE_SECONDS = 60.0
STOP_SECONDS = 10.0  # for the pool to end when its workers are killed
_HINT = (
    "a process that prepares data was killed, most often for want of memory: lower --preprocessing_num_workers and run "
    "the same command again"
)


@dataclass
class _Forks:
    """A pipe whose write end only the process that opened it holds; None: outside `data_workers`, or not this one."""

    reader: int | None = None
    writer: int | None = None


_FORKS = _Forks()


@contextmanager
def data_workers(count: int | None) -> Iterator[None]:
    """For one `Dataset.map` over `count` processes, of which one may be killed.

    `datasets` notices when a worker of its pool was replaced. But a worker that is killed while it waits for work holds
    the pool's lock, for which then all others and the end of the pool wait for ever; so a thread looks too, and ends
    the process.

    Workers, and the manager of their queue, end with the process, even if it is killed.

    Raises:
        UserError: a worker was killed, and the pool has noticed.
    """
    if count is None or count < 2:
        yield
        return
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(over,), daemon=True)
    watch.start()
    _look_at_forks()
    _FORKS.reader, _FORKS.writer = os.pipe()
    try:
        yield
    except RuntimeError as problem:
        if "abruptly died" not in str(problem):
            raise
        raise UserError(_HINT) from problem
    finally:
        os.close(_FORKS.reader)
        os.close(_FORKS.writer)
        _FORKS.reader = _FORKS.writer = None
        over.set()
        watch.join()


@cache
def _look_at_forks() -> None:
    """Once in a process, since it cannot be undone."""
    os.register_at_fork(after_in_child=_end_with_parent)


def _end_with_parent() -> None:
    """For a forked process. The kernel's signal at a parent's end would come when the thread that forked ends, and the
    thread of the pool that replaces workers ends before the pool."""
    if _FORKS.writer is not None:
        os.close(_FORKS.writer)
        _FORKS.writer = None
    if _FORKS.reader is not None:
        threading.Thread(target=_wait_for_the_end, args=(_FORKS.reader,), daemon=True).start()


def _wait_for_the_end(reader: int) -> None:
    """Without computing, which `_watch` would take for work."""
    os.read(reader, 1)  # nobody writes: it returns when the other end is closed
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(over: threading.Event) -> None:
    """Workers, while there are any, compute all the time; where none of them does any more the pool is lost.

    Once the run is asked to stop they are killed, and so are those that the pool puts in their place: the launcher's
    signal ends them alone, which the pool may not notice, and a Ctrl-C without a launcher does not. The pool's end may
    then wait for ever too, for the lock of a worker that was killed; there is nothing to save, and the process ends.
    """
    before, ticks, since, asked = set(children()), -1, time.monotonic(), math.inf
    while not over.wait(POLL_SECONDS):
        workers = {pid: process for pid, process in children().items() if pid not in before}
        now = sum(process.ticks for process in workers.values())
        if now != ticks or not workers:
            ticks, since = now, time.monotonic()
        idle = time.monotonic() - since > IDLE_SECONDS
        if stop_requests.noticed():
            asked = min(asked, time.monotonic())
        if idle or asked < math.inf:
            for pid in workers:  # they would wait for ever too
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if time.monotonic() - asked > STOP_SECONDS:
            give_up(
                f"stopped ({stop_requests.reason()}) while it prepared the data; run the same command again\n", DONE
            )
        if idle:
            give_up(f"error: {_HINT}\n", USER_ERROR)
