"""DeepSpeed's operators: killed compilations, two processes at once, damaged files, the folder of an environment."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.ops.op_builder.builder import MissingCUDAException, OpBuilder
from launch import ROOT, environment

from dschat_ppo.common import stop_requests
from dschat_ppo.common.heartbeat import watchdog_is_paused
from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.run import op_builds
from dschat_ppo.run.op_builds import OWN_LOCK, TORCH_LOCK, guard_builds

COMPILER = """#!/bin/sh
case " $* " in *" -c "*)
    echo begin >> "$STORY"
    sleep $SECONDS_TO_COMPILE
    c++ "$@" || exit 1
    echo end >> "$STORY"
    exit 0
esac
exec c++ "$@"
"""


@pytest.fixture
def operators(tmp_path):
    """A folder of operators; `operators(seconds)` loads the toy operator in a new process."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    (tmp_path / "operators").mkdir()
    started = []

    def load(seconds: float) -> subprocess.Popen[str]:
        env = environment() | {"CXX": str(compiler), "STORY": str(tmp_path / "story")}
        env |= {"TORCH_EXTENSIONS_DIR": str(tmp_path / "operators"), "SECONDS_TO_COMPILE": str(seconds)}
        command = [sys.executable, str(ROOT / "tests/workers/toy_operator.py")]
        started.append(subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    yield load
    for process in started:
        process.kill()
    kill_compilers(tmp_path)
    for process in started:
        process.communicate()


def kill_compilers(folder: Path) -> None:
    """ninja starts each in a new process group; all of them run in the operator's folder."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's process, or it has just ended
            if (entry / "cwd").readlink() == folder / "operators/toy":
                os.kill(int(entry.name), signal.SIGKILL)


def story(folder: Path) -> list[str]:
    return (folder / "story").read_text().split() if (folder / "story").exists() else []


def until_it_compiles(folder: Path, compilations: int = 1) -> None:
    deadline = time.monotonic() + 100
    while story(folder).count("begin") < compilations and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.release
@pytest.mark.slow
def test_a_killed_compilation_does_not_block_later_runs(operators, tmp_path):
    lock = tmp_path / "operators/toy" / TORCH_LOCK
    first = operators(100)
    until_it_compiles(tmp_path)
    first.kill()
    kill_compilers(tmp_path)
    first.wait()
    assert lock.exists()
    second = operators(2)
    out, err = second.communicate(timeout=100)
    assert (out.splitlines()[-1], second.returncode) == ("loaded", 0), err
    assert "DeepSpeed compiles its operator toy in " in err
    assert story(tmp_path) == ["begin", "begin", "end"]


@pytest.mark.release
@pytest.mark.slow
def test_of_two_processes_one_compiles(operators, tmp_path):
    both = [operators(6.5), operators(6.5)]
    ended = [process.communicate(timeout=100) for process in both]
    assert [out.splitlines()[-1] for out, _ in ended] == ["loaded", "loaded"], ended
    assert story(tmp_path) == ["begin", "end"]
    assert sum("DeepSpeed compiles its operator toy" in err for _, err in ended) == 1
    first = next(p for p, (_, err) in zip(both, ended, strict=True) if "compiles" in err)
    waits = "this rank waits for DeepSpeed's operator toy: another process is compiling it\n"
    assert [waits in out for out, _ in ended] == [process is not first for process in both]


@pytest.fixture
def guarded(tmp_path, monkeypatch):
    """`guarded(load)`: what DeepSpeed calls to load the operator "toy" in a folder of this test."""

    def guard(load):
        monkeypatch.setattr(OpBuilder, "jit_load", lambda builder: load())
        guard_builds()
        return lambda: OpBuilder.jit_load(SimpleNamespace(name="toy"))

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return guard


def test_what_a_compilation_lacks(guarded, monkeypatch):
    problem = MissingCUDAException("CUDA_HOME does not exist, unable to compile CUDA op(s)")

    def fail():
        assert watchdog_is_paused(), "a compilation may take long"
        raise problem

    load = guarded(fail)
    with pytest.raises(UserError, match=r"^DeepSpeed's operator toy cannot be compiled .* it needs ninja") as caught:
        load()
    assert str(problem) in str(caught.value) and caught.value.__cause__ is problem
    monkeypatch.setattr(op_builds, "requested", lambda: True)  # the stop causes them
    with pytest.raises(MissingCUDAException):
        load()


def test_a_waiting_rank_can_be_stopped(tmp_path, monkeypatch, guarded):
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: True)
    monkeypatch.setattr(op_builds, "_QUIET_SECONDS", 0.1)
    (tmp_path / "toy").mkdir()
    with (tmp_path / "toy" / OWN_LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StopRequested):
            guarded(lambda: None)()
