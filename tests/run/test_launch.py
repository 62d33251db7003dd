"""Running a step: exit codes and the one message of a run that fails, what counts as a lack of
memory, and the variables of the launcher."""

import errno
import os
import subprocess
import sys

import pytest
import torch

from dschat_ppo.common.exit_codes import HOW_TO_RESUME, exit_code, ran_out_of_memory
from dschat_ppo.common.phases import PhaseClock, announce, announce_step, reset_phases
from dschat_ppo.errors import (
    NonFiniteError,
    StopRequested,
    StorageError,
    UnhealthyRun,
    UserError,
    reading,
)
from dschat_ppo.run import launch
from dschat_ppo.run.first_failure import FirstFailureRecord
from dschat_ppo.run.launch import complete_environment, run_step
from dschat_ppo.run.rank_log import close_log, open_log


@pytest.fixture(autouse=True)
def own_phases():
    yield
    reset_phases()


def raising(problem: BaseException | None):
    def train(_config):
        if problem is not None:
            raise problem

    return train


AGAIN = "saved; run the same command again to resume"
INTERRUPTED = (
    f"rank 0 was interrupted a second time (phase 'start'): the run ends at once; {HOW_TO_RESUME}\n"
)
ENDS = [  # how training ends, exit code, stdout, stderr
    (None, 0, "", ""),
    (StopRequested(AGAIN), 0, f"{AGAIN}\n", ""),
    (
        UserError("--data_path nowhere: no such file"),
        2,
        "",
        "error: --data_path nowhere: no such file\n",
    ),
    (
        NonFiniteError("step 3: the loss is not finite"),
        3,
        "",
        "error: step 3: the loss is not finite\n",
    ),
    (
        UnhealthyRun("--stop_on_health error: step 3"),
        6,
        "",
        "error: --stop_on_health error: step 3\n",
    ),
    (KeyboardInterrupt(), 1, "", INTERRUPTED),
]


@pytest.mark.parametrize(("problem", "code", "out", "err"), ENDS)
def test_the_end_of_a_run_is_one_message_and_an_exit_code(capsys, problem, code, out, err):
    assert run_step(list, raising(problem), []) == code
    assert capsys.readouterr() == (out, err)


def test_the_error_of_a_library_is_only_in_the_log(capsys, tmp_path):
    def train(_config):
        open_log(tmp_path)
        with reading("--data_path x: cannot be read"):
            int("no number")

    assert run_step(lambda argv: argv, train, []) == 2
    close_log()
    log = (tmp_path / "logs/rank_0.log").read_text()
    assert capsys.readouterr().err.count("\n") == 1
    assert "error: --data_path x: cannot be read: invalid literal" in log
    assert "Traceback" in log and "ValueError: invalid literal for int()" in log


def test_other_exceptions_are_one_message_with_rank_phase_and_step(capsys):
    clock = PhaseClock()

    def train(_config):
        announce("load models")
        announce_step(7)
        with clock.phase("score"):
            raise ZeroDivisionError("boom")

    assert run_step(lambda argv: argv, train, []) == 1
    first, second, *_, last = capsys.readouterr().err.splitlines()
    assert (first, last) == ("rank 0 failed in phase 'score' at step 7:", "ZeroDivisionError: boom")
    assert second == "Traceback (most recent call last):"


def test_messages_show_no_credentials(capsys, tmp_path):
    open_log(tmp_path)
    try:
        for kind in (UserError, RuntimeError):
            run_step(list, raising(kind("http://me:s3cret@host/")), [])
    finally:
        close_log()
    for text in (capsys.readouterr().err, (tmp_path / "logs" / "rank_0.log").read_text()):
        assert text.count("http://***@host/") >= 2 and "s3cret" not in text


@pytest.mark.parametrize("kind", [ZeroDivisionError, UserError])
@pytest.mark.parametrize(("first_code", "is_reported"), [(0, True), (3, False)])
def test_a_failure_after_another_rank_is_reported_only_if_that_rank_stopped_in_order(
    capsys, tmp_path, monkeypatch, kind, first_code, is_reported
):
    record = FirstFailureRecord(tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        FirstFailureRecord(tmp_path).record(first_code)
    monkeypatch.setattr(launch, "open_failure_record", lambda: record)

    own_code = 2 if kind is UserError else 1
    assert run_step(list, raising(kind("boom")), []) == (own_code if is_reported else first_code)
    assert ("boom" in capsys.readouterr().err) is is_reported


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_JOB_ID": "12345",
    "SLURM_NTASKS": "6",
    "MASTER_ADDR": "gpu07",
}
DEEPSPEED = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "6",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "2",
    "MASTER_ADDR": "gpu07",
    "MASTER_PORT": "29500",
}


