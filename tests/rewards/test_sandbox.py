"""The sandbox with real programs: scores, resource limits and isolation."""

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from sandboxes import FOUND, everywhere, left_of, mark_sandboxes, marked_processes, needs_bwrap

from dschat_ppo.rewards import sandbox
from dschat_ppo.rewards.sandbox import Isolation, Limits, code_of, code_tests, run_tests

LIMITS = Limits(cpu_seconds=2, wall_seconds=5.0)
ADD = "def add(a, b):\n    return a + b\n"


def passes(
    test: str, program: str = "", limits: Limits = LIMITS, how: Isolation | None = None
) -> bool:
    return run_tests(program, [test], limits, how) == [True]


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("x = 1", "x = 1"),
        ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("", ""),
        ("```python\nx = 1\n```\nbetter:\n```python\nx = 2\n```", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nprints\n```\n3\n```", "x = 1\n"),
    ],
)
def test_code_of_a_response(response, code):
    assert code_of(response) == code


@pytest.mark.parametrize(
    ("response", "tests", "score"),
    [
        (f"```python\n{ADD}```", "assert add(1, 2) == 3\nassert add(0, 0) == 0", 1.0),
        (f"```python\n{ADD}```", "assert add(1, 2) == 3\nassert add(0, 0) == 1", 0.0),
        (
            ADD,
            [
                "assert add(1, 2) == 3",
                "assert add(0, 0) == 1",
                "add(1)",
                "assert add('a', 'b') == 'ab'",
            ],
            0.5,
        ),
        ("no code at all", ["assert True"], 0.0),
        (ADD, "this is no code", 0.0),
        ("if __name__ == '__main__':\n    input()\nx = 1", "assert x == 1", 1.0),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: 'int' = 1",
            "assert P().x == 1",
            1.0,
        ),
    ],
)
def test_the_score_is_the_share_of_passed_tests(response, tests, score):
    assert code_tests(response, tests) == score


WRITE_EVERYWHERE = """
import os
for number in range(3, 256):
    try:
        os.write(number, TEXT)
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "raise BaseException",
        "def f(:",
        "import ctypes; ctypes.string_at(0)",
        WRITE_EVERYWHERE.replace("TEXT", "b'0\\n' * 9") + "os._exit(0)",
        WRITE_EVERYWHERE.replace("TEXT", "b'\\n0 0\\n'") + "os._exit(0)",
    ],
)
def test_a_program_that_ends_before_its_tests_passes_none(program):
    assert run_tests(program, ["assert True"], LIMITS) == [False]


def seconds_of(program: str, limits: Limits) -> float:
    started = time.monotonic()
    assert not passes("assert True", program, limits)
    return time.monotonic() - started


def test_cpu_time_is_limited():
    assert 0.9 < seconds_of("while True: pass", Limits(cpu_seconds=1, wall_seconds=20.0)) < 15


def test_tests_passed_before_the_time_limit_count():
    """A failing test does not end the others."""
    tests = [
        "raise SystemExit",
        "1 / 0",
        "raise KeyboardInterrupt",
        "assert True",
        "while True: pass",
        "assert True",
    ]
    assert run_tests("", tests, Limits(wall_seconds=1.0)) == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]


@everywhere
def test_files_are_limited(how):
    """Each, and with bwrap all together."""
    assert passes("open('a', 'wb').write(bytes(2**20))", limits=Limits(file_mb=2), how=how)
    assert not passes("open('a', 'wb').write(bytes(3 * 2**20))", limits=Limits(file_mb=2), how=how)
    several = (
        "for n in range(4):\n    with open(str(n), 'wb') as file:\n        file.write(bytes(2**20))"
    )
    assert passes(several, limits=Limits(file_mb=5), how=how)
    assert passes(several, limits=Limits(file_mb=3), how=how) is not how.bwrap


def test_an_endless_report_ends_the_program():
    program = "while True:\n" + WRITE_EVERYWHERE.replace("TEXT", "b'0' * 4096").replace(
        "\n", "\n    "
    )
    assert seconds_of(program, Limits(wall_seconds=20.0, cpu_seconds=20)) < 10


FORKS = """
import os, time
children = []
try:
    while len(children) < 60:
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        children.append(child)
except (OSError, PermissionError):
    pass
