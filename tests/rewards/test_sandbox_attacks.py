"""Hostile programs in the sandbox: what docs/rewards.md promises, tried on this machine."""

import os
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from sandboxes import (
    FOUND,
    everywhere,
    left_of,
    mark_sandboxes,
    marked_processes,
    needs_bwrap,
    needs_proc,
)

from dschat_ppo.config.ppo_flags import RewardSourceFlags
from dschat_ppo.errors import UserError
from dschat_ppo.rewards import build_rewards, sandbox, sandbox_child
from dschat_ppo.rewards.sandbox import Isolation, Limits, isolation, others_may_run, run_tests

LIMITS = Limits(cpu_seconds=5, wall_seconds=30.0)
# the kernel does, not the watcher alone
COUNTS_PROCESSES = FOUND.bwrap and (FOUND.leaves_root or os.geteuid() != 0)


def passed(*tests: str, how: Isolation = FOUND, limits: Limits = LIMITS) -> list[bool]:
    return run_tests("", list(tests), limits, how)


def refusal(statement: str) -> str:
    """A test that passes if the statement fails with an OSError, or, where processes are hidden,
    finds nothing."""
    lines = f"try:\n    {statement}\nexcept OSError:\n    pass\nelse:\n    raise AssertionError"
    return f"import ctypes, os, resource, signal, socket, subprocess\n{lines}"


@needs_bwrap
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of clone on x86_64")
def test_no_new_user_namespace():
    """A program has all capabilities in one."""
    clone = (
        "import ctypes\nlibc = ctypes.CDLL(None)\nchild = libc.syscall(56, {} | 17, 0, 0, 0, 0)\n"
    )
    clone += "if child == 0: libc._exit(0)\nassert child {} -1"
    assert (
        passed(*(clone.format(flag, "==") for flag in (2**17, 2**28, 2**30)), clone.format(0, "!="))
        == [True] * 4
    )


@needs_bwrap
def test_no_signal_reaches_the_run():
    tests = [refusal(f"os.kill({pid}, 0)") for pid in (os.getpid(), os.getppid())]
    tests += [
        f"import fcntl\ntry: fcntl.fcntl(0, fcntl.F_SETOWN, {os.getpid()})\nexcept OSError: pass\n"
        "else: raise AssertionError"
    ]
    assert passed(*tests) == [True] * len(tests)


@needs_bwrap
def test_signals_do_not_end_the_watcher():
    """It is process 1 of its namespace. A program that fills the memory then ends it, as before."""
    test = "import os, time\nassert (os.getppid(), os.getpid(), os.getuid()) == (1, 2, 1000)\n"
    test += "for n in (9, 19, 15): os.kill(1, n)\ntime.sleep(0.5)"
    assert passed(test, "assert True") == [True, True]
    assert passed(refusal("open('/proc/1/mem', 'r+b')"), refusal("os.kill(-1, 0)")) == [True, True]


@needs_proc
def test_proc_shows_no_other_process():
    tests = [
        "import os; assert [name for name in os.listdir('/proc') if name.isdigit()] == ['1', '2']",
        refusal(f"open('/proc/{os.getpid()}/environ').read()"),
        refusal(f"open('/proc/{os.getpid()}/cmdline').read()"),
        refusal("open('/proc/1/comm', 'w')"),
        refusal(
            "open('/proc/sys/kernel/core_pattern', 'r+')"
        ),  # would be written in vain: it is of the machine
        refusal("open('/proc/sysrq-trigger', 'a')"),
        refusal("os.stat('/proc/1/fd/100')"),
    ]
    assert passed(*tests) == [True] * len(tests)


@needs_bwrap
def test_devices_are_those_without_state():
    tests = [
        (
            "import os; assert sorted(os.listdir('/dev')) == ['full', 'null', 'random', 'urandom',"
            " 'zero']"
        ),
        "open('/dev/null', 'w').write('x'); assert open('/dev/zero', 'rb').read(2) == bytes(2)",
        refusal("os.mkdir('/dev/shm')"),
        refusal("open('/dev/x', 'w')"),
        refusal("os.mknod('sda', 0o60600, os.makedev(8, 0))"),
        (
            "import multiprocessing.shared_memory as m\ntry: m.SharedMemory(create=True, size=10)\n"
            "except OSError: pass\nelse: raise AssertionError"
        ),
    ]
    assert passed(*tests) == [True] * len(tests)