def completed(environment: dict[str, str]) -> dict[str, str]:
    environment = dict(environment)
    complete_environment(environment)
    return environment


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def test_srun_sets_the_numbers_of_a_rank():
    found = completed(SLURM)
    assert {name: value for name, value in found.items() if not name.startswith("SLURM")} == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(15_000 + 12345 % 10_000),
    }
    assert completed(SLURM | {"MASTER_PORT": "7"})["MASTER_PORT"] == "7"
    one_machine = without(SLURM, "MASTER_ADDR") | {
        "SLURM_STEP_TASKS_PER_NODE": "6",
        "SLURM_LOCALID": "5",
    }
    assert completed(one_machine)["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        DEEPSPEED,
        without(DEEPSPEED, "LOCAL_SIZE") | {"LOCAL_WORLD_SIZE": "2"},
        without(
            SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"
        ),  # a batch script, which is one process
    ],
)
def test_other_environments_stay_as_they_are(environment):
    assert completed(environment) == environment


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (without(DEEPSPEED, "MASTER_ADDR", "LOCAL_RANK"), "but not LOCAL_RANK, MASTER_ADDR"),
        (without(DEEPSPEED, "LOCAL_SIZE"), "LOCAL_WORLD_SIZE"),
        (DEEPSPEED | {"RANK": "five"}, "RANK=five"),
        (DEEPSPEED | {"WORLD_SIZE": "7"}, "the same number of ranks"),
        (without(SLURM, "MASTER_ADDR"), "export MASTER"),
        (without(SLURM, "SLURM_LOCALID"), "but not LOCAL_RANK"),
        (SLURM | {"SLURM_PROCID": "2"}, "--distribution bl"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, "--ntasks-per-node"),
    ],
)
def test_a_wrong_environment_is_named(environment, words):
    with pytest.raises(UserError) as refused:
        completed(environment)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), 1),
        (FloatingPointError("nan"), 3),
        (
            ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
            1,
        ),  # a web service, not a rank
        (StorageError("full"), 4),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 4),
        (OSError(errno.EROFS, "Read-only file system", "x"), 4),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "x"), 4),
        (RuntimeError("NCCL error: invalid usage"), 1),
        (
            Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
            4,
        ),  # safetensors
        (
            RuntimeError(
                "[../gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:34502: Connection reset"
                " by peer"
            ),
            5,
        ),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), 5),
    ],
    ids=str,
)
def test_the_exit_code_of_each_exception(problem, code):
    assert exit_code(problem) == code


def error_after(first: Exception, then: Exception) -> Exception:
    try:
        try:
            raise first
        finally:
            raise then
    except Exception as problem:  # noqa: BLE001
        return problem


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
            ),
            True,
        ),
        (MemoryError("Unable to allocate 9.31 GiB for an array"), True),
        (
            error_after(
                torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("capture failed")
            ),
            True,
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_a_lack_of_memory_is_known_by_class_or_message(problem, expected):
    assert ran_out_of_memory(problem) is expected


CLOSED = """
import os
from dschat_ppo.run.launch import leave, run_step
def train(config):
    assert os.open("{file}", os.O_CREAT) > 2, "what a library prints would go to this file"
    print("progress")
leave(run_step(lambda words: None, train, []))
"""
CLOSED_TOOL = "from dschat_ppo.tools import exit_code_of; raise SystemExit(exit_code_of(lambda: 0))"


@pytest.mark.parametrize("script", [CLOSED, CLOSED_TOOL])
@pytest.mark.parametrize("closed", [">&- 2>&-", "<&- >&-", "2>&-"])
def test_closed_streams_do_not_end_a_run(script, closed, tmp_path):
    command = f'"{sys.executable}" -c "$SCRIPT" {closed}'
    environment = {**os.environ, "SCRIPT": script.replace("{file}", str(tmp_path / "log"))}
    assert subprocess.run(command, shell=True, env=environment).returncode == 0
