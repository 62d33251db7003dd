"""The watchdog ends a run that hangs, each case a separate process; the record by which ranks of a
machine learn who failed first, who is lost, and who makes progress."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch import run, succeed

from dschat_ppo.common import heartbeat, phases, stop_requests
from dschat_ppo.common.exit_codes import HOW_TO_RESUME
from dschat_ppo.common.owned_folders import owned_name
from dschat_ppo.common.processes import find_process
from dschat_ppo.rewards import sandbox
from dschat_ppo.run import first_failure, watchdog
from dschat_ppo.run.first_failure import NO_FOLDER, FirstFailureRecord, open_failure_record


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """`ranks(n)` makes this process rank n of two; all of them share a parent, as under a
    launcher."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(first_failure.tempfile, "gettempdir", lambda: str(tmp_path))

    def become(number: int) -> FirstFailureRecord:
        monkeypatch.setenv("RANK", str(number))
        return open_failure_record()

    return become


def test_the_first_failure_counts(ranks, tmp_path):
    first, second = ranks(0), ranks(1)
    assert first.folder == second.folder and first.folder.parent == tmp_path
    assert first.folder.stat().st_mode & 0o777 == 0o700 and first.read() is None
    mine = second.record(3, hung=True)
    assert (mine.rank, mine.code, mine.hung) == (1, 3, True)
    second.leave()
    assert first.lost_ranks() == []
    os.environ["RANK"] = "0"
    assert first.record(1) == first.read() == second.read() == mine
    first.leave()
    assert not first.folder.exists(), "the last one removes it"
    assert first.record(5) == mine, "a later failure of the same rank does not count"


def test_a_start_removes_the_folders_of_killed_runs_and_of_no_other(ranks, tmp_path):
    gone = subprocess.Popen(["sleep", "60"])
    kinds = (first_failure._RECORDS, sandbox.FOLDERS)
    left = [tmp_path / f"{owned_name(kind, gone.pid)}10.0.0.1_29500" for kind in kinds]
    kept = [tmp_path / f"{owned_name(kind, os.getpid())}x" for kind in kinds]
    start = f"{os.getuid()}_{socket.gethostname()}_"
    kept += [Path(str(left[0]).replace(start, f"{os.getuid()}_other_"))]  # of another machine
    kept += [tmp_path / f"{owned_name(kinds[0], gone.pid)}rank_runs"]
    for folder in (*left, *kept):
        folder.mkdir()
    mine = find_process(os.getpid()).started
    (kept[-1] / "rank_1").write_text(f"{os.getpid()} {mine}")  # after the end of its launcher
    gone.kill()
    gone.wait()
    first_failure.remove_left_folders()
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_process_that_ends_without_leaving_is_lost(ranks):
    record = ranks(0)
    process = subprocess.Popen(["sleep", "60"])
    (record.folder / "rank_1").write_text(f"{process.pid} {find_process(process.pid).started}")
    assert record.lost_ranks() == []
    process.kill()
    deadline = time.monotonic() + 10
    while not record.lost_ranks() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert record.lost_ranks() == [1]  # a zombie: its parent has not waited for it
    process.wait()
    (record.folder / "rank_1").write_text(f"{os.getpid()} {find_process(os.getpid()).started + 1}")
    assert record.lost_ranks() == [1], "another process has its number now"
    record.leave()
    assert not record.folder.exists()  # nobody is there to wait for


def test_progress_of_any_rank_counts(ranks):
    record = ranks(0)
    ranks(1)
    for number, age in enumerate((50, 40)):
        os.utime(record.folder / f"rank_{number}", (time.time() - age,) * 2)
    assert 40 <= record.seconds_since_progress() < 45
    os.environ["RANK"] = "0"
    record.mark_progress()
    assert record.seconds_since_progress() < 5
    shutil.rmtree(record.folder)


def test_a_single_rank_or_no_folder_gives_a_record_without_folder(ranks, monkeypatch, tmp_path):
    monkeypatch.setattr(first_failure.tempfile, "gettempdir", lambda: str(tmp_path / "nowhere"))
    record = ranks(0)
    assert record.folder is NO_FOLDER
    assert record.record(2) == record.record(5) == record.read() and record.read().code == 2
    assert record.lost_ranks() == [] and record.seconds_since_progress() == float("inf")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(first_failure.tempfile, "gettempdir", lambda: str(tmp_path))
    assert ranks(0).folder is NO_FOLDER


