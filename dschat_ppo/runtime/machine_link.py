"""Messages between the machines of a run, outside of collectives: heartbeats, failures and stop requests.

In a thread, the first rank of each machine exchanges a few numbers once a second through the store of rank 0. So each
machine learns of failures and stop requests of the others even while a collective hangs or none is in progress. If the
network fails, it knows which machine does not answer.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dschat_ppo.common import ranks
from dschat_ppo.common.heartbeat import running_clock
from dschat_ppo.runtime.first_failure import FirstFailure, FirstFailureRecord

POLL_SECONDS = 1.0
ANSWER_SECONDS = 2.5 * POLL_SECONDS  # a running machine answers within this time
LEAVE_SECONDS = 4.0  # time for the other machines to learn how this one ends
_LEFT = 10**12  # added to the count of a machine that ends normally


@dataclass(frozen=True)
class Failure:
    """A failure on another machine: the number of the machine, the rank, and the exit code."""

    machine: int
    rank: int
    code: int


class MachineLink:
    """The thread of the first rank of a machine: passes on failures and stop requests in `record`, and enters others'.

    `may_pass_on_stop`: whether a stop request here comes from the user; a launcher also stops the other ranks after one
    has failed.
    """

    def __init__(self, record: FirstFailureRecord, may_pass_on_stop: Callable[[], bool]):
        self._record = record
        self._may_pass_on_stop = may_pass_on_stop
        self._names: list[str] = []
        self._answers = dict.fromkeys(range(ranks.machines()), running_clock())  # machine -> time of its last one
        self._counts = dict.fromkeys(range(ranks.machines()), 0)
        self._failure: Failure | None = None
        self._own: FirstFailure | None = None  # to be passed on
        self._leaves = False
        self._stop_is_known = False
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine link", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> Failure | None:
        """The first failure of another machine that has been passed on, or None."""
        return self._failure

    def silent(self, seconds: float) -> list[int]:
        """Machines that have not answered for this long and have not ended normally. If this machine cannot exchange
        anything, that is the machine of rank 0, which holds the store."""
        now, mine = running_clock(), ranks.machine()
        late = [machine for machine, when in self._answers.items() if now - when >= seconds]
        if mine in late:
            late = [0] if mine else []
        return [machine for machine in late if self._counts[machine] < _LEFT]

    def left(self) -> list[int]:
        """Machines whose first rank has ended, after it passed on a failure if there was one."""
        return [machine for machine, count in self._counts.items() if count >= _LEFT]

    def describe(self, machine: int) -> str:
        """ "machine beta (ranks 2, 3)"."""
        first = machine * ranks.local_world_size()
        numbers = ", ".join(map(str, range(first, first + ranks.local_world_size())))
        name = self._names[machine] if self._names else str(machine)
        return f"machine {name} ({'ranks' if ranks.local_world_size() > 1 else 'rank'} {numbers})"

    def leave(self) -> None:
        """Tell the other machines how this one ends, and end the thread. Waits `LEAVE_SECONDS` at most."""
        self._leaves = True
        self._wake.set()
        own = self._answers[ranks.machine()]
        self._ended.wait(LEAVE_SECONDS if running_clock() - own < ANSWER_SECONDS else 0.0)

    def _run(self) -> None:
        try:
            store, line = _open_store(), _open_line()
            store.set(f"name/{ranks.machine()}", socket.gethostname())
            keys = [f"name/{machine}" for machine in range(ranks.machines())]
            store.wait(keys)
            self._names = [name.decode() for name in store.multi_get(keys)]
            for machine in range(ranks.machines()):
                store.add(f"count/{machine}", 0)  # every key exists from here on
            while not self._leaves and not _is_closed(line):
                self._exchange(store)
                self._wake.wait(POLL_SECONDS)
                self._wake.clear()
            if not _is_closed(line):
                self._say_goodbye(store)
        except (RuntimeError, OSError):  # of the store: rank 0 has ended, or the network is down; see `silent`
            pass
        finally:
            self._ended.set()

    def _exchange(self, store: Any) -> None:
        store.add(f"count/{ranks.machine()}", 1)
        self._pass_on(store)
        keys = [f"count/{machine}" for machine in self._counts]
        now = running_clock()
        for machine, count in enumerate(map(int, store.multi_get(keys))):
            if count != self._counts[machine]:
                self._counts[machine], self._answers[machine] = count, now
        if self._failure is None and store.check(["failure"]):
            found = Failure(**json.loads(store.get("failure")))
            if found.machine != ranks.machine():
                self._failure = found
        if not self._stop_is_known and store.add("stop", 0) > 0:
            self._stop_is_known = True
            self._record.request_stop()

    def _pass_on(self, store: Any) -> None:
        """Pass on a failure or a stop request of this machine."""
        first = self._record.read()
        if first is not None and first.code and first != self._own:
            self._own = first
            if first.rank // ranks.local_world_size() == ranks.machine():  # else it came from another machine
                own = Failure(ranks.machine(), first.rank, first.code)
                store.compare_set("failure", "", json.dumps(asdict(own)))
        if not self._stop_is_known and self._may_pass_on_stop():
            self._stop_is_known = True
            store.add("stop", 1)

    def _say_goodbye(self, store: Any) -> None:
        """The store ends with rank 0: it waits until each machine that answers has ended or has asked once more."""
        self._pass_on(store)
        store.add(f"count/{ranks.machine()}", _LEFT)
        silent = self.silent(ANSWER_SECONDS)
        others = [f"count/{machine}" for machine in self._counts if machine and machine not in silent]
        if ranks.machine() != 0 or not others:
            return
        before = [int(count) for count in store.multi_get(others)]
        deadline = running_clock() + LEAVE_SECONDS
        while running_clock() < deadline:
            now = [int(count) for count in store.multi_get(others)]
            if all(count >= _LEFT or count > first + 1 for count, first in zip(now, before, strict=True)):
                return
            time.sleep(POLL_SECONDS / 5)


def _open_line() -> socket.socket:
    """A connection to the store of rank 0 that carries nothing and closes when rank 0 ends. A call of a store whose
    rank 0 has ended would print a stack trace of C++."""
    return socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))


def _is_closed(line: socket.socket) -> bool:
    events = select.poll()
    events.register(line, select.POLLIN)
    return bool(events.poll(0))


def _open_store() -> Any:
    """A separate connection to the store of rank 0: a call may block for as long as the network is cut."""
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore  # not at the top: flags are parsed without torch

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(minutes=10))
    return PrefixStore(f"dschat_ppo_machines/{start}", store)
