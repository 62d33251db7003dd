"""Run the code in a response against the row's tests in an isolated process with resource limits.

`bwrap` (bubblewrap) isolates it; without, only the resource limits hold. docs/rewards.md describes
the protection and its limits. The module imports little, so that workers start fast.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from dschat_ppo.common.owned_folders import owned_name, remove_tree
from dschat_ppo.errors import printable_line

FOLDERS = "code"  # the start of the names of the folders that programs run in
CHILD = Path(__file__).with_name("sandbox_child.py")
_FENCES = (
    re.compile(r"```(?:python|python3|py)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL),
    re.compile(r"```[ \t]*\n(.*?)```", re.DOTALL),
)
_MOST_REPORT_BYTES = 2**16
_END_SECONDS = 5.0  # for the watcher to kill the program and all that it started
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8"}
_DEVICES = ("null", "zero", "full", "random", "urandom")
_INSIDE = "1000"  # user and group number that the program sees
_WEAK = (
    "programs of the model can write and delete the files of this user, see its processes and, past"
    " Python, reach the network; only time and memory are limited"
)


@dataclass(frozen=True)
class Limits:
    """Of one program with all tests. `processes` includes threads; `file_mb` is for a file, and
    with bwrap for all."""

    cpu_seconds: int = 4
    wall_seconds: float = 6.0
    memory_mb: int = 1024
    file_mb: int = 16
    processes: int = 16


@dataclass(frozen=True)
class Isolation:
    """What isolates programs on a machine."""

    bwrap: bool  # bubblewrap does; False leaves the resource limits
    # it mounts its own /proc; containers that hide parts of /proc do not permit this
    has_proc: bool
    leaves_root: bool  # a run as root gives up its user number for programs
    missing: str = ""  # a sentence about what is not protected, for the log; "" with bwrap


def code_tests(
    response: str,
    tests: Any,
    cpu_seconds: int = Limits.cpu_seconds,
    wall_seconds: float = Limits.wall_seconds,
    memory_mb: int = Limits.memory_mb,
) -> float:
    """Share of the `tests` column that the response's code passes.

    `tests` is Python source (one test) or a list of such sources; a test passes if it does not
    raise. The code is the last ```python fence of the response, else its last fence, else the whole
    response.
    """
    cases = tests
    if isinstance(tests, str):
        cases = [tests]
    if not isinstance(cases, list) or not cases or not all(isinstance(case, str) for case in cases):
        raise ValueError("the row needs a column 'tests' with Python source or a list of sources")
    passed = run_tests(code_of(response), cases, Limits(cpu_seconds, wall_seconds, memory_mb))
    return sum(passed) / len(cases)


def code_of(response: str) -> str:
    """The code in a response; a ```python fence without an end (cut by the length limit) extends to
    the end."""
    for fence in _FENCES:
        blocks: list[str] = fence.findall(response)
        if blocks:
            return blocks[-1]
    return response


@cache
def isolation() -> Isolation:
    """The best isolation in which Python starts on this machine, found by trying.

    The order is bubblewrap with a /proc of its own, bubblewrap without, resource limits alone. If
    this run is root and other users can run its Python, each is first tried with another user
    number for programs. `RuntimeError` if Python does not start in any, with the last reason.
    """
    candidates = []
    faults = []  # why the choices before did not work; the first one is why there is no bubblewrap
    if shutil.which("bwrap"):
        candidates.append(Isolation(bwrap=True, has_proc=True, leaves_root=False))
        candidates.append(Isolation(bwrap=True, has_proc=False, leaves_root=False))
    else:
        faults.append("bubblewrap is not installed")
    candidates.append(Isolation(bwrap=False, has_proc=False, leaves_root=False))
    may_leave_root = os.geteuid() == 0 and others_may_run(sys.executable)
    for candidate in candidates:
        choices = [candidate]
        if may_leave_root:
            choices.insert(0, replace(candidate, leaves_root=True))
        for choice in choices:
            reason = _start_problem(choice)
            if reason is not None:
                fault = "Python does not start without bubblewrap"
                if choice.bwrap:
                    fault = "bubblewrap does not work here"
                faults.append(f"{fault} ({reason})")
            elif choice.bwrap:
                return choice
            else:
                return replace(choice, missing=f"{printable_line(faults[0])}, so {_WEAK}")
    raise RuntimeError(printable_line(faults[-1]))


def _start_problem(how: Isolation) -> str | None:
    """Why Python does not start in this isolation; None if it does."""
    words = []
    if how.bwrap:
        words = bwrap_words(Limits(), how)
    try:
        subprocess.run(
            [*words, sys.executable, "-I", "-c", "pass"],
            check=True,
            capture_output=True,
            text=True,
            env=_ENVIRONMENT,  # as later: a bwrap that needs more variables does not work
            **_user(how),
        )
    except (OSError, subprocess.CalledProcessError) as problem:
        reason = str(getattr(problem, "stderr", problem)).strip()
        if "Unknown option" in reason:
            reason += "; 0.8 or newer is needed"
        return reason
    return None


def bwrap_words(limits: Limits, how: Isolation) -> list[str]:
    """The start of a command: no network and no other processes; files read-only, but for an empty
    /tmp in memory."""
    devices = []
    for name in _DEVICES:
        devices += ["--dev-bind-try", f"/dev/{name}", f"/dev/{name}"]
    return [
        # its path, since programs get no PATH
        os.path.abspath(shutil.which("bwrap") or "bwrap"),
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--uid",
        _INSIDE,
        "--gid",
        _INSIDE,
        "--die-with-parent",
        "--as-pid-1",
        "--cap-drop",
        "ALL",
        "--ro-bind",
        "/",
        "/",
        "--proc" if how.has_proc else "--tmpfs",
        "/proc",
        "--remount-ro",
        "/proc",
        "--tmpfs",
        "/dev",
        *devices,
        "--remount-ro",
        "/dev",
        "--size",
        str(limits.file_mb * 2**20),
        "--tmpfs",
        "/tmp",
        "--chdir",
        "/tmp",
    ]


def others_may_run(python: str) -> bool:
    """Whether any user can read this Python, and enter every folder above it."""
    paths: set[Path] = set()
    for executable in (Path(os.path.abspath(python)), Path(python).resolve()):
        paths |= {executable, *executable.parents}
    return all(path.stat().st_mode & 5 == 5 for path in paths)


def _user(how: Isolation) -> dict[str, Any]:
    """Arguments of `Popen`: a random user number, which owns nothing, in place of root's; {} if the
    program keeps that of the run."""
    if not how.leaves_root:
        return {}
    user_id = 2**30 + secrets.randbelow(2**30)
    return {"user": user_id, "group": user_id, "extra_groups": []}


def run_tests(
    program: str, tests: list[str], limits: Limits, how: Isolation | None = None
) -> list[bool]:
    """Run `program`, then each test (both Python source), in one isolated process under `limits` of
    the whole run; then kill it and everything that it started. Returns which tests passed.
    `RuntimeError` if the process could not run the program."""
    how = how or isolation()
    token = secrets.token_hex(16)
    job = {**asdict(limits), **asdict(how), "program": program, "tests": tests, "token": token}
    job["cpu_seconds"] = math.ceil(limits.cpu_seconds)
    words = [sys.executable, "-I", "-c", CHILD.read_text()]
    if how.bwrap:
        words = [*bwrap_words(limits, how), *words]
    user = _user(how)
    with _folder_of_program() as folder:
        if user:
            os.chown(folder, user["user"], user["group"])
        if not how.bwrap:  # the watcher stays root, so that the program cannot signal it
            job["user"] = user.get("user")
            user = {}
        watcher = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_ENVIRONMENT,
            cwd=folder,
            start_new_session=True,
            **user,
        )
        report = _Report(limits.wall_seconds)
        try:
            assert watcher.stdin is not None and watcher.stdout is not None
            with suppress(BrokenPipeError):
                watcher.stdin.write(json.dumps(job).encode() + b"\n")
                watcher.stdin.flush()
            report.read(watcher.stdout.fileno(), has_pid=not how.bwrap)
        finally:
            report.end_program()
            _end(watcher)
    lines = [line for line in report.lines() if line.startswith(token)]
    if not lines:
        raise RuntimeError(
            "the sandbox could not run the program (too little memory or time, or see above)"
        )
    return [f"{token} {index}" in lines for index in range(len(tests))]


@contextmanager
def _folder_of_program() -> Iterator[str]:
    """A temporary folder, which is removed however deeply the program has nested folders in it."""
    prefix = owned_name(FOLDERS, os.getpid())
    folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    try:
        yield folder.name
    finally:
        try:
            folder.cleanup()
        except RecursionError:
            remove_tree([folder.name])


class _Report:
    """What a program writes within `seconds`, and the program itself, which this process can end
    without its watcher: where nothing isolates them, a program can kill or stop that."""

    def __init__(self, seconds: float):
        self.ends_at = time.monotonic() + seconds
        self.text = b""
        self.program: int | None = None  # a descriptor of the process (pidfd)

    def read(self, descriptor: int, has_pid: bool) -> None:
        """Read until the other end closes, the time limit or the size limit. `has_pid`: the first
        line ends with the program's process id, and not with one of another namespace."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while len(self.text) < _MOST_REPORT_BYTES:
            seconds_left = self.ends_at - time.monotonic()
            if seconds_left <= 0:
                return
            if not poll.poll(1000 * seconds_left):
                continue
            written = os.read(descriptor, _MOST_REPORT_BYTES)
            if not written:
                return
            self.text += written
            if has_pid and self.program is None and b"\n" in self.text:
                with suppress(ProcessLookupError):  # it has ended
                    pid = self.text.partition(b"\n")[0].split()[-1]
                    self.program = os.pidfd_open(int(pid))

    def end_program(self) -> None:
        if self.program is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.program, signal.SIGKILL)
            os.close(self.program)

    def lines(self) -> list[str]:
        return self.text.decode(errors="replace").splitlines()


def _end(watcher: subprocess.Popen[bytes]) -> None:
    """Let the watcher kill what the program has started, and end; then kill what is left in their
    process group, if a program has killed or stopped its watcher."""
    assert watcher.stdin is not None and watcher.stdout is not None
    with suppress(BrokenPipeError):
        watcher.stdin.close()  # its order to end
    watcher.stdout.close()
    poll = select.poll()
    ended = os.pidfd_open(watcher.pid)
    poll.register(ended, select.POLLIN)
    poll.poll(1000 * _END_SECONDS)
    os.close(ended)
    with suppress(ProcessLookupError):
        os.killpg(watcher.pid, signal.SIGKILL)  # before `wait`: no other process has this id yet
    watcher.wait()