@needs_bwrap
def test_links_and_names_do_not_lead_out(tmp_path):
    """The temporary folder is the only one that can be written, through whatever name."""
    tmp_path.chmod(0o777)
    target = tmp_path / "target"
    target.write_text("kept")
    target.chmod(0o666)
    tests = [
        f"import os; os.symlink('{target}', 'link')\n" + refusal("open('link', 'w').write('x')"),
        refusal(f"os.link('{target}', 'hard')"),
        refusal(f"os.rename('{target}', 'here')"),
        refusal(f"os.truncate('{target}', 0)"),
        refusal(f"os.remove('{target}')"),
        refusal(f"open('{tmp_path}/new', 'w')"),
        refusal("os.mkdir('/var/tmp/made_in_the_sandbox')"),
        refusal(f"os.utime('{target}', (0, 0))"),
        refusal(f"os.chmod('{target}', 0o777)"),
        refusal("os.chroot('/')"),
        "open('/tmp/x_of_the_sandbox', 'w').write('x')",  # a /tmp of its own
        refusal("open('/var/tmp/x_of_the_sandbox', 'w')"),
        "open('mine', 'w').write('x')",
    ]
    assert passed(*tests) == [True] * len(tests)
    assert not Path("/tmp/x_of_the_sandbox").exists()
    assert target.read_text() == "kept" and [path.name for path in tmp_path.iterdir()] == ["target"]


@everywhere
def test_limits_cannot_be_raised_and_nothing_is_inherited(how):
    """The third: sudo and the like start without the privileges of their owner
    (PR_GET_NO_NEW_PRIVS)."""
    secret = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(secret, True)
    names = ("CPU", "AS", "FSIZE", "NOFILE", "CORE", *(["NPROC"] if how.bwrap else []))
    raised = [f"resource.setrlimit(resource.RLIMIT_{name}, (-1, -1))" for name in names]
    count = (
        "import os\nfiles = []\ntry:\n    while len(files) < 999: files.append(os.open('/dev/null',"
        " 0))\n"
    )
    tests = [
        f"{count}except OSError: pass\nassert len(files) < 64\nfor n in files: os.close(n)",
        (  # the pipe of the report
            "import os\nkinds = set()\nfor n in range(3, 64):\n    try:"
            " kinds.add(os.fstat(n).st_mode & 0o170000)\n    except OSError: pass\nassert kinds <="
            " {0o010000}, kinds"
        ),
        "import ctypes; assert ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 1",
        "import resource; assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)",
        *(
            f"import resource\ntry: {line}\nexcept (ValueError, OSError): pass\nelse: raise"
            " AssertionError"
            for line in raised
        ),
    ]
    try:
        assert passed(*tests, how=how) == [True] * len(tests)
    finally:
        os.close(secret)


@everywhere
def test_a_crash_leaves_no_core_dump(how, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o711)
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        assert passed("import ctypes; ctypes.string_at(0)", "assert True", how=how) == [
            False,
            False,
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    assert list(tmp_path.rglob("*")) == []


DAEMON = """
import ctypes, os, time
fork = ctypes.CDLL(None).fork  # past the hook of Python
if fork() == 0:
    os.setsid()
    if fork() == 0:
        for number in range(256):
            try: os.close(number)
            except OSError: pass
        while True: time.sleep(0.05)
    os._exit(0)
time.sleep(0.3)
"""


@everywhere
def test_a_daemon_does_not_outlive_its_program(how, tmp_path, monkeypatch):
    mark = str(tmp_path)
    mark_sandboxes(monkeypatch, mark)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_tests, "", [DAEMON], LIMITS, how)
        seen = [marked_processes(mark) for _ in iter(running.done, True)]
        assert running.result() == [True]
    assert any(seen) and left_of(mark) == []


LEFT_ALONE = """
import ctypes, os, time
libc = ctypes.CDLL(None)
if libc.fork() == 0:
    libc.setsid()
libc.prctl(1, 0)
libc.setsid()
while True: time.sleep(0.05)
"""
CALLER = """
from dschat_ppo.rewards import sandbox
sandbox._ENVIRONMENT["MARK"] = {mark!r}
sandbox.run_tests("", [{program!r}], sandbox.Limits(wall_seconds=30.0), sandbox.{how})
"""


