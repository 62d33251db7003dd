"""Processes that prepare data: the run ends when one is killed, and they end when the run is killed or stopped."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from dschat_ppo.common import dataset_workers, stop_requests
from dschat_ppo.common.dataset_workers import in_processes
from dschat_ppo.errors import StopRequested, UserError


def children() -> set[multiprocessing.Process]:
    return set(multiprocessing.active_children())


@pytest.fixture
def left():
    """Children that were started since the test began: another test file may have its own."""
    before = children()
    return lambda: children() - before


def test_each_part_is_the_result_of_a_process_in_order(monkeypatch, left):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)

    def work(number):
        time.sleep(0.1 * (3 - number))  # else one process may do the work of two
        return number, os.getpid(), os.environ.get("TOKENIZERS_PARALLELISM")

    found = in_processes(3, work, "worked")
    assert [number for number, _, _ in found] == [0, 1, 2]
    assert len({os.getpid(), *(pid for _, pid, _ in found)}) == 4 and {threads for _, _, threads in found} == {"false"}
    assert in_processes(1, work, "worked") == [(0, os.getpid(), None)]
    assert left() == set()


def test_an_error_of_one_process_ends_the_others(left):
    def work(number):
        if number == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        time.sleep(100)

    with pytest.raises(OSError, match="No space left on device"):
        in_processes(2, work, "worked")
    assert left() == set()


@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_process_that_is_killed_ends_the_run(monkeypatch, left, is_stopping):
    """The signal of the launcher ends the processes too, perhaps before this one notes it."""
    ended = threading.Event()
    monkeypatch.setattr(dataset_workers, "_SIGNAL_SECONDS", 0.1)
    monkeypatch.setattr(dataset_workers.time, "sleep", lambda _: ended.set())
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: is_stopping and ended.is_set())

    def work(number):
        os.kill(os.getpid(), signal.SIGKILL) if number == 1 else signal.pause()

    kind, said = (StopRequested, "while it worked") if is_stopping else (UserError, "--preprocessing_num_workers")
    with pytest.raises(kind, match=said):
        in_processes(2, work, "worked")
    assert left() == set()


def test_a_stop_request_ends_the_processes(monkeypatch, left):
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: len(left()) == 2)
    with pytest.raises(StopRequested, match="while it worked"):
        in_processes(2, lambda number: time.sleep(100), "worked")
    assert left() == set()


KILLED = """
import os, time
from dschat_ppo.common.dataset_workers import in_processes

def work(number):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(100)

in_processes(2, work, "worked")
"""


def test_the_processes_end_with_a_killed_process():
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as process:
        workers = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
        process.kill()
        _, orphans = psutil.wait_procs(workers, timeout=10)
        for orphan in orphans:
            orphan.kill()
    assert len(workers) == 2 and orphans == []
