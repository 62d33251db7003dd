"""One run at a time in an output folder."""

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from launch import ROOT

from dschat_ppo.checkpoint import lock as module
from dschat_ppo.checkpoint.lock import RunLock
from dschat_ppo.errors import UserError


def test_a_second_run_is_refused_until_the_first_lets_go(tmp_path):
    folder = tmp_path / "new" / "output"
    first = RunLock.acquire(folder)
    with pytest.raises(UserError) as refusal:
        RunLock.acquire(folder)
    who = rf"another run (pid {os.getpid()} on host {socket.gethostname()}; since {time.localtime().tm_year}-"
    assert str(refusal.value).startswith(f"--output_dir {folder} is being written by {who}")
    assert str(refusal.value).endswith("); wait for it, stop it, or name another folder")
    first.release()
    first.release()
    second = RunLock.acquire(folder)
    RunLock.acquire(tmp_path / "other").release()
    second.release()
    assert module._held == set()


def test_letting_go_twice_closes_no_file_of_somebody_else(tmp_path):
    first = RunLock.acquire(tmp_path)
    number = first._number
    first.release()
    with open(tmp_path / "mine", "w") as file:
        assert file.fileno() == number  # the kernel gives the lowest free number
        first.release()
        file.write("x")


def test_a_refused_run_leaves_nothing_open(tmp_path):
    first = RunLock.acquire(tmp_path)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(UserError):
            RunLock.acquire(tmp_path)
    assert os.listdir("/proc/self/fd") == before
    first.release()


def test_a_lock_whose_holder_has_not_written_yet_is_refused_too(tmp_path):
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is being written by another run; wait for it"):
            RunLock.acquire(tmp_path)


def test_the_lock_is_shared_once_it_is_taken(tmp_path):
    """Other ranks join by a shared lock; so must somebody who only looks."""
    first = RunLock.acquire(tmp_path)
    with (tmp_path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        first.release()
        with pytest.raises(UserError, match="another run"):
            RunLock.acquire(tmp_path)
    RunLock.acquire(tmp_path).release()


def test_a_run_that_comes_in_between_wins(tmp_path, monkeypatch):
    """flock gives up the lock for one kind before it takes the other."""
    flock = fcntl.flock

    with (tmp_path / ".lock").open("a") as rival:

        def interrupted(number, operation):
            if operation & fcntl.LOCK_SH:
                flock(number, fcntl.LOCK_UN)
                flock(rival, fcntl.LOCK_EX | fcntl.LOCK_NB)
            flock(number, operation)

        monkeypatch.setattr(fcntl, "flock", interrupted)
        with pytest.raises(UserError, match="another run"):
            RunLock.acquire(tmp_path)
    assert module._held == set()


def test_an_earlier_holder_is_not_named_by_what_is_left_of_its_words(tmp_path):
    (tmp_path / ".lock").write_text("pid 1 on host elsewhere " + "x" * 300)
    first = RunLock.acquire(tmp_path)
    assert "elsewhere" not in (tmp_path / ".lock").read_text()
    assert "x" * 10 not in (tmp_path / ".lock").read_text()
    first.release()


def test_holders_are_named_by_host():
    words = module._describe([("a", 12), ("a", 13), ("b", 7)])
    assert words.startswith("pid 12, 13 on host a; pid 7 on host b; since 20")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(UserError, match=rf"--output_dir {folder}: cannot be written \("):
            RunLock.acquire(folder)


def test_a_lock_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match=r"cannot be written \(Is a directory\)"):
        RunLock.acquire(tmp_path)


def failing_flock(monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys, number):
    failing_flock(monkeypatch, number)
    lock = RunLock.acquire(tmp_path)
    assert f"--output_dir {tmp_path}: its file system has no locks" in capsys.readouterr().out
    lock.release()


def test_other_failures_of_the_lock_are_told(tmp_path, monkeypatch):
    failing_flock(monkeypatch, errno.EIO)
    with pytest.raises(UserError, match=r"cannot be locked \(Input/output error\)"):
        RunLock.acquire(tmp_path)


def test_a_child_does_not_keep_the_lock(tmp_path):
    first = RunLock.acquire(tmp_path)
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    try:
        with pytest.raises(UserError):
            RunLock.acquire(tmp_path)  # the children have let go of it, the run has not
        first.release()
        deadline = time.monotonic() + 20  # until the fork has come to its first line
        while True:
            try:
                RunLock.acquire(tmp_path).release()
                break
            except UserError:
                assert time.monotonic() < deadline, "a child holds the lock"
                time.sleep(0.05)
        assert forked.is_alive() and started.poll() is None
    finally:
        for child in (forked, started):
            child.kill()
        forked.join()
        started.wait()


def start(stack: ExitStack, folder, rendezvous, ranks: int) -> list[subprocess.Popen[str]]:
    """A run of some ranks, without a launcher that would stop one when another is gone."""
    env = {**os.environ, "WORLD_SIZE": str(ranks), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/workers/locking.py"), str(folder), str(rendezvous)]
    run = []
    for rank in range(ranks):
        environment = {**env, "RANK": str(rank)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        stack.callback(process.wait)
        stack.callback(process.kill)
        run.append(process)
    return run


def said(run) -> list[str]:
    return [process.stdout.readline() for process in run]


@pytest.mark.ranks
def test_the_folder_is_locked_while_any_rank_lives_and_every_rank_of_a_second_run_is_refused(tmp_path):
    folder = tmp_path / "output"
    with ExitStack() as stack:
        first = start(stack, folder, tmp_path / "first", 2)
        assert said(first) == ["locked\n"] * 2
        second = start(stack, folder, tmp_path / "second", 2)
        pids = f"pid {first[0].pid}, {first[1].pid} on host {socket.gethostname()}"
        for line in said(second):
            assert line.startswith(f"refused: --output_dir {folder} is being written by another run ({pids}; since ")
        assert [process.wait(60) for process in second] == [0, 0]
        first[0].send_signal(signal.SIGKILL)
        first[0].wait()
        with pytest.raises(UserError, match="another run"):
            RunLock.acquire(folder)
        first[1].send_signal(signal.SIGKILL)
        first[1].wait()
        RunLock.acquire(folder).release()
