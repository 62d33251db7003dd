"""Who says how a run ends, and with which exit code."""

import errno
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dschat_ppo.errors import NonFiniteError, StopRequested, StorageError, UserError
from dschat_ppo.runtime import first_failure
from dschat_ppo.runtime.first_failure import (
    FirstFailure,
    FirstFailureRecord,
    exit_code,
    open_failure_record,
    peer_disconnected,
)
from dschat_ppo.runtime.processes import command, find_process, processes_at

GLOO = (
    "[../gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:34502: {}. This is typically caused by a remote worker"
)


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (StopRequested("saved"), 0),
        (ZeroDivisionError("x"), 1),
        (KeyboardInterrupt(), 1),
        (RuntimeError("shapes differ"), 1),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), 1),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 1),  # a web service, not a rank
        (UserError("--x"), 2),
        (FloatingPointError("nan"), 3),
        (NonFiniteError("nan"), 3),
        (StorageError("full"), 4),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 4),
        (OSError(errno.EROFS, "Read-only file system", "x"), 4),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "x"), 4),
        (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), 4),  # safetensors
        (RuntimeError(GLOO.format("Connection reset by peer")), 5),
        (RuntimeError(GLOO.format("Connection closed by peer")), 5),
    ],
    ids=str,
)
def test_exit_codes(problem, code):
    assert exit_code(problem) == code