@everywhere
@pytest.mark.parametrize("ended", ["at its time limit", "with its caller"])
def test_a_program_that_gives_up_its_parent_ends(how, ended, tmp_path, monkeypatch):
    """It leaves the session, and asks the kernel for no signal when its parent ends; so does its
    child."""
    mark = str(tmp_path)
    mark_sandboxes(monkeypatch, mark)
    if ended == "at its time limit":
        run_tests("", [LEFT_ALONE], Limits(wall_seconds=1.0), how)
    else:
        script = CALLER.format(mark=mark, how=how, program=LEFT_ALONE)
        caller = subprocess.Popen([sys.executable, "-c", script])
        deadline = time.monotonic() + 10
        while len(marked_processes(mark)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        assert len(marked_processes(mark)) >= 2
        caller.kill()
        caller.wait()
    assert left_of(mark, seconds=0.0 if ended == "at its time limit" else 3.0) == []


ATTACK_ON_WATCHER = """
import ctypes, os, time
libc = ctypes.CDLL(None)  # past the hook of Python
{first}
libc.kill(os.getppid(), {signal})
while True: time.sleep(0.05)
"""


@pytest.mark.parametrize("first", ["", "libc.setsid()", "libc.prctl(1, 0); libc.fork()"])
@pytest.mark.parametrize("signal", [9, 19])
def test_without_bubblewrap_a_program_ends_without_its_watcher(
    first, signal, tmp_path, monkeypatch
):
    """A program kills or stops its watcher, which has its user number where root cannot leave
    it."""
    mark = str(tmp_path)
    mark_sandboxes(monkeypatch, mark)
    monkeypatch.setattr(sandbox, "_END_SECONDS", 0.5)
    how = Isolation(bwrap=False, has_proc=False, leaves_root=False)
    program = ATTACK_ON_WATCHER.format(first=first, signal=signal)
    assert run_tests("", [program], Limits(wall_seconds=1.0), how) == [False]
    assert left_of(mark, seconds=0.3) == []


def test_without_bubblewrap_python_refuses_signals():
    tests = [refusal("os.kill(os.getppid(), 0)"), refusal("os.killpg(0, 0)")]
    how = Isolation(bwrap=False, has_proc=False, leaves_root=False)
    assert passed(*tests, how=how) == [True, True]


@needs_bwrap
def test_bubblewrap_is_found_where_path_has_it(isolation_with, tmp_path, monkeypatch):
    """Also by a relative path: programs start in another folder and without a PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bwrap").symlink_to(shutil.which("bwrap"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "bin")
    assert isolation_with("bin").bwrap
    assert sandbox.bwrap_words(LIMITS, FOUND)[0] == str(tmp_path / "bin" / "bwrap")


def test_many_processes_are_counted_before_their_memory_is_added_up(monkeypatch):
    """To add it up takes milliseconds for each."""
    monkeypatch.setattr(sandbox_child.os, "listdir", lambda _: list(map(str, range(1, 19))))
    monkeypatch.setattr(sandbox_child, "memory_of", lambda _: pytest.fail("added up"))
    job = {"has_proc": True, "processes": 16, "memory_mb": 1}
    assert not sandbox_child.is_within_limits(job)


@everywhere
def test_deeply_nested_folders_are_removed(how, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o711)
    nest = "import os\nfor n in range(3000):\n    os.mkdir('folder')\n    os.chdir('folder')"
    try:
        assert passed(nest, how=how) == [True]
        assert list(tmp_path.iterdir()) == []
    finally:  # pytest cannot remove them either
        subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)


def test_the_memory_of_the_trainer_is_closed():
    """A process that is not dumpable belongs to root in /proc; asked in one that ends."""
    script = (
        "import ctypes; from dschat_ppo.common.processes import deny_access_to_memory as deny; "
    )
    script += (
        "before = ctypes.CDLL(None).prctl(3); deny(); print(before, ctypes.CDLL(None).prctl(3))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100
    ).stdout
    assert printed.split() == ["1", "0"]


def test_root_stays_root_where_other_users_cannot_read_python(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to("/usr/bin/env")
    assert all(folder.stat().st_mode & 5 == 5 for folder in Path("/usr/bin/env").resolve().parents)
    assert others_may_run("/usr/bin/env") and not others_may_run(str(python)), (
        "pytest's folder is its user's alone"
    )


OPEN = "/usr/bin/python3"
FORKS = """
import ctypes, os, time
fork, children = ctypes.CDLL(None).fork, []  # past the hook of Python
while len(children) < 60:
    child = fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    if child < 0:
        break
    children.append(child)
assert len(children) < 20, len(children)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists(OPEN) or not others_may_run(OPEN), reason="not root"
)
@pytest.mark.parametrize("bwrap", [pytest.param(True, marks=needs_bwrap), False])
def test_root_gives_up_its_user_number(bwrap, monkeypatch):
    """Where other users can read Python: its files are closed, the kernel counts processes, and no
    signal reaches the watcher."""
    monkeypatch.setattr(sandbox.sys, "executable", OPEN)
    how = Isolation(bwrap, bwrap and FOUND.has_proc, leaves_root=True)
    tests = [
        f"import os; assert os.getuid() {'== 1000' if bwrap else '> 2**29'}",
        "open('own', 'w').write('x')",
        FORKS,
        "import ctypes, os; assert os.getpid() == 2 or ctypes.CDLL(None).kill(os.getppid(), 19)",
        "import os\nif os.path.exists('/proc/self'): open('/proc/self/environ').read()",
    ]
    assert passed(*tests, refusal("open('/etc/shadow')"), how=how) == [True] * 6
    assert passed(refusal("open('/etc/shadow')"), how=replace(how, leaves_root=False)) == [False]