assert len(children) < 20, len(children)
"""


@everywhere
def test_processes_are_limited(how):
    """A program of root meets no limit of the kernel, so its watcher ends it; without bwrap, Python
    refuses to fork."""
    meets_a_limit = not how.bwrap or how.leaves_root or os.geteuid() != 0
    assert run_tests("", [FORKS, "import time; time.sleep(1)"], LIMITS, how) == [meets_a_limit] * 2


@everywhere
def test_no_network(how):
    server = (
        "import socket; socket.create_server(('127.0.0.1', 0));"
        " socket.create_connection(('127.0.0.1', 22), 1)"
    )
    datagram = (
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'a', ('8.8.8.8',"
        " 53))"
    )
    assert run_tests("", [server, datagram], LIMITS, how) == [False, False]


MOUNT = """
import ctypes
libc = ctypes.CDLL(None)
assert libc.mount(b'none', b'/', None, 32 | 4096, None) == 0 or (
    libc.umount2(b'.', 2) == 0 or libc.setuid(0) == 0
)
"""


@needs_bwrap
def test_mounts_cannot_be_undone():
    assert not passes(MOUNT)


@everywhere
def test_the_environment_is_empty(how, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s")
    tests = [
        (
            "import os, sys; assert not os.listdir() and 'SECRET_TOKEN' not in os.environ and"
            " sys.stdin.read() == ''"
        ),
        "import sys; assert sys.flags.isolated and 'dschat_ppo' not in sys.modules",
    ]
    assert run_tests("", tests, LIMITS, how) == [True, True]


def test_a_program_ends_with_a_watcher_that_hangs(tmp_path, monkeypatch):
    mark = str(tmp_path)
    mark_sandboxes(monkeypatch, mark)
    monkeypatch.setattr(sandbox, "_END_SECONDS", 0.5)
    # The program has begun when it is a process of its own beside bubblewrap and the watcher,
    # or beside the watcher alone. A bubblewrap that is stopped earlier never starts it.
    processes = 3 if FOUND.bwrap else 2
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(
            passes, "import time; time.sleep(60)", limits=Limits(wall_seconds=3.0)
        )
        while len(seen := marked_processes(mark)) < processes:
            assert not running.done()
        [watcher] = [
            process for process in map(psutil.Process, seen) if process.ppid() == os.getpid()
        ]
        watcher.suspend()
        assert not running.result()
    assert left_of(mark) == []


def test_no_process_and_no_file_is_left(tmp_path, monkeypatch):
    mark = str(tmp_path)
    mark_sandboxes(monkeypatch, mark)
    monkeypatch.setattr("tempfile.tempdir", mark)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(
            passes, "import time; time.sleep(60)", limits=Limits(wall_seconds=1.0)
        )
        seen = [marked_processes(mark) for _ in iter(running.done, True)]
        assert not running.result()
    assert any(seen)
    before = os.listdir("/proc/self/fd")
    assert passes("open('a', 'w').write('a')")
    assert list(tmp_path.iterdir()) == [] and len(os.listdir("/proc/self/fd")) == len(before)
    assert left_of(mark) == []


def catches_sigterm(pid: int) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[
        1
    ]
    return int(caught, 16) >> (signal.SIGTERM - 1) & 1 == 1


@everywhere
def test_a_program_survives_the_signals_of_the_launcher(how):
    """The launcher sends SIGTERM to all its descendants. It still ends the processes that a program
    starts."""
    reached = []

    def signal_all():
        deadline = time.monotonic() + 10
        while len(reached) < 2 and time.monotonic() < deadline:
            time.sleep(0.5)  # the program runs
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):  # a child that another test left has ended
                    if "SET_SUBREAPER" in " ".join(process.cmdline()) and catches_sigterm(
                        process.pid
                    ):
                        process.send_signal(signal.SIGTERM)
                        process.send_signal(signal.SIGINT)
                        reached.append(process.pid)

    program = "import os, signal, time\ntime.sleep(2)\n"
    own = (
        "child = os.fork()\nif not child:\n    time.sleep(60)\ntime.sleep(0.5)\nos.kill(child,"
        " signal.SIGTERM)\n"
    )
    tests = [
        "assert True",
        own + "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15",
    ]
    thread = threading.Thread(target=signal_all)
    thread.start()
    passed = run_tests(program, tests, LIMITS, how)
    thread.join()
    assert len(reached) >= 2
    assert passed == [True, how.bwrap]  # without bwrap, Python refuses to fork
