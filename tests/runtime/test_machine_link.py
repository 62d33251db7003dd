"""What machines tell each other: failures, stop requests, and that they are alive. Two links share one store."""

import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from dschat_ppo.common import ranks
from dschat_ppo.runtime import machine_link
from dschat_ppo.runtime.first_failure import FirstFailureRecord
from dschat_ppo.runtime.machine_link import Failure, MachineLink

_MACHINE = threading.local()
_RUN = MachineLink._run


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Machines of two ranks that poll often; a thread has the number of its machine."""
    monkeypatch.setattr(machine_link, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(machine_link, "LEAVE_SECONDS", 2.0)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(ranks, "machine", lambda: getattr(_MACHINE, "number", 0))


class Machine:
    """A link whose thread belongs to machine `number`."""

    def __init__(self, number: int, folder, monkeypatch):
        folder.mkdir()
        self.number, self.wants_stop = number, False
        self.record = FirstFailureRecord(folder)

        def run_there(link: MachineLink) -> None:
            _MACHINE.number = number
            _RUN(link)

        monkeypatch.setattr(MachineLink, "_run", run_there)
        self.link = MachineLink(self.record, lambda: self.wants_stop)

    def ask(self, question):
        """The answer of a function that is called on this machine."""
        _MACHINE.number = self.number
        try:
            return question()
        finally:
            _MACHINE.number = 0

    def silent(self, seconds: float) -> list[int]:
        return self.ask(lambda: self.link.silent(seconds))

    def leave(self) -> None:
        self.ask(self.link.leave)


class BrokenStore:
    """A store behind a network that may be cut."""

    def __init__(self, store):
        self.store, self.cut = store, threading.Event()

    def __getattr__(self, name):
        if self.cut.is_set():
            time.sleep(100)
        return getattr(self.store, name)


@pytest.fixture
def pair(monkeypatch, tmp_path):
    """Two machines, and the connection of the second one to the store."""
    store = HashStore()
    cable = BrokenStore(store)
    found, lines = [], [socket.socketpair() for _ in range(2)]
    cable.far_end = lines[1][1]  # of the connection that closes with rank 0
    for number, connection in enumerate((store, cable)):
        monkeypatch.setattr(machine_link, "_open_store", lambda connection=connection: connection)
        monkeypatch.setattr(machine_link, "_open_line", lambda number=number: lines[number][0])
        found.append(Machine(number, tmp_path / str(number), monkeypatch))
        wait_for(lambda number=number: store.check([f"name/{number}"]))  # its thread has its own store
    wait_for(lambda: all(machine.link._names for machine in found))
    yield *found, cable
    for machine in found:
        machine.link._leaves = True


def wait_for(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_failure_is_known_on_the_other_machine(pair):
    alpha, beta, _ = pair
    beta.record.record(3, rank=3)
    wait_for(lambda: alpha.link.failure is not None)
    assert alpha.link.failure == Failure(machine=1, rank=3, code=3)
    assert beta.link.failure is None
    assert alpha.link.describe(1) == f"machine {os.uname().nodename} (ranks 2, 3)"


def test_the_end_on_request_is_no_failure(pair):
    alpha, beta, _ = pair
    beta.record.record(0, rank=2)
    time.sleep(0.3)
    assert alpha.link.failure is None


def test_a_failure_that_came_from_another_machine_is_not_passed_on(pair):
    alpha, beta, _ = pair
    alpha.record.record(5, rank=2)  # alpha reports the loss of beta
    time.sleep(0.3)
    assert beta.link.failure is None


def test_a_stop_request_reaches_the_ranks_of_the_other_machine(pair):
    alpha, beta, _ = pair
    assert not alpha.record.stop_requested()
    beta.wants_stop = True
    wait_for(alpha.record.stop_requested)


def test_a_cut_network_makes_each_machine_silent_to_the_other(pair):
    alpha, beta, cable = pair
    assert alpha.silent(0.4) == beta.silent(0.4) == []
    cable.cut.set()
    wait_for(lambda: alpha.silent(0.4) == [1] and beta.silent(0.4) == [0])


def test_a_machine_that_ends_in_order_is_not_silent(pair):
    alpha, beta, _ = pair
    beta.leave()
    time.sleep(0.5)
    assert not beta.link._thread.is_alive()
    assert alpha.silent(0.3) == []


def test_the_first_machine_waits_until_the_others_know_how_it_ends(pair):
    alpha, beta, _ = pair
    alpha.record.record(2, rank=0)
    alpha.leave()
    assert beta.link.failure == Failure(machine=0, rank=0, code=2)


def test_the_first_machine_does_not_wait_for_one_that_is_silent(pair, monkeypatch):
    alpha, _, cable = pair
    monkeypatch.setattr(machine_link, "ANSWER_SECONDS", 0.3)
    cable.cut.set()
    wait_for(lambda: alpha.silent(0.3) == [1])
    began = time.monotonic()
    alpha.leave()
    assert time.monotonic() - began < 1.0


def test_a_machine_whose_rank_0_has_ended_calls_no_store(pair):
    """Such a call would print a stack trace of C++."""
    _, beta, cable = pair
    calls, ask = [], cable.store.add
    cable.store = SimpleNamespace(**{name: getattr(cable.store, name) for name in ("check", "get", "multi_get")})
    cable.store.add = lambda *words: (calls.append(words), ask(*words))[1]
    wait_for(lambda: calls)
    cable.far_end.close()
    beta.link._thread.join(5)
    assert not beta.link._thread.is_alive()
    before = len(calls)
    beta.leave()
    assert len(calls) == before and calls[-1][1] < machine_link._LEFT, "it says no goodbye"
    wait_for(lambda: beta.silent(0.3) == [0])


def test_the_first_failure_counts(pair):
    alpha, beta, _ = pair
    beta.record.record(3, rank=3)
    wait_for(lambda: alpha.link.failure is not None)
    alpha.record.record(4, rank=1)
    time.sleep(0.3)
    assert beta.link.failure is None and alpha.link.failure == Failure(machine=1, rank=3, code=3)


def test_a_machine_that_ends_in_order_has_left(pair):
    alpha, beta, _ = pair
    assert alpha.link.left() == [] == beta.ask(beta.link.left)
    beta.leave()
    wait_for(lambda: alpha.link.left() == [1])
    assert beta.ask(beta.link.left) == []


def test_the_first_machine_waits_until_each_other_one_has_asked_again(pair, monkeypatch):
    """One exchange may have begun before the failure was passed on."""
    alpha, _, cable = pair
    ask, asked = cable.store.add, []

    def slow_add(key, amount):
        if key == "count/1":
            time.sleep(0.4)
            asked.append(time.monotonic())
        return ask(key, amount)

    cable.store = SimpleNamespace(**{name: getattr(cable.store, name) for name in ("check", "get", "multi_get")})
    cable.store.add = slow_add
    wait_for(lambda: asked)
    began = time.monotonic()
    alpha.leave()
    assert len([when for when in asked if when > began]) >= 2


def test_a_machine_has_a_number_until_its_name_is_known(pair):
    alpha, _, _ = pair
    alpha.link._names = []
    assert alpha.link.describe(1) == "machine 1 (ranks 2, 3)"


def test_a_machine_of_one_rank(pair, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert pair[0].link.describe(1) == f"machine {os.uname().nodename} (rank 1)"
