"""The lock of an output folder: one run at a time."""

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from launch import ROOT

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.session import begin_run
from dschat_ppo.session import run_lock as module
from dschat_ppo.session.run_lock import RunLock


def test_a_second_run_is_refused_until_the_first_releases_the_lock(tmp_path):
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


def test_the_check_before_the_ranks_join_refuses_a_second_run_and_locks_nothing(tmp_path, monkeypatch):
    RunLock.refuse_if_held(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    first = RunLock.acquire(tmp_path)
    with pytest.raises(UserError, match="another run"):
        RunLock.refuse_if_held(tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        RunLock.refuse_if_held(tmp_path)
    first.release()
    RunLock.refuse_if_held(tmp_path)
    RunLock.acquire(tmp_path).release()
    assert module._held == set()


def test_a_second_run_is_refused_before_it_needs_a_port(tmp_path, monkeypatch):
    config = parse("sft", ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", str(tmp_path)])
    monkeypatch.setattr(begin_run, "init_process_group", lambda: pytest.fail("the ranks have joined"))
    first = RunLock.acquire(tmp_path)
    with pytest.raises(UserError, match="another run"):
        begin_run.begin_run("sft", config, config.run, [])
    first.release()


def test_the_check_of_another_run_does_not_block_the_lock(tmp_path):
    """Two runs by one command at one instant: one checks the lock while the other takes it."""
    for take in (RunLock.acquire, RunLock.refuse_if_held):
        with (tmp_path / ".lock").open("a") as looks:
            fcntl.flock(looks, fcntl.LOCK_EX)
            threading.Timer(0.2, fcntl.flock, [looks, fcntl.LOCK_UN]).start()
            lock = take(tmp_path)
            if lock:
                lock.release()


def test_a_second_release_closes_no_other_file(tmp_path):
    first = RunLock.acquire(tmp_path)
    number = first._number
    first.release()
    with open(tmp_path / "mine", "w") as file:
        assert file.fileno() == number  # the kernel gives the lowest free number
        first.release()
        file.write("x")


def test_a_second_release_does_not_release_the_next_lock(tmp_path):
    first = RunLock.acquire(tmp_path)
    first.release()
    second = RunLock.acquire(tmp_path)
    first.release()
    with pytest.raises(UserError):
        RunLock.acquire(tmp_path)
    second.release()


def test_release_in_a_forked_child_closes_nothing(tmp_path):
    first = RunLock.acquire(tmp_path)
    number = first._number
    pid = os.fork()
    if pid == 0:
        opened = os.open(tmp_path, os.O_RDONLY)  # gets the number that the lock had
        first.release()
        still_open = Path(f"/proc/self/fd/{opened}").exists()
        os._exit(0 if still_open and opened == number else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    first.release()


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


def test_the_lock_is_shared_after_it_is_taken(tmp_path):
    """Other ranks join by a shared lock; so does a process that checks it."""
    first = RunLock.acquire(tmp_path)
    with (tmp_path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        first.release()
        with pytest.raises(UserError, match="another run"):
            RunLock.acquire(tmp_path)
    RunLock.acquire(tmp_path).release()


def test_a_run_that_takes_the_lock_in_between_wins(tmp_path, monkeypatch):
    """flock releases one kind of lock before it takes the other."""
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


def test_the_name_of_an_earlier_holder_is_removed(tmp_path):
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
    for folder, what in ((tmp_path / "file", "is a file"), (tmp_path / "file" / "inside", r"cannot be written \(")):
        with pytest.raises(UserError, match=rf"--output_dir {folder}: {what}"):
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
def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys, number):
    failing_flock(monkeypatch, number)
    lock = RunLock.acquire(tmp_path)
    assert f"--output_dir {tmp_path}: its file system has no locks" in capsys.readouterr().out
    lock.release()


def test_other_failures_of_the_lock_are_reported(tmp_path, monkeypatch):
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
            RunLock.acquire(tmp_path)  # the children have released it, the run has not
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


def as_rank_1(monkeypatch, locked: bool, problems: list[str | None]) -> None:
    """Let rank 0 say whether it has the lock, and further ranks what went wrong with theirs."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(module.dist, "broadcast_object", lambda _: locked)
    monkeypatch.setattr(module.dist, "gather_objects", lambda mine: [None, mine, *problems])


def test_without_locks_on_rank_0_the_other_ranks_take_none(tmp_path, monkeypatch):
    as_rank_1(monkeypatch, False, [])
    RunLock.acquire(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_rank_releases_the_lock_when_another_has_failed(tmp_path, monkeypatch):
    as_rank_1(monkeypatch, True, [None, "rank 3 cannot"])
    with pytest.raises(UserError, match="rank 3 cannot"):
        RunLock.acquire(tmp_path)
    assert os.listdir(tmp_path) == [".lock"] and module._held == set()


def start(stack: ExitStack, ranks: int, *words) -> list[subprocess.Popen[str]]:
    """Ranks without a launcher, which would stop one when another is gone."""
    env = {**os.environ, "WORLD_SIZE": str(ranks), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/workers/locking.py"), *map(str, words)]
    run = []
    for rank in range(ranks):
        environment = {**env, "RANK": str(rank)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        stack.callback(process.wait)
        stack.callback(process.kill)
        run.append(process)
    return run


@pytest.mark.ranks
def test_the_folder_is_locked_while_any_rank_runs_and_every_rank_gets_the_same_error(tmp_path):
    free, taken = tmp_path / "free", tmp_path / "taken"
    mine = RunLock.acquire(taken)
    with ExitStack() as stack:
        run = start(stack, 2, tmp_path / "rendezvous", free, taken)
        refused = f"refused: --output_dir {taken} is being written by another run (pid {os.getpid()} on host "
        for process in run:
            assert process.stdout.readline() == "locked\n"
            assert process.stdout.readline().startswith(refused)
        pids = f"pid {run[0].pid}, {run[1].pid} on host {socket.gethostname()}"
        for process in run:
            with pytest.raises(UserError) as refusal:
                RunLock.acquire(free)
            assert pids in str(refusal.value)
            process.send_signal(signal.SIGKILL)
            process.wait()
        RunLock.acquire(free).release()
    mine.release()
