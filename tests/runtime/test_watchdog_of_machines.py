"""The watchdog of the first rank of a machine ends the run when another machine fails or does not answer."""

import os
import time

import pytest

from dschat_ppo.runtime import stop_requests, watchdog
from dschat_ppo.runtime.exit_codes import DONE, HOW_TO_RESUME, RANK_LOST
from dschat_ppo.runtime.first_failure import FirstFailureRecord
from dschat_ppo.runtime.machine_link import ANSWER_SECONDS, Failure

LIMIT = 100.0


class Link:
    """Stands for `MachineLink`: `age` seconds have passed since machine 1 answered."""

    def __init__(self, record, may_pass_on_stop):
        self.may_pass_on_stop = may_pass_on_stop
        self.failure, self.age, self.has_left = None, 0.0, False

    def silent(self, seconds: float) -> list[int]:
        return [1] if self.age >= seconds and not self.has_left else []

    def left(self) -> list[int]:
        return [1] * self.has_left

    def describe(self, machine: int) -> str:
        return f"machine number {machine}"

    def leave(self) -> None:
        pass


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """(the watchdog of rank 0 of two machines with two ranks each, the record of its machine)"""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(watchdog, "MachineLink", Link)
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.05)
    stop_requests.install()
    watchdog.watch_ranks(FirstFailureRecord(tmp_path))
    watchdog.start(LIMIT)
    yield watchdog._WATCHDOGS[-1], FirstFailureRecord(tmp_path)
    watchdog.stop()
    stop_requests.restore()


def recorded(record: FirstFailureRecord) -> tuple[int, int]:
    """(rank, exit code) of the first failure."""
    deadline = time.monotonic() + 20
    while (first := record.read()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return first.rank, first.code


def test_a_failure_of_another_machine_is_recorded_and_named(watched, capfd):
    dog, record = watched
    dog.link.failure = Failure(machine=1, rank=3, code=4)
    assert recorded(record) == (3, 4)
    dog.end()
    assert capfd.readouterr().err == (
        "rank 0: rank 3 on machine number 1 failed with exit code 4 (phase 'start'): the run ends; "
        "its output has the reason\n"
    )


def test_a_machine_that_does_not_answer_for_most_of_the_limit_is_lost(watched, capfd):
    dog, record = watched
    dog.link.age = 0.6 * LIMIT - 1
    time.sleep(0.5)
    assert record.read() is None
    dog.link.age = 0.6 * LIMIT
    assert recorded(record) == (2, RANK_LOST)
    dog.end()
    message = f"rank 0: machine number 1 has not answered for 60 s (phase 'start'): the run ends; {HOW_TO_RESUME}\n"
    assert capfd.readouterr().err == message


def test_the_limit_is_a_minute_longer_than_the_silence_that_is_allowed(watched):
    dog, record = watched
    dog.limit = 1800.0
    dog.link.age = 1739.0
    time.sleep(0.3)
    assert record.read() is None
    dog.link.age = 1740.0
    assert recorded(record) == (2, RANK_LOST)


def test_a_machine_is_named_soon_if_a_rank_here_lost_its_connection(watched, capfd):
    """That rank may be another one of this machine, which has no link."""
    dog, record = watched
    dog.link.age = ANSWER_SECONDS
    time.sleep(0.3)
    assert record.read() is None
    record.mark_disconnected()
    assert recorded(record) == (2, RANK_LOST)
    dog.end()
    assert "machine number 1 has ended or does not answer (phase 'start'): the run ends" in capfd.readouterr().err


def test_a_rank_that_lost_its_connection_waits_until_the_machine_is_named(watched):
    dog, record = watched
    dog.link.age = ANSWER_SECONDS
    began = time.monotonic()
    watchdog.wait_for_cause_of_lost_connection()
    assert recorded(record) == (2, RANK_LOST)
    assert time.monotonic() - began < 5


def test_a_rank_that_lost_its_connection_to_an_unknown_one_waits_for_a_while(watched, monkeypatch):
    monkeypatch.setattr(watchdog, "_CAUSE_SECONDS", 0.5)
    began = time.monotonic()
    watchdog.wait_for_cause_of_lost_connection()
    assert 0.5 <= time.monotonic() - began < 5 and watched[1].read() is None


def test_a_machine_that_ended_after_a_stop_request_is_no_failure(watched):
    dog, record = watched
    dog.link.has_left = True
    stop_requests.set_flag()
    watchdog.wait_for_cause_of_lost_connection()
    assert recorded(record) == (2, DONE)


def test_on_one_machine_there_is_nothing_to_wait_for(watched, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    began = time.monotonic()
    watchdog.wait_for_cause_of_lost_connection()
    assert time.monotonic() - began < 2 and not watched[1].is_disconnected()


def test_only_the_first_rank_of_a_machine_has_a_link(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(watchdog, "MachineLink", lambda *_: made.append(os.environ["LOCAL_RANK"]))
    for rank, size in ((1, 2), (0, 4)):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": size}.items():
            monkeypatch.setenv(name, str(value))
        watchdog.watch_ranks(FirstFailureRecord(tmp_path))
        watchdog.start(LIMIT)
        watchdog.stop()
    assert made == []


@pytest.mark.parametrize("by", ["signal", "another rank", "after a failure", "nobody"])
def test_a_stop_request_is_passed_on_unless_a_launcher_made_it_after_a_failure(watched, by):
    dog, record = watched
    if by == "after a failure":
        record.record(DONE, rank=1)
    if by in ("signal", "after a failure"):
        stop_requests.set_flag()
    if by == "another rank":
        record.request_stop()
    assert dog.link.may_pass_on_stop() is (by in ("signal", "another rank"))
