"""Worker processes that prepare data: the run ends when one is killed, and they end when the run is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from datasets import Dataset

from dschat_ppo.errors import UserError
from dschat_ppo.runtime import dataset_workers
from dschat_ppo.runtime.dataset_workers import data_workers
from dschat_ppo.runtime.processes import Process

HANGS = """
import sys, threading, time
import psutil
from datasets import Dataset
from dschat_ppo.runtime import dataset_workers

dataset_workers.IDLE_SECONDS = 3.0

def kill_the_first():
    while not psutil.Process().children():
        time.sleep(0.01)
    psutil.Process().children()[0].kill()

rows = Dataset.from_dict({"x": list(range(40))})
threading.Thread(target=kill_the_first, daemon=True).start()
try:
    with dataset_workers.data_workers(2):
        rows.map(lambda row: time.sleep(0.05) or {"y": row["x"]}, num_proc=2, load_from_cache_file=False)
except dataset_workers.UserError as problem:
    print(problem, file=sys.stderr)
    sys.exit(2)
sys.exit(9)
"""

KILLED = """
import os, sys, threading, time
import multiprocess.pool
import psutil
from datasets import Dataset
from dschat_ppo.runtime.dataset_workers import data_workers

late, replaced = sys.argv[1] == "late", sys.argv[1] == "replaced"

def tell():
    while len(found := psutil.Process().children(recursive=True)) < (1 if late else 5):
        time.sleep(0.01)
    if replaced:
        workers = sorted(psutil.Process().children(), key=lambda process: process.pid)[1:]  # the manager is the first
        workers[0].kill()
        before = set(found)
        while not (found := set(psutil.Process().children()) - before):
            time.sleep(0.01)
    print(*(process.pid for process in found), flush=True)

def begin(row):
    if os.fork():
        return {"y": os.wait()}
    time.sleep(60)

if replaced:
    multiprocess.pool.Pool.terminate = lambda pool: time.sleep(60)
if late:
    os.register_at_fork(after_in_child=lambda: time.sleep(1.0))
rows = Dataset.from_dict({"x": [1, 2]})
threading.Thread(target=tell, daemon=True).start()
with data_workers(2):
    if late:
        os.fork()
        time.sleep(60)
    rows.map(begin, num_proc=2, load_from_cache_file=False)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_forked_processes_end_with_a_killed_process():
    """A process whose parent ends before it looks; two workers, their manager and a child of each worker; and a worker
    that the pool's own thread has forked in the place of one that was killed."""
    cases = {"late": 1, "in time": 5, "replaced": 1}
    running = {
        case: subprocess.Popen(
            [sys.executable, "-c", KILLED, case], stdout=subprocess.PIPE, text=True, env={**os.environ}
        )
        for case in cases
    }
    for case, process in running.items():
        forked = [psutil.Process(int(word)) for word in process.stdout.readline().split()]
        process.kill()
        _, left = psutil.wait_procs(forked, timeout=10)
        for orphan in left:
            orphan.kill()
        process.wait()
        process.stdout.close()
        assert (len(forked), left) == (cases[case], []), case


class Lost(Exception):  # noqa: N818
    """Stands for the end of the process."""


def watched(monkeypatch, ticks_of, polls: int, code: int = 2) -> tuple[list[tuple[int, int]], int | None]:
    """Watch for so many polls, one a second: the processes that were killed, and the second when the pool was given up.

    The process may end with this code alone.

    `ticks_of(second)` are the ticks of the workers by their numbers; process 7 was there before and computes always.
    """
    clock = SimpleNamespace(now=0)
    clock.monotonic = lambda: clock.now

    def wait(seconds):
        clock.now += 1
        return clock.now > polls

    def children():
        numbers = {7: clock.now} | (ticks_of(clock.now) if clock.now else {})
        return {pid: Process(1, 0, False, ticks) for pid, ticks in numbers.items()}

    def end_process(text, given):
        assert given == code
        assert ("stopped (SIGTERM)" if code == 0 else "--preprocessing_num_workers") in text
        raise Lost

    killed = []
    for name, value in {"time": clock, "children": children, "end_process": end_process}.items():
        monkeypatch.setattr(dataset_workers, name, value)
    monkeypatch.setattr("dschat_ppo.common.heartbeat.time", clock)
    monkeypatch.setattr(dataset_workers.os, "kill", lambda pid, number: killed.append((pid, number)))
    try:
        dataset_workers._watch_workers(SimpleNamespace(wait=wait))
    except Lost:
        return killed, clock.now
    return killed, None