def test_signs_of_a_lost_rank():
    assert peer_disconnected(RuntimeError("NCCL error: remote process exited or there was a network error"))
    assert not peer_disconnected(RuntimeError("NCCL error: invalid usage"))
    assert not peer_disconnected(OSError("Broken pipe"))


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """`ranks(n)` makes this process rank n of two; all of them share a parent, as under a launcher."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(first_failure.tempfile, "gettempdir", lambda: str(tmp_path))

    def become(number: int) -> FirstFailureRecord:
        monkeypatch.setenv("RANK", str(number))
        return open_failure_record()

    return become


def test_the_first_claim_counts(ranks, tmp_path):
    first, second = ranks(0), ranks(1)
    assert first.folder == second.folder
    assert first.folder.parent == tmp_path
    assert first.folder.stat().st_mode & 0o777 == 0o700
    assert first.claimed() is None
    before = time.time()
    mine = second.claim(3, hung=True)
    assert (mine.rank, mine.code, mine.hung) == (1, 3, True)
    assert before <= mine.when <= time.time()
    os.environ["RANK"] = "0"
    assert first.claim(1) == mine
    assert first.claimed() == second.claimed() == mine


def test_the_last_to_leave_takes_the_folder_away(ranks):
    boards = [ranks(0), ranks(1)]
    boards[1].claim(1)
    boards[1].leave()
    assert boards[0].claimed().rank == 1
    assert boards[0].is_present(0)
    assert not boards[0].is_present(1)
    os.environ["RANK"] = "0"
    boards[0].leave()
    assert not boards[0].folder.exists()
    assert boards[0].claimed().rank == 1
    assert boards[0].claim(5).rank == 1, "a thread of this rank that is late to claim has no second word to say"


def test_ranks_that_leave_at_once_do_not_trip_over_each_other(ranks, monkeypatch):
    board = ranks(0)

    def gone(folder):
        raise FileNotFoundError(2, "No such file or directory", str(folder))

    monkeypatch.setattr(os, "scandir", gone)  # the other one takes the folder away between two looks of this one
    assert board.lost_ranks() == board.untold_ranks() == []
    assert board.seconds_since_progress() == math.inf
    board.leave()


@pytest.mark.parametrize("content", ["", "\0\0\0\0", "12", "one two"])
def test_what_a_loss_of_power_left_of_a_board_is_swept_away(ranks, content):
    """Its content was lost, its name was not."""
    old = ranks(0).folder.with_name(f"{first_failure._OWN_FOLDERS}localhost_29500_1_1")
    old.mkdir()
    (old / "rank_0").write_text(content)
    board = ranks(1)
    assert not old.exists() and board.is_present(1)
    board.leave()


def test_a_process_that_ends_without_leaving_is_lost(ranks):
    board = ranks(0)
    process = subprocess.Popen(["sleep", "60"])
    (board.folder / "rank_1").write_text(f"{process.pid} {find_process(process.pid).started}")
    assert board.lost_ranks() == []
    assert board.is_present(1)
    process.kill()
    deadline = time.monotonic() + 10
    while not board.lost_ranks() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert board.lost_ranks() == [1]  # a zombie: its parent has not waited for it
    process.wait()
    assert board.lost_ranks() == [1]
    assert not board.is_present(1)
    board.leave()
    assert not board.folder.exists()  # nobody is there to wait for


def test_a_number_that_another_process_has_now_is_no_life(ranks):
    board = ranks(0)
    (board.folder / "rank_1").write_text(f"{os.getpid()} {find_process(os.getpid()).started + 1}")
    assert board.lost_ranks() == [1]
    board.leave()


def test_progress_of_any_rank_counts(ranks):
    board = ranks(0)
    ranks(1)
    for number, age in enumerate((50, 40)):
        os.utime(board.folder / f"rank_{number}", (time.time() - age,) * 2)
    assert 40 <= board.seconds_since_progress() < 45
    os.environ["RANK"] = "0"
    board.show_progress()
    assert board.seconds_since_progress() < 5
    assert board.untold_ranks() == [0, 1]
    board.mark_told()
    assert board.untold_ranks() == [1]
    shutil.rmtree(board.folder)


def test_alone_or_without_a_folder_each_speaks_for_itself(ranks, monkeypatch, tmp_path):
    monkeypatch.setattr(first_failure.tempfile, "gettempdir", lambda: str(tmp_path / "nowhere"))
    boards = [ranks(0), ranks(1)]
    assert [board.folder for board in boards] == [None, None]
    assert boards[0].claim(2) == boards[0].claim(5) == boards[0].claimed()
    assert boards[0].claimed().code == 2
    assert boards[1].claimed() is None
    assert boards[0].lost_ranks() == []
    assert boards[0].seconds_since_progress() == float("inf")

    def none_can_be_written():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(first_failure.tempfile, "gettempdir", none_can_be_written)
    assert ranks(0).folder is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(first_failure.tempfile, "gettempdir", lambda: str(tmp_path))
    assert ranks(0).folder is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a folder away")
def test_a_folder_of_another_user_is_not_used(ranks):
    folder = ranks(0).folder
    os.chown(folder, 12345, 12345)
    assert ranks(1).folder is None
    shutil.rmtree(folder)


def test_folders_of_runs_that_were_killed_are_swept_away(ranks, tmp_path):
    own = find_process(os.getpid())
    name = f"dschat_ppo_{os.getuid()}_{socket.gethostname()}_10.0.0.1_1"
    dead = tmp_path / f"{name}_{os.getpid()}_{own.started + 1}"
    alive = tmp_path / f"{name}_{os.getpid()}_{own.started}"
    orphaned = tmp_path / f"{name}_{2**22 + 1}_5"
    odd = tmp_path / f"dschat_ppo_{os.getuid()}_{socket.gethostname()}_x"
    elsewhere = tmp_path / f"dschat_ppo_{os.getuid()}_a-machine-that-shares-TMPDIR_10.0.0.1_1_{2**22 + 1}_5"
    for folder in (dead, alive, orphaned, odd, elsewhere):
        folder.mkdir()
    (dead / "rank_0").write_text(f"{os.getpid()} {own.started + 1}")
    (orphaned / "rank_0").write_text(f"{os.getpid()} {own.started}")
    board = ranks(0)
    assert not dead.exists()
    assert alive.exists() and orphaned.exists() and odd.exists() and elsewhere.exists()
    board.leave()


def test_a_claim_that_cannot_be_written_is_the_own_one(ranks):
    board = ranks(0)
    shutil.rmtree(board.folder)
    assert board.claim(4) == FirstFailure(0, 4, False, pytest.approx(time.time(), abs=5))


def test_what_is_known_of_a_process(tmp_path):
    program = tmp_path / "a) Z (b"
    shutil.copy(shutil.which("sleep"), program)
    process = subprocess.Popen([str(program), "60"], cwd=tmp_path)
    try:
        found = find_process(process.pid)
        assert (found.parent, found.ended) == (os.getpid(), False)
        assert found.started >= find_process(os.getpid()).started > 0
        deadline = time.monotonic() + 10
        while command(process.pid) != [str(program), "60"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert command(process.pid) == [str(program), "60"]
        assert processes_at(tmp_path) == {process.pid}
    finally:
        process.kill()
        process.wait()
    assert find_process(process.pid) is None
    assert command(process.pid) == []


SEGFAULT = """
import ctypes, sys
from pathlib import Path
from dschat_ppo.runtime.rank_log import keep_log
def crash():
    ctypes.string_at(0)
keep_log(Path(sys.argv[1]))
crash()
"""


def test_a_crash_leaves_its_stack_in_the_log(tmp_path):
    done = subprocess.run([sys.executable, "-c", SEGFAULT, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == -11
    log = Path(tmp_path, "logs", "rank_0.log").read_text()
    assert "Fatal Python error: Segmentation fault" in log
    assert "in crash" in log
