"""The processes that prepare data, and what happens when one of them, or the one that started them, is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

from dschat_ppo.common import stopping
from dschat_ppo.common.processes import children, signal_at_parents_end
from dschat_ppo.common.watchdog import give_up
from dschat_ppo.errors import UserError

POLL_SECONDS = 0.5
IDLE_SECONDS = 60.0
_HINT = (
    "a process that prepares data was killed, most often for want of memory: lower --preprocessing_num_workers and run "
    "the same command again"
)


@dataclass
class _Forks:
    """Processes that this thread of this process forks end with it; None: outside `data_workers`."""

    thread: int | None = None
    parent: int = 0


_FORKS = _Forks()


@contextmanager
def data_workers(count: int | None) -> Iterator[None]:
    """For one `Dataset.map` over `count` processes, of which one may be killed.

    `datasets` notices when a worker of its pool was replaced. But a worker that is killed while it waits for work holds
    the pool's lock, for which then all others and the end of the pool wait for ever; so a thread looks too, and ends
    the process.

    Workers and the manager of their queue end with the process, even if it is killed (on Linux). They are forked by
    the thread that runs the block. A worker that the pool's own thread forks in the place of one that was killed is
    left out: that thread ends before the pool does, and the kernel would take its end for the process's. `datasets`
    ends the pool then.

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
    _FORKS.thread, _FORKS.parent = threading.get_ident(), os.getpid()
    try:
        yield
    except RuntimeError as problem:
        if "abruptly died" not in str(problem):
            raise
        raise UserError(_HINT) from problem
    finally:
        _FORKS.thread = None
        over.set()
        watch.join()


@cache
def _look_at_forks() -> None:
    """Once in a process, since it cannot be undone."""
    os.register_at_fork(after_in_child=_end_with_parent)


def _end_with_parent() -> None:
    if _FORKS.thread != threading.get_ident():
        _FORKS.thread = None
        return
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != _FORKS.parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)
    _FORKS.parent = os.getpid()  # of what this process forks in turn


def _watch(over: threading.Event) -> None:
    """Workers, while there are any, compute all the time; where none of them does any more the pool is lost.

    Once the run is asked to stop they are killed, and so are those that the pool puts in their place: the launcher's
    signal ends them alone, which the pool may not notice, and a Ctrl-C without a launcher does not.
    """
    before, ticks, since = set(children()), -1, time.monotonic()
    while not over.wait(POLL_SECONDS):
        workers = {pid: process for pid, process in children().items() if pid not in before}
        now = sum(process.ticks for process in workers.values())
        if now != ticks or not workers:
            ticks, since = now, time.monotonic()
        idle = time.monotonic() - since > IDLE_SECONDS
        if idle or stopping.noticed():
            for pid in workers:  # they would wait for ever too
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if idle:
            give_up(f"error: {_HINT}\n")