THREADS = """
import threading
started, stop = [], threading.Event()
try:
    while len(started) < 5000:
        started.append(threading.Thread(target=stop.wait, daemon=True))
        started[-1].start()
except RuntimeError:
    pass
stop.set()
assert len(started) < {}, len(started)
"""


@everywhere
def test_threads_are_limited(how):
    """By the number of processes, or else by the memory of their stacks."""
    most = 20 if COUNTS_PROCESSES and how.bwrap else 1000
    assert passed(THREADS.format(most), how=how) == [True]


@needs_proc
def test_the_memory_of_all_processes_together_is_limited():
    share = "import os, time\nready, tell = os.pipe()\nfor n in range(5):\n    if os.fork() == 0:\n"
    share += "        held = bytearray({})\n        held[::4096] = b'x' * len(held[::4096])\n"
    share += "        os.write(tell, b'x')\n        time.sleep(60)\n"
    share += (
        "for n in range(5): os.read(ready, 1)  # on a busy machine they take a"
        " while\ntime.sleep(1.5)"
    )
    limits = Limits(memory_mb=300, wall_seconds=20.0)
    assert passed(share.format(20 * 2**20), limits=limits) == [True]
    assert passed(share.format(150 * 2**20), limits=limits) == [False]


@everywhere
@pytest.mark.parametrize("stream", ["1", "2"])
def test_endless_output_takes_no_memory(stream, how, capfd):
    before = psutil.Process().memory_info().rss
    assert passed(
        f"import os\nwhile True: os.write({stream}, b'x' * 65536)",
        how=how,
        limits=Limits(cpu_seconds=1, wall_seconds=3.0),
    ) == [False]
    assert psutil.Process().memory_info().rss - before < 2**25
    assert capfd.readouterr() == ("", "")


@needs_proc
def test_a_program_that_hides_the_memory_of_its_processes_ends():
    hides = (
        "import ctypes, os, time\nctypes.CDLL(None).prctl(4, {})\nif os.fork() == 0:"
        " time.sleep(60)\ntime.sleep(1)"
    )
    assert passed(hides.format(1)) == [True]
    assert passed(hides.format(0)) == [False]


@pytest.fixture
def isolation_with(monkeypatch):
    """A function: the isolation of this machine with another PATH."""

    def found(path) -> Isolation:
        with monkeypatch.context() as patch:
            patch.setenv("PATH", str(path))
            isolation.cache_clear()
            return isolation()

    yield found
    isolation.cache_clear()


def test_a_run_without_bubblewrap_asks_for_the_flag_and_says_so(
    isolation_with, monkeypatch, capsys
):
    found, closed = isolation_with("/nowhere"), list[bool]()
    assert not found.bwrap and found.missing.startswith("bubblewrap is not installed, so programs")
    monkeypatch.setattr(build_rewards, "isolation", lambda: found)
    with pytest.raises(
        UserError,
        match="code_tests: .* write and delete .*apt-get install bubblewrap.*--allow_weak_s",
    ):
        build_rewards.check_sources(RewardSourceFlags(reward_function=["code_tests"]))
    monkeypatch.setattr(build_rewards, "deny_access_to_memory", lambda: closed.append(True))
    build_rewards.check_sources(
        RewardSourceFlags(reward_function=["code_tests"], allow_weak_sandbox=True)
    )
    assert closed == [True]
    assert (
        " ".join(capsys.readouterr().out.split()).count("code_tests: bubblewrap is not installed")
        == 1
    )


def test_bubblewrap_that_does_not_work_is_quoted(isolation_with, tmp_path):
    for text, said in (
        ("Unknown option --size", "Unknown option --size; 0.8 or newer"),
        ("No permissions", "No permissions), so"),
    ):
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\necho 'bwrap: {text}' >&2\nexit 1\n")
        (tmp_path / "bwrap").chmod(0o755)
        found = isolation_with(tmp_path)
        assert not found.bwrap and f"bubblewrap does not work here (bwrap: {said}" in found.missing


def test_a_python_that_does_not_start_is_not_the_fault_of_bubblewrap(
    isolation_with, tmp_path, monkeypatch
):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no such library' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sandbox.sys, "executable", str(python))
    message = r"^Python does not start without bubblewrap \(no such library\)$"
    with pytest.raises(RuntimeError, match=message):
        isolation_with("/nowhere")
