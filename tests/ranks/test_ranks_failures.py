"""How runs of two real ranks end: exit codes, one message, stacks of a hanging run, no process
left.

Two cases that get a signal have the launcher of a user (`deepspeed`: a runner, below it launch.py,
below it the ranks) and run side by side. The others are forks, which are faster.
"""

import json
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from launch import (
    ROOT,
    Ranks,
    deepspeed_command,
    environment,
    fork_ranks,
    rank_environments,
    wait_until,
)

from dschat_ppo.common.exit_codes import HOW_TO_RESUME

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

KILLED_RANK = 256 - signal.SIGKILL  # the code of a rank that was killed, as a launcher passes it on


@dataclass
class Ended:
    code: int
    out: str
    err: str
    folder: Path

    def left(self, rank: int) -> dict | None:
        path = self.folder / f"left_{rank}"
        return json.loads(path.read_text()) if path.exists() else None

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank_{rank}.log").read_text()

    def told(self) -> list[str]:
        """Lines on stderr that are the run's own."""
        return [line for line in self.err.splitlines() if re.match(r"rank \d|error", line)]


def to_group(runner: subprocess.Popen, _ranks: list[int]) -> None:
    os.killpg(runner.pid, signal.SIGINT)  # as a terminal does


def to_launcher(_runner: subprocess.Popen, ranks: list[int]) -> None:
    psutil.Process(ranks[0]).parent().kill()


SIGNALS = {"SIGKILL to launch.py": to_launcher, "SIGINT to all": to_group}
HOLDS, KILLED = "rank 1 holds the lock", "rank 1 is killed"
FAULTS = [
    "user error on rank 1",
    "rank 1 hangs",
    "rank 1 raises",
    "both raise",
    "rank 1 takes its time",
    KILLED,
    HOLDS,
]


def run_case(case: str, folder: Path) -> Ended:
    (folder / "tmp").mkdir(parents=True)
    env = environment() | {"TMPDIR": str(folder / "tmp")}
    command = deepspeed_command(2, "tests/workers/failing.py", case, folder)
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        runner = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=err, start_new_session=True
        )
        try:
            SIGNALS[case](runner, ready_ranks(folder))
            code = runner.wait(timeout=180)
            left = wait_until_gone(folder)
        finally:
            for process in processes_of(folder):
                process.kill()
    assert not left, f"{case}: still there: {left}"
    return Ended(code, (folder / "out").read_text(), (folder / "err").read_text(), folder)


def ready_ranks(folder: Path) -> list[int]:
    files = [folder / f"ready_{rank}" for rank in range(2)]
    wait_until(
        lambda: all(file.exists() and file.read_text() for file in files),
        120,
        (folder / "err").read_text,
    )
    return [int(file.read_text()) for file in files]


def processes_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if (
            str(folder) in (process.info["cmdline"] or [])
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ):
            found.append(process)
    return found


def wait_until_gone(folder: Path) -> list[psutil.Process]:
    deadline = time.monotonic() + 30
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def start_forked(case: str, folder: Path) -> Ranks:
    """As `run_case`, with forks in place of the launcher: the ranks that do not fail get a signal
    too."""
    (folder / "tmp").mkdir(parents=True)
    environments = rank_environments(2, {"TMPDIR": str(folder / "tmp")})
    end = int(signal.SIGKILL if case == HOLDS else signal.SIGTERM)
    return fork_ranks(folder, environments, "tests/workers/failing.py", case, folder, end=end)


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("failures")
    forked = {case: start_forked(case, folder / f"fork_{n}") for n, case in enumerate(FAULTS)}
    with ThreadPoolExecutor() as threads:
        runs = {
            case: threads.submit(run_case, case, folder / str(n)) for n, case in enumerate(SIGNALS)
        }
        found = {case: run.result() for case, run in runs.items()}
    for case, ranks in forked.items():
        wait_until(lambda ranks=ranks: ranks.code is not None, 180, lambda ranks=ranks: ranks.err)
        found[case] = Ended(ranks.code, ranks.out, ranks.err, ranks.folder)
    return found


