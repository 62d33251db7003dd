"""Stop requests: signals and the end of the launcher."""

import os
import pty
import signal
import sys
import time

import pytest

from dschat_ppo.common import stop_requests
from dschat_ppo.errors import StopRequested


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
        found = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
        usual = found == [signal.SIG_DFL, signal.SIG_IGN, signal.SIG_IGN]
        os._exit(7 if usual else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("problem", [RuntimeError("Error building extension"), ImportError()])
def test_errors_of_stopped_subprocesses_become_a_stop(problem):
    for number, kind in ((None, type(problem)), (signal.SIGTERM, StopRequested)):
        stop_requests.install()
        with pytest.raises(kind) as raised, stop_requests.subprocesses_may_stop("prepared the data"):
            if number:
                os.kill(os.getpid(), number)
            raise problem
    assert str(raised.value) == "stopped (SIGTERM) while it prepared the data; run the same command again"


@pytest.mark.parametrize("works", [True, False])
def test_a_launcher_that_was_killed_before_install_is_detected(monkeypatch, works):
    """A parent that is no launcher, such as a shell, may end."""
    monkeypatch.setattr(stop_requests, "ancestor", lambda word: 5 if works else None)
    stop_requests.install()
    assert stop_requests.reason() is None, "started by hand"
    monkeypatch.setenv("CROSS_RANK", "0")
    stop_requests.install()
    assert stop_requests.reason() == (None if works else "the launcher has ended")
