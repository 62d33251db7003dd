"""Run the code in a response against the row's tests in an isolated process with resource limits.

docs/rewards.md describes the protection and its limits. The module imports little, so that workers start fast.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import select
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dschat_ppo.common.heartbeat import TimeLeft

CHILD = Path(__file__).with_name("sandbox_child.py")
_FENCES = (
    re.compile(r"```(?:python|python3|py)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL),
    re.compile(r"```[ \t]*\n(.*?)```", re.DOTALL),
)
_MOST_REPORT_BYTES = 2**16
_END_SECONDS = 5.0  # for the watcher to kill the program and all that it started
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8"}


@dataclass(frozen=True)
class Limits:
    """Limits of one program with all its tests.

    `processes` includes threads. `file_mb` applies to each file and, where the kernel permits a private file system,
    to all files together.
    """

    cpu_seconds: int = 4
    wall_seconds: float = 6.0
    memory_mb: int = 1024
    file_mb: int = 16
    processes: int = 16


@dataclass(frozen=True)
class Outcome:
    """Which tests passed, and which isolation was missing: "network", "files", "processes", "calls"."""

    passed: list[bool]
    missing: list[str]


def code_tests(
    response: str,
    tests: Any,
    cpu_seconds: int = Limits.cpu_seconds,
    wall_seconds: float = Limits.wall_seconds,
    memory_mb: int = Limits.memory_mb,
) -> float:
    """Share of the `tests` column that the response's code passes.

    `tests` is Python source (one test) or a list of such sources; a test passes if it does not raise. The code is the
    last ```python fence of the response, else its last fence, else the whole response.
    """
    cases = [tests] if isinstance(tests, str) else tests
    if not isinstance(cases, list) or not cases or not all(isinstance(case, str) for case in cases):
        raise ValueError("the row needs a column 'tests' with Python source or a list of sources")
    outcome = run_tests(code_of(response), cases, Limits(cpu_seconds, wall_seconds, memory_mb))
    return sum(outcome.passed) / len(cases)


def code_of(response: str) -> str:
    """The code in a response; a ```python fence without an end (cut by the length limit) extends to the end."""
    for fence in _FENCES:
        if found := fence.findall(response):
            return found[-1]
    return response


def run_tests(program: str, tests: list[str], limits: Limits, namespaces: bool = True, filters: bool = True) -> Outcome:
    """Run `program`, then each test, in one isolated process; then kill it and everything that it started.

    Args:
        program: Python source.
        tests: Python sources that see the program's names.
        limits: limits of the whole run.
        namespaces: False behaves as on a machine that does not permit namespaces.
        filters: False behaves as on a machine that does not filter system calls.

    Raises:
        RuntimeError: the process could not run the program.
    """
    token = secrets.token_hex(16)
    job = {**asdict(limits), "program": program, "tests": tests, "token": token}
    job |= {"namespaces": namespaces, "filters": filters}
    job["cpu_seconds"] = math.ceil(limits.cpu_seconds)
    report, report_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="code_", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", str(CHILD), str(report_end)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=_ENVIRONMENT, cwd=folder, pass_fds=(report_end,),
            start_new_session=True,
        )  # fmt: skip
        os.close(report_end)
        try:
            text = _exchange(process, json.dumps(job).encode() + b"\n", report, limits.wall_seconds)
        finally:
            os.close(report)
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # its watcher then kills the program with all that it started, and ends
                process.stdin.close()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    lines = [line for line in text.decode(errors="replace").splitlines() if line.startswith(token)]
    if not lines:
        raise RuntimeError("the sandbox could not run the program (too little memory or time, or see above)")
    missing, *passed = (line.removeprefix(token).strip() for line in lines)
    return Outcome([str(number) in passed for number in range(len(tests))], json.loads(missing))


def _exchange(process: subprocess.Popen[bytes], job: bytes, report: int, seconds: float) -> bytes:
    """Send the job, and read the report until its end, the time limit or the size limit."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(job)
        process.stdin.flush()
    poll, left = select.poll(), TimeLeft(seconds)
    poll.register(report, select.POLLIN)
    text = b""
    while len(text) < _MOST_REPORT_BYTES and (most := left.seconds()) > 0:
        if poll.poll(1000 * min(most, 1.0)):
            part = os.read(report, _MOST_REPORT_BYTES)
            if not part:
                break
            text += part
    return text


def missing_isolation() -> list[str]:
    """The isolation that this machine does not permit, found by a test run: as in `Outcome`.

    Raises:
        RuntimeError: the sandbox cannot run programs at all.
    """
    return run_tests("", [], Limits(wall_seconds=30.0)).missing