def test_an_exception_of_one_rank_is_one_message_and_every_rank_keeps_a_log(ended):
    run = ended["rank 1 raises"]
    assert run.code == 1, run.err
    assert run.told() == ["rank 1 failed in phase 'update' at step 5:"]
    assert run.err.count("Traceback (most recent call last)") == 1
    assert run.err.count("ZeroDivisionError: boom") == 1
    assert str(run.folder / "logs") in run.err
    assert run.left(1) == {"code": 1, "reason": None} and run.left(0)["code"] == 1
    assert "ZeroDivisionError: boom" in run.log(1)
    assert "ends after rank 1:" in run.log(0) and "in all_reduce" in run.log(0)
    for rank in range(2):
        assert re.search(rf"-------- .*: rank {rank} of 2, process \d+", run.log(rank))
        assert re.search(
            r"^\d{4}-\d\d-\d\d .* INFO \[phase 'start'\] begins$", run.log(rank), re.MULTILINE
        )
    assert run.out.count("begins") == 1


def test_an_exception_of_all_ranks_is_reported_once(ended):
    run = ended["both raise"]
    assert run.code == 3, run.err
    assert run.told() == ["error: the loss is nan"]
    assert [run.left(rank)["code"] for rank in range(2)] == [3, 3]


def test_a_user_error_of_another_rank_is_reported_too(ended):
    run = ended["user error on rank 1"]
    assert run.code == 2, run.err
    assert run.told() == ["error on rank 1: --flag: this machine has no such file"]
    assert "Traceback" not in run.err
    assert [run.left(rank)["code"] for rank in range(2)] == [2, 2]


def test_a_killed_rank_ends_the_run(ended):
    run = ended["rank 1 is killed"]
    assert run.code in (5, KILLED_RANK), run.err  # of the rank that ends first
    assert run.told() == [
        f"rank 0: another rank is gone (phase 'update', step 5): the run ends; {HOW_TO_RESUME}"
    ]
    assert "Traceback" not in run.err and "Traceback" in run.log(0)
    assert run.left(0)["code"] == 5
    assert run.left(1) is None


def test_a_hang_ends_with_the_stacks_of_all_ranks(ended):
    run = ended["rank 1 hangs"]
    assert run.code == 5, run.err
    (told,) = run.told()
    assert re.fullmatch(r"rank [01] has made no progress for [3-8] s: phase 'update', step 5", told)
    assert "in hang" in run.log(1) and "in all_reduce" in run.log(0)
    assert ("in hang" if told.startswith("rank 1") else "in all_reduce") in run.err
    assert "Traceback" not in run.err


def test_a_hang_in_c_code_ends_the_run(ended):
    run = ended[HOLDS]
    assert run.code == 5, run.err
    told = run.told()
    assert re.fullmatch(r"rank 0 has made no progress for [3-8] s: phase 'update', step 5", told[0])
    # where other work delays the rank, it ends before its stack is whole
    assert "most recent call first" in run.err


@pytest.mark.parametrize(
    ("case", "code", "reasons"),
    [
        ("rank 1 takes its time", 0, {"SIGTERM", None}),
        ("SIGKILL to launch.py", 0, {"SIGTERM"}),
        ("SIGINT to all", -signal.SIGINT, {"SIGINT"}),
    ],
)
def test_a_requested_stop_saves_and_exits(ended, case, code, reasons):
    run = ended[case]
    assert run.code == code, run.err
    assert run.told() == []  # and the watchdog had no reason to speak
    assert len(re.findall(r"saved after step \d+; run the same command again", run.out)) == 1
    assert [run.left(rank)["code"] for rank in range(2)] == [0, 0]
    found = {run.left(rank)["reason"] for rank in range(2)}
    passed_on = {None, "another rank is to stop"} if None in reasons else set()
    assert reasons - {None} <= found <= reasons | passed_on


def test_nothing_is_left_in_the_temporary_folder(ended):
    for case, run in ended.items():
        left = list((run.folder / "tmp").glob("dschat_ppo_*"))
        # a rank that holds the lock cannot leave; rank 0 takes the folder away if it leaves after
        # that one's end
        assert len(left) <= (1 if case == HOLDS else 0), case
