"""The output folder belongs to one run at a time, and to all machines of the run."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
from launch import ROOT

from dschat_ppo.common import dist
from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.run import output_folder, session
from dschat_ppo.run.output_folder import check_shared_folder, lock_folder, release_locks


@pytest.fixture(autouse=True)
def own_locks(monkeypatch):
    monkeypatch.setattr(output_folder, "_LOCKS", {})
    yield
    release_locks()


OTHER_RUN = """
import sys, time
from pathlib import Path
from dschat_ppo.errors import UserError
from dschat_ppo.run.output_folder import lock_folder
try:
    lock_folder(Path(sys.argv[1]))
    print("locked", flush=True)
    time.sleep(300)
except UserError as problem:
    print(problem, flush=True)
"""


def other_run(folder) -> tuple[subprocess.Popen, str]:
    """Another process that tries to lock the folder, and what it says."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_RUN, str(folder)], stdout=subprocess.PIPE, text=True, env=env
    )
    return process, process.stdout.readline()


def test_a_second_run_is_refused_until_the_first_ends(tmp_path):
    folder = tmp_path / "new" / "output"
    first, said = other_run(folder)
    assert said == "locked\n"
    with pytest.raises(UserError, match=rf"{folder} is being written by another run \(pid {first.pid} on host "):
        lock_folder(folder)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = os.listdir("/proc/self/fd")
    lock_folder(folder)
    lock_folder(folder)  # a later step in the same process
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    second, said = other_run(folder)
    assert f"another run (pid {os.getpid()} on host" in said and second.wait() == 0
    lock_folder(tmp_path / "other")


def test_a_second_run_is_refused_before_it_needs_a_port_and_other_ranks_lock_nothing(tmp_path, monkeypatch):
    config = parse("sft", ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", str(tmp_path)])
    monkeypatch.setattr(session, "init_process_group", lambda folder: pytest.fail("the ranks have joined"))
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(UserError, match="is being written by another run; wait for it"):
            session.begin_run("sft", config, [])
        assert os.listdir("/proc/self/fd") == before
        monkeypatch.setenv("RANK", "1")
        lock_folder(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file/inside"):
        with pytest.raises(UserError, match=rf"--output_dir {folder}: cannot be written"):
            lock_folder(folder)


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    lock_folder(tmp_path)
    assert f"--output_dir {tmp_path}: its file system has no locks" in capsys.readouterr().out


def test_a_child_does_not_keep_the_lock(tmp_path):
    lock_folder(tmp_path)
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    forked.start()
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    try:
        refused, said = other_run(tmp_path)
        assert "another run" in said, "the children have released it, the run has not"
        refused.wait()
        release_locks()
        deadline = time.monotonic() + 20  # until the fork has come to its first line
        while True:
            try:
                lock_folder(tmp_path)
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


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_folder_that_the_machines_do_not_share_is_refused(monkeypatch, tmp_path, rank, is_shared):
    check_shared_folder(tmp_path / "one machine")  # writes nothing
    for name, value in {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(dist, "broadcast_object", lambda mine: ".shared_1")
    monkeypatch.setattr(dist, "on_main", lambda work: work() if rank == 0 else None)
    theirs = None if is_shared or rank else "beta"
    monkeypatch.setattr(dist, "gather_objects", lambda mine: [None, None, mine, theirs])
    if rank and is_shared:
        (tmp_path / ".shared_1").touch()
    if is_shared:
        check_shared_folder(tmp_path)
    else:
        with pytest.raises(UserError, match=f"machine {os.uname().nodename if rank else 'beta'} does not see"):
            check_shared_folder(tmp_path)
    assert (tmp_path / ".shared_1").exists() is (rank == 2 and is_shared), "rank 0 removes it"