def test_workers_that_use_the_cpu_continue(monkeypatch):
    assert watched(monkeypatch, lambda second: {8: 5, 9: second // 50}, 500) == ([], None)
    assert watched(monkeypatch, lambda second: {8: 5, 9: 5}, 60) == ([], None)
    assert watched(monkeypatch, lambda second: {}, 500) == ([], None), "nor does a process without workers"


def test_a_pool_whose_workers_are_idle_for_a_minute_is_lost(monkeypatch):
    killed = [(8, signal.SIGKILL), (9, signal.SIGKILL)]
    assert watched(monkeypatch, lambda second: {8: 5, 9: 5}, 500) == (killed, 62)
    assert watched(monkeypatch, lambda second: {8: min(second, 100), 9: 5}, 500) == (killed, 161)


def test_workers_are_killed_when_the_run_is_to_stop(monkeypatch):
    monkeypatch.setattr(dataset_workers.stop_requests, "flag_is_set", lambda: True)
    kills = [(8, signal.SIGKILL), (9, signal.SIGKILL)]
    assert watched(monkeypatch, lambda second: {8: second, 9: second}, 2) == (2 * kills, None)


def test_a_pool_that_does_not_end_after_a_stop_ends_the_process(monkeypatch):
    monkeypatch.setattr(dataset_workers.stop_requests, "flag_is_set", lambda: True)
    monkeypatch.setattr(dataset_workers.stop_requests, "reason", lambda: "SIGTERM")
    assert watched(monkeypatch, lambda second: {}, 500, code=0) == ([], 12)


STOPPED = """
import os, signal, sys, threading, time
import psutil
from datasets import Dataset
from dschat_ppo.runtime import stop_requests
from dschat_ppo.runtime import dataset_workers
from dschat_ppo.errors import StopRequested

def ask():
    while len(psutil.Process().children()) < 3:
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)

dataset_workers.STOP_SECONDS = 3.0
rows = Dataset.from_dict({"x": list(range(40))})
stop_requests.install()
threading.Thread(target=ask, daemon=True).start()
try:
    with stop_requests.subprocesses_may_stop("worked"), dataset_workers.data_workers(2):
        rows.map(lambda row: time.sleep(row["x"] >= int(sys.argv[1]) and 1000), num_proc=2, load_from_cache_file=False)
except StopRequested as stop:
    print(stop, len(psutil.Process().children()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("first_slow_row", [0, 20])
def test_an_interrupt_ends_the_workers(first_slow_row):
    """Both are busy; or one waits for a task and holds the pool's lock, without which the pool does not end."""
    ended = subprocess.run(
        [sys.executable, "-c", STOPPED, str(first_slow_row)], capture_output=True, text=True, timeout=100,
        env={**os.environ}, check=False,
    )  # fmt: skip
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    if first_slow_row:
        assert ended.stderr.endswith("stopped (SIGINT) while it prepared the data; run the same command again\n")
    else:
        assert ended.stdout == "stopped (SIGINT) while it worked; run the same command again 0\n", said


def test_a_single_process_is_not_watched(monkeypatch):
    monkeypatch.setattr(dataset_workers, "_watch_workers", lambda over: 1 / 0)
    monkeypatch.setattr(dataset_workers.threading, "Thread", lambda **how: 1 / 0)
    for count in (None, 1):
        with data_workers(count):
            pass
    with pytest.raises(ZeroDivisionError), data_workers(2):
        pass


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_run_whether_or_not_the_pool_notices():
    """The process is killed as soon as it is there, most often while it waits for work with the pool's lock held."""
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=100, env={**os.environ}, check=False
    )
    assert ended.returncode == 2, ended.stderr[-2000:]
    assert "--preprocessing_num_workers" in ended.stderr
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_a_map_without_a_fault_is_unchanged():
    rows = Dataset.from_dict({"x": list(range(40))})
    for _ in range(2):
        with data_workers(2):
            made = rows.map(lambda row: {"y": row["x"] + 1}, num_proc=2, load_from_cache_file=False)
        assert made["y"] == list(range(1, 41))
    with pytest.raises(RuntimeError, match="another error"), data_workers(2):
        raise RuntimeError("another error")
    with pytest.raises(UserError, match="was killed"), data_workers(2):
        raise RuntimeError("One of the subprocesses has abruptly died during map operation.")
    with pytest.raises(RuntimeError, match="abruptly died"), data_workers(1):
        raise RuntimeError("abruptly died")


@pytest.mark.slow
def test_a_process_that_a_thread_has_forked_outlives_the_thread():
    """The pool's own thread forks those that take the place of the killed, and ends before they do."""
    forked = []

    def fork():
        forked.append(os.fork())
        if not forked[0]:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.3)  # so that the child may have asked before the thread ends

    with data_workers(2):
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        time.sleep(0.3)
        alive = os.waitpid(forked[0], os.WNOHANG) == (0, 0)
    if alive:
        os.kill(forked[0], signal.SIGKILL)
        os.waitpid(forked[0], 0)
    assert alive


def test_few_rows_take_one_process_and_many_one_per_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
    few = dataset_workers.FEW_ROWS
    assert [dataset_workers.worker_count(None, rows) for rows in (0, few - 1, few, 10**6)] == [1, 1, 3, 3]
    assert [dataset_workers.worker_count(chosen, rows) for chosen, rows in ((1, 10**6), (7, 2))] == [1, 7]


@pytest.mark.parametrize("before", [None, "true"])
def test_the_tokenizers_of_workers_use_one_thread(monkeypatch, before):
    name = "TOKENIZERS_PARALLELISM"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with dataset_workers.data_workers(1):
        assert os.environ.get(name) == before
    with dataset_workers.data_workers(2):
        assert os.environ[name] == "false"
    assert os.environ.get(name) == before
