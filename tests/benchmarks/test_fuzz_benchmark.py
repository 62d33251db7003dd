"""The fuzzing of `benchmarks/fuzz.py`: fifteen of its cases, and that it notices what must not happen."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from launch import forked

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import fuzz  # noqa: E402


@pytest.mark.slow
@pytest.mark.release
def test_fifteen_cases_end_with_a_result_or_one_line(tmp_path):
    found = tmp_path / "found.json"
    words = ["--cases", 15, "--seed", 1, "--jobs", 1, "--work", tmp_path / "work", "--json", found]
    ended = forked(1, "tests/workers/run_module.py", "benchmarks/fuzz.py", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    outcomes = json.loads(found.read_text())["outcomes"]
    assert sum(outcomes.values()) == 15 and min(outcomes["result"], outcomes["error line"]) >= 2, outcomes


def ends(folder: Path, body, seconds: float = 60.0) -> tuple[str, str]:
    process = fuzz.fork(folder, body)
    process.deadline = time.monotonic() + seconds
    return fuzz.judge(process.wait())


def print_error(text: str, code: int = 2) -> int:
    print(text, file=sys.stderr)
    return code


@pytest.mark.parametrize(("body", "outcome"), [
    (lambda: 0, ("result", "")), (lambda: print_error("error: --x: wrong"), ("error line", "")),
    (lambda: print_error("error: differs:\n  a  1 -> 2", 4), ("error line", "")),
    (lambda: print_error("error: a\nand more"), ("failed", "more than one line")),
    (lambda: print_error("error: a\nerror: b"), ("failed", "2 error lines")), (lambda: 2, ("failed", "0 error lines")),
    (lambda: print_error("error: a", 1), ("failed", "exit code 1")), (lambda: 1 // 0, ("failed", "traceback")),
    (lambda: print_error("Traceback (most recent call last):", 0), ("failed", "traceback")),
    (lambda: os.kill(os.getpid(), signal.SIGTERM), ("failed", "signal SIGTERM")),
])  # fmt: skip
def test_the_end_of_a_case_is_judged(tmp_path, body, outcome):
    assert ends(tmp_path, body) == outcome