SCRIPT = """
import json, os, sys, threading, time
from pathlib import Path
from dschat_ppo.run import first_failure, rank_log, watchdog
from dschat_ppo.run.launch import leave, run_step
from dschat_ppo.common.phases import announce_step

def sleeps_long():
    threading.Event().wait(1000)

def train(_):
    rank_log.open_log(out)
    announce_step(3)
    folder = out / "record"
    folder.mkdir()
    record = first_failure.FirstFailureRecord(folder)
    if case in ("failed", "gone", "other rank stops"):
        started = first_failure.find_process(os.getpid()).started
        (folder / "rank_0").write_text(f"{os.getpid()} {started}")
        (folder / "rank_1").write_text("4194305 1")
        watchdog.FAILED_SECONDS = watchdog.LOST_SECONDS = 1.0
        watchdog.watch_ranks(record)
        if case == "failed":
            (folder / "failure").write_text('{"rank": 1, "code": 3, "hung": false}')
        if case == "other rank stops":
            (folder / "failure").write_text('{"rank": 1, "code": 0, "hung": false}')
            return time.sleep(4.0)
        sleeps_long()
    watchdog.start(2.0)
    if case == "stopped":  # and then it hangs while it leaves
        watchdog._WATCHDOGS[-1].record.record(0)
    sleeps_long()

running = {}
for case in sys.argv[2:]:
    out = Path(sys.argv[1], case)
    out.mkdir()
    running[os.fork()] = case
    if 0 in running:
        os.dup2(os.open(out / "stderr", os.O_WRONLY | os.O_CREAT), 2)
        leave(run_step(list, train, []))
codes = {}
while running:
    ended, status = os.wait()
    codes[running.pop(ended)] = os.waitstatus_to_exitcode(status)
Path(sys.argv[1], "codes").write_text(json.dumps(codes))
"""
CASES = ["hangs", "stopped", "failed", "gone", "other rank stops"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """case -> (exit code, stderr, log)"""
    folder = tmp_path_factory.mktemp("cases")
    succeed(run([sys.executable, "-c", SCRIPT, str(folder), *CASES]))
    codes = json.loads((folder / "codes").read_text())
    texts = [
        [(folder / case / name).read_text() for name in ("stderr", "logs/rank_0.log")]
        for case in CASES
    ]
    return {case: (codes[case], *text) for case, text in zip(CASES, texts, strict=True)}


@pytest.mark.parametrize("case", ["hangs", "stopped"])
def test_a_rank_without_progress_writes_its_stacks_and_ends(ended, case):
    code, errors, log = ended[case]
    assert code == 5
    assert re.search(
        r"^rank 0 has made no progress for [2-6] s: phase 'start', step 3$", errors, re.MULTILINE
    )
    assert errors.count("in sleeps_long") == 1 and "in sleeps_long" in log


def test_a_rank_ends_when_another_rank_has_failed_or_is_lost_but_not_when_it_stops_in_order(ended):
    code, errors, log = ended["failed"]
    assert (
        (code, errors) == (3, "")
        and "ends because rank 1 failed" in log
        and "in sleeps_long" in log
    )
    code, errors, log = ended["gone"]
    assert (
        code == 5
        and "rank 0: another rank is gone (rank 1; phase 'start', step 3): the run ends" in errors
    )
    assert HOW_TO_RESUME in errors and "in sleeps_long" not in errors and "in sleeps_long" in log
    code, errors, log = ended["other rank stops"]
    assert (code, errors) == (0, "") and "ends because" not in log


@pytest.mark.parametrize(
    ("idle", "since_progress_of_any", "expected"),
    [(30.0, float("inf"), True), (30.0, 5.0, False), (10.0, float("inf"), False)],
)
def test_a_run_hangs_if_neither_this_rank_nor_another_makes_progress(
    monkeypatch, idle, since_progress_of_any, expected
):
    record = SimpleNamespace(
        seconds_since_progress=lambda: since_progress_of_any, mark_progress=lambda: None
    )
    monkeypatch.setattr(heartbeat, "idle_seconds", lambda: idle)
    thread = watchdog._Watchdog(record)
    thread.limit = 20.0
    assert thread._hangs() is expected


@pytest.fixture
def watched(tmp_path):
    stop_requests.install()
    watchdog.watch_ranks(FirstFailureRecord(tmp_path))
    yield FirstFailureRecord(tmp_path)
    watchdog.stop()


def soon(what) -> bool:
    deadline = time.monotonic() + 20
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    return what()


def test_a_stop_request_reaches_the_other_ranks(watched, capsys):
    phases.announce_step(1)
    time.sleep(3 * watchdog.POLL_SECONDS)
    assert not stop_requests.flag_is_set() and not watched.stop_requested()
    os.kill(os.getpid(), signal.SIGTERM)
    assert soon(watched.stop_requested)
    assert stop_requests.reason() == "SIGTERM"
    time.sleep(3 * watchdog.POLL_SECONDS)
    assert (
        capsys.readouterr().out.count(
            "stopping (SIGTERM): the state is saved after this optimizer step"
        )
        == 1
    )


def test_a_stop_request_of_another_rank_sets_the_flag(watched):
    watched.request_stop()
    assert soon(stop_requests.flag_is_set)
    assert stop_requests.reason() == "another rank is to stop" and stop_requests.requested()
    stop_requests.install()
    assert not stop_requests.flag_is_set(), "of the run before"


def test_the_end_of_the_launcher_sets_the_flag(watched, monkeypatch):
    monkeypatch.setattr(stop_requests, "_launcher_has_ended", lambda: True)
    assert soon(stop_requests.flag_is_set)
    assert stop_requests.reason() == "the launcher has ended" and soon(watched.stop_requested)


def test_faulthandler_is_armed_unless_the_watchdog_is_paused(monkeypatch):
    armed, taken = [], []
    monkeypatch.setattr(
        watchdog.faulthandler, "dump_traceback_later", lambda seconds, **_: armed.append(seconds)
    )
    monkeypatch.setattr(
        watchdog.faulthandler, "cancel_dump_traceback_later", lambda: taken.append(1)
    )
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.01)
    watchdog.start(100.0)
    try:
        assert soon(lambda: armed) and set(armed) == {110.0} and not taken
        with heartbeat.watchdog_paused():
            assert soon(lambda: taken)
            count = len(armed)
            time.sleep(0.1)
            assert len(armed) == count
    finally:
        watchdog.stop()
    assert len(taken) >= 2
