"""Stop requests: signals and the end of the launcher; processes that prepare data, which end with
the run, as it does with them."""

import errno
import multiprocessing
import os
import pty
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


def test_signals_are_noted_and_a_second_interrupt_raises():
    stop_requests.install()
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop_requests.requested() and stop_requests.reason() == "SIGTERM"
    stop_requests.install()  # a new run in this process
    assert not stop_requests.requested()
    os.kill(os.getpid(), signal.SIGINT)
    assert stop_requests.reason() == "SIGINT"
    os.kill(os.getpid(), signal.SIGTERM)  # of the launcher
    assert stop_requests.reason() == "SIGINT"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_ignored_signals_stay_ignored():
    """Of nohup."""
    own = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop_requests.install()
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop_requests.requested()
    finally:
        signal.signal(signal.SIGHUP, own)


IN_TERMINAL = """
import sys, time
from pathlib import Path
from tqdm import tqdm
from dschat_ppo.common.logging import print_line
from dschat_ppo.common import stop_requests
from dschat_ppo.run import watchdog
from dschat_ppo.run.first_failure import FirstFailureRecord
kind, file = sys.argv[1], Path(sys.argv[2])
if kind == "hangs up":
    stop_requests.install()
else:  # as after `disown`: the terminal goes, and no signal comes
    import signal
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    watchdog.watch_ranks(FirstFailureRecord())
bar = tqdm()
file.touch()
for _ in range(12):
    if stop_requests.requested():
        break
    time.sleep(0.05)
time.sleep(0.6)
print_line("a line")
print("text", file=sys.stderr, flush=True)
bar.refresh()
file.write_text(f"still here {stop_requests.reason()}")
"""


@pytest.mark.parametrize(("kind", "reason"), [("hangs up", "SIGHUP"), ("disowned", None)])
def test_a_closed_terminal_stops_the_run_in_order(tmp_path, kind, reason):
    """Nobody reads its output any more. Each write to such a terminal is an error."""
    file = tmp_path / "found"
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(sys.executable, [sys.executable, "-c", IN_TERMINAL, kind, str(file)])
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert file.read_text() == f"still here {reason}"


def test_forked_processes_do_not_note_signals():
    stop_requests.install()
    child = os.fork()
    if not child:
        found = [
            signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        ]
        usual = found == [signal.SIG_DFL, signal.SIG_IGN, signal.SIG_IGN]
        os._exit(7 if usual else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("problem", [RuntimeError("Error building extension"), ImportError()])
def test_errors_of_stopped_subprocesses_become_a_stop(problem):
    for number, kind in ((None, type(problem)), (signal.SIGTERM, StopRequested)):
        stop_requests.install()
        with (
            pytest.raises(kind) as raised,
            stop_requests.subprocesses_may_stop("prepared the data"),
        ):
            if number:
                os.kill(os.getpid(), number)
            raise problem
    assert (
        str(raised.value)
        == "stopped (SIGTERM) while it prepared the data; run the same command again"
    )


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
    assert len({os.getpid(), *(pid for _, pid, _ in found)}) == 4 and {
        threads for _, _, threads in found
    } == {"false"}
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

    kind, said = (
        (StopRequested, "while it worked")
        if is_stopping
        else (UserError, "--preprocessing_num_workers")
    )
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
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True
    ) as process:
        workers = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
        process.kill()
        _, orphans = psutil.wait_procs(workers, timeout=10)
        for orphan in orphans:
            orphan.kill()
    assert len(workers) == 2 and orphans == []
