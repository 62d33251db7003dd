"""Hostile programs in the sandbox: what docs/rewards.md promises, tried on this machine."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from marked_processes import mark_sandboxes, marked_processes

from dschat_ppo.config.reward_flags import RewardSourceFlags
from dschat_ppo.errors import UserError
from dschat_ppo.rewards import build_rewards, sandbox, sandbox_child
from dschat_ppo.rewards.build_rewards import WEAKER
from dschat_ppo.rewards.sandbox import Limits, missing_isolation, run_tests

LIMITS = Limits(cpu_seconds=5, wall_seconds=30.0)
MISSING = missing_isolation()
needs_files = pytest.mark.skipif("files" in MISSING, reason="this machine does not permit private mounts")
needs_processes = pytest.mark.skipif("processes" in MISSING, reason="this machine does not count processes")
needs_filter = pytest.mark.skipif("calls" in MISSING, reason="this machine does not filter system calls")
HAS_NAMESPACES = not {"files", "processes"} <= set(MISSING)
everywhere = pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "no namespaces"])


@pytest.fixture
def open_python(monkeypatch):
    """A Python that other users can read, where there is one, so that root drops its user id."""
    places = [place for place in (sys.executable, "/usr/bin/python3") if os.path.exists(place)]
    is_open = [place for place in places if sandbox_child.others_may(5, os.path.realpath(place))]
    monkeypatch.setattr(sandbox, "sys", SimpleNamespace(executable=(is_open or places)[0]))


def passed(*tests: str, namespaces: bool = True, limits: Limits = LIMITS) -> list[bool]:
    return run_tests("", list(tests), limits, namespaces).passed


def refusal(statement: str) -> str:
    """A test that passes if the statement fails with an OSError, or, where processes are hidden, finds nothing."""
    lines = f"try:\n    {statement}\nexcept OSError:\n    pass\nelse:\n    raise AssertionError"
    return f"import ctypes, os, resource, signal, socket, subprocess\n{lines}"


CALL = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
result = libc.syscall({})
assert result == -1 and ctypes.get_errno() == errno.EPERM, (result, ctypes.get_errno())
"""
COLUMN = sandbox_child.ARCHITECTURES.get(os.uname().machine, (0, 0))[1]


@needs_filter
@everywhere
def test_refused_system_calls(namespaces):
    """All of them, with arguments of 0: without the filter, most fail with another error or succeed."""
    numbers = [number[COLUMN] for number in sandbox_child.CALLS["always"].values()]
    assert passed(*(CALL.format(f"{number}, 0, 0, 0, 0, 0") for number in numbers), namespaces=namespaces) == [
        True
    ] * len(numbers)


@needs_filter
@everywhere
def test_functions_of_the_c_library_are_refused(namespaces):
    """By name, so that a wrong number in the table is noticed."""
    calls = (
        "shmget(0, 4096, 0o1600)", "msgget(0, 0o1600)", "semget(0, 1, 0o1600)", "memfd_create(b'x', 0)",
        "ptrace(0, 0, 0, 0)", "process_vm_readv(1, None, 0, None, 0, 0)", "process_vm_writev(1, None, 0, None, 0, 0)",
        "unshare(0)", "setns(-1, 0)", "mount(b'none', b'.', b'tmpfs', 0, None)", "umount2(b'.', 2)",
        *(() if namespaces else ("socket(1, 1, 0)", "kill(0, 0)", "vfork()", "execv(b'/bin/true', None)")),
    )  # fmt: skip
    start = "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    tests = [f"{start}assert libc.{call} == -1 and ctypes.get_errno() == errno.EPERM" for call in calls]
    assert passed(*tests, namespaces=namespaces) == [True] * len(tests)


@needs_filter
@pytest.mark.parametrize("group", ["network", "processes", "signals"])
def test_system_calls_refused_without_namespaces(group):
    numbers = [number[COLUMN] for number in sandbox_child.CALLS[group].values() if number[COLUMN] is not None]
    tests = [CALL.format(f"{number}, 0, 0, 0, 0, 0") for number in numbers]
    assert passed(*tests, namespaces=False) == [True] * len(tests)


@needs_filter
def test_processes_cannot_start_past_python_without_namespaces():
    """The C library's own functions are out of reach of Python's audit hook. Threads still start."""
    tests = [
        "import ctypes; child = ctypes.CDLL(None).fork()\nif child == 0: os._exit(0)\nassert child == -1",
        "import ctypes; assert ctypes.CDLL(None).system(b'true') != 0",
        "import ctypes; assert ctypes.CDLL(None).socket(2, 1, 0) == -1",
        "import threading; t = threading.Thread(target=print); t.start(); t.join()",
    ]
    assert run_tests("import os", tests, LIMITS, namespaces=False).passed == [True] * 4


@needs_filter
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 exists on x86_64 only")
def test_calls_of_another_architecture_are_refused():
    assert passed(CALL.format(f"{0x40000000 + 39}")) == [True]


@everywhere
def test_no_signal_reaches_the_run(namespaces):
    if not namespaces and "calls" in MISSING:
        pytest.skip("this machine does not filter system calls")
    parents = [os.getpid(), os.getppid()]
    tests = [refusal(f"os.kill({pid}, 0)") for pid in parents]
    tests += [refusal("os.kill(-1, 0)"), refusal(f"os.killpg({os.getpgid(0)}, 0)")]
    tests += ["import os; assert os.getppid() == 0 or os.kill(os.getppid(), 0)"] if namespaces else []
    assert passed(*tests, namespaces=namespaces)[: len(parents)] == [True] * len(parents)
    if namespaces and HAS_NAMESPACES:
        assert passed("import os; assert os.getppid() == 0") == [True]


@needs_files
def test_proc_shows_no_other_process():
    tests = [
        "import os; assert [name for name in os.listdir('/proc') if name.isdigit()] in (['1'], [])",
        refusal(f"open('/proc/{os.getpid()}/environ').read()"),
        refusal(f"open('/proc/{os.getpid()}/cmdline').read()"),
        refusal("open('/proc/1/comm', 'w').write('x')"),
        refusal("open('/proc/sys/kernel/core_pattern', 'w').write('x')"),
        refusal("open('/proc/sysrq-trigger', 'w').write('x')"),
        refusal("os.stat('/proc/1/fd/100')"),
    ]
    assert passed(*tests) == [True] * len(tests)


@needs_files
def test_devices_are_those_without_state():
    tests = [
        "import os; assert sorted(os.listdir('/dev')) == ['full', 'null', 'random', 'urandom', 'zero']",
        "open('/dev/null', 'w').write('x'); assert open('/dev/zero', 'rb').read(2) == bytes(2)",
        refusal("os.mkdir('/dev/shm')"),
        refusal("open('/dev/x', 'w')"),
        refusal("os.mknod('sda', 0o60600, os.makedev(8, 0))"),
        "import multiprocessing.shared_memory as m\ntry: m.SharedMemory(create=True, size=10)\n"
        "except OSError: pass\nelse: raise AssertionError",
    ]
    assert passed(*tests) == [True] * len(tests)


@needs_files
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
        refusal(f"os.utime('{target}', (0, 0))"),
        refusal(f"os.chmod('{target}', 0o777)"),
        refusal("os.chroot('/')"),
        refusal("open('/tmp/x_of_the_sandbox', 'w')"),
        refusal("open('/var/tmp/x_of_the_sandbox', 'w')"),
        "open('mine', 'w').write('x')",
    ]
    assert passed(*tests) == [True] * len(tests)
    assert target.read_text() == "kept" and [path.name for path in tmp_path.iterdir()] == ["target"]


@everywhere
def test_limits_cannot_be_raised(namespaces):
    names = ("CPU", "AS", "FSIZE", "NOFILE", "CORE", *(["NPROC"] if "processes" not in MISSING and namespaces else []))
    raised = [f"resource.setrlimit(resource.RLIMIT_{name}, (-1, -1))" for name in names]
    tests = [
        f"import resource\ntry: {line}\nexcept (ValueError, OSError): pass\nelse: raise AssertionError"
        for line in raised
    ]
    assert passed(*tests, refusal("os.nice(-5)"), namespaces=namespaces) == [True] * (len(tests) + 1)


@everywhere
def test_open_files_are_few_and_none_is_inherited(namespaces):
    secret = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(secret, True)
    count = "import os\nfiles = []\ntry:\n    while len(files) < 999: files.append(os.open('/dev/null', 0))\n"
    tests = [
        f"{count}except OSError: pass\nassert len(files) < 64\nfor n in files: os.close(n)",
        "import os\nkinds = set()\nfor n in range(3, 64):\n    try: kinds.add(os.fstat(n).st_mode & 0o170000)\n"
        "    except OSError: pass\nassert kinds <= {0o010000}, kinds",  # the pipe of the report
    ]
    try:
        assert passed(*tests, namespaces=namespaces) == [True, True]
    finally:
        os.close(secret)


def crash(namespaces: bool, folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        assert passed("import ctypes; ctypes.string_at(0)", "assert True", namespaces=namespaces) == [False, False]
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


@everywhere
def test_a_crash_leaves_no_core_dump(namespaces, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o711)
    crash(namespaces, tmp_path)
    if HAS_NAMESPACES:  # otherwise the filter refuses to tell a limit, because it also sets those of other processes
        assert passed("import resource; assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)") == [True]
    assert list(tmp_path.rglob("*")) == []


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(256):
            try: os.close(number)
            except OSError: pass
        while True: time.sleep(0.05)
    os._exit(0)
time.sleep(0.3)
"""


@everywhere
def test_a_daemon_does_not_outlive_its_program(namespaces, tmp_path, monkeypatch):
    mark = str(tmp_path)
    mark_sandboxes(monkeypatch, mark)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_tests, "", [DAEMON], LIMITS, namespaces)
        seen = [marked_processes(mark) for _ in iter(running.done, True)]
        outcome = running.result()
    assert any(seen)
    if "processes" not in outcome.missing:
        assert outcome.passed == [True]
    deadline = time.monotonic() + 3
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked_processes(mark) == []


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
sandbox.sys.executable = {python!r}
sandbox._ENVIRONMENT["MARK"] = {mark!r}
sandbox.run_tests("", [{program!r}], sandbox.Limits(wall_seconds=30.0), {namespaces}, {filters})
"""


@pytest.mark.parametrize(
    ("namespaces", "filters"), [(True, True), (True, False), (False, True), (False, False)]
)  # fmt: skip
@pytest.mark.parametrize("ended", ["at its time limit", "with its caller"])
def test_a_program_that_gives_up_its_parent_ends(namespaces, filters, ended, tmp_path, monkeypatch, open_python):
    """It leaves the session, and asks the kernel for no signal when its parent ends; so does its child."""
    mark = str(tmp_path)
    mark_sandboxes(monkeypatch, mark)
    if ended == "at its time limit":
        run_tests("", [LEFT_ALONE], Limits(wall_seconds=1.0), namespaces, filters)
    else:
        script = CALLER.format(**locals(), python=sandbox.sys.executable, program=LEFT_ALONE)
        caller = subprocess.Popen([sys.executable, "-c", script])
        deadline = time.monotonic() + 10
        while len(marked_processes(mark)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        assert len(marked_processes(mark)) >= 2
        caller.kill()
        caller.wait()
        deadline = time.monotonic() + 3
        while marked_processes(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert marked_processes(mark) == []


@needs_filter
@everywhere
def test_refused_arguments(namespaces, open_python):
    """No namespace where a program has all capabilities, no life after its parent, no signal to another process."""
    numbers = [call[COLUMN] for call, *_ in sandbox_child.ARGUMENTS]
    clone, prctl, fcntl = numbers[:3]
    start = "import ctypes, errno, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    tests = [CALL.format(f"{clone}, {flag | 17}, 0, 0, 0, 0") for flag in (2**17, 2**25, 2**26, 2**28, 2**30)]
    tests += [
        CALL.format(f"{prctl}, 1, 0, 0, 0, 0"),
        f"{start}assert libc.prctl(1, 0) == -1 and ctypes.get_errno() == 1",
    ]
    tests += [CALL.format(f"{fcntl}, 0, {command}, {os.getpid()}, 0, 0") for command in (8, 15)]
    tests += [f"import fcntl\ntry: fcntl.fcntl(0, fcntl.F_SETOWN, {os.getpid()})\n"
              "except PermissionError: pass\nelse: raise AssertionError"]  # fmt: skip
    tests += ["import fcntl; fcntl.fcntl(0, fcntl.F_GETFD)", f"{start}assert libc.prctl(4, 1) == 0"]  # others work
    assert passed(*tests, namespaces=namespaces) == [True] * len(tests)


@needs_filter
def test_the_memory_of_the_trainer_is_closed():
    """A process that is not dumpable belongs to root in /proc; asked in one that ends."""
    script = "import ctypes; from dschat_ppo.runtime.processes import deny_access_to_memory as deny; "
    script += "before = ctypes.CDLL(None).prctl(3); deny(); print(before, ctypes.CDLL(None).prctl(3))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100).stdout
    assert printed.split() == ["1", "0"]


@pytest.mark.parametrize(("mode", "leaves"), [(0o711, True), (0o700, False)], ids=["open", "private"])
def test_root_stays_root_where_no_other_user_reaches_the_temporary_folder(monkeypatch, mode, leaves):
    """Otherwise the program could not write into its own folder."""
    parent, changed = Path(tempfile.mkdtemp()), list[int]()
    parent.chmod(mode)
    (parent / "own").mkdir()
    monkeypatch.setattr(sandbox_child.sys, "path", ["/usr/bin"])
    for name in ("chown", "setgroups", "setresgid", "setresuid"):
        monkeypatch.setattr(sandbox_child.os, name, lambda *words: changed.append(len(words)))
    monkeypatch.setattr(sandbox_child, "prctl", lambda *words: None)
    try:
        assert sandbox_child.leave_root(str(parent / "own")) is leaves
    finally:
        monkeypatch.undo()
        shutil.rmtree(parent)
    assert bool(changed) is leaves


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
def test_threads_are_limited(namespaces):
    """By the number of processes, or else by the memory of their stacks."""
    most = 20 if namespaces and "processes" not in MISSING else 1000
    assert passed(THREADS.format(most), namespaces=namespaces) == [True]


@needs_processes
@needs_files
def test_the_memory_of_all_processes_together_is_limited():
    share = "import os, time\nfor n in range(5):\n    if os.fork() == 0:\n        held = bytearray({})\n"
    share += "        held[::4096] = b'x' * len(held[::4096])\n        time.sleep(60)\ntime.sleep(1.5)"
    limits = Limits(memory_mb=300, wall_seconds=20.0)
    assert passed(share.format(20 * 2**20), limits=limits) == [True]
    assert passed(share.format(150 * 2**20), limits=limits) == [False]


@everywhere
@pytest.mark.parametrize("stream", ["1", "2"])
def test_endless_output_takes_no_memory(stream, namespaces, capfd):
    before = psutil.Process().memory_info().rss
    assert passed(f"import os\nwhile True: os.write({stream}, b'x' * 65536)", namespaces=namespaces,
                  limits=Limits(cpu_seconds=1, wall_seconds=3.0)) == [False]  # fmt: skip
    assert psutil.Process().memory_info().rss - before < 2**25
    assert capfd.readouterr() == ("", "")


UNMAPPED = """
import mmap, os, time
for n in range(5):
    if os.fork() == 0:
        held = mmap.mmap(-1, {})
        for start in range(0, len(held), 2**18):
            held[start] = 1
            held.madvise(mmap.MADV_DONTNEED)
        time.sleep(60)
time.sleep(1.5)
"""


@needs_files
def test_shared_memory_counts_after_its_pages_are_unmapped(open_python):
    limits = Limits(memory_mb=300, wall_seconds=20.0)
    assert passed(UNMAPPED.format(20 * 2**20), limits=limits) == [True]
    assert passed(UNMAPPED.format(150 * 2**20), limits=limits) == [False]


DENY_NAMESPACES = """
from dschat_ppo.rewards import sandbox, sandbox_child
sandbox_child.prctl(sandbox_child.SET_NO_NEW_PRIVILEGES, 1)
sandbox_child.CALLS["always"], sandbox_child.ARGUMENTS = {"unshare": (272, 97)}, []
assert sandbox_child.filter_calls(["always"])
print(*sandbox.missing_isolation())
"""


@needs_filter
def test_a_run_in_a_container_without_namespaces_says_so(monkeypatch, capsys):
    """A filter that refuses `unshare`, as that of container runtimes, around the check at the start of a run."""
    probe = subprocess.run([sys.executable, "-c", DENY_NAMESPACES], capture_output=True, text=True, timeout=100)
    assert probe.stdout.split() == ["files", "processes"], probe.stderr
    monkeypatch.setattr(build_rewards, "missing_isolation", probe.stdout.split)
    with pytest.raises(UserError, match="code_tests: .* programs can write every file .*--allow_weak_sandbox"):
        build_rewards.check_sources(RewardSourceFlags(reward_function=["code_tests"]))
    closed = list[bool]()
    monkeypatch.setattr(build_rewards, "deny_access_to_memory", lambda: closed.append(True))
    build_rewards.check_sources(RewardSourceFlags(reward_function=["code_tests"], allow_weak_sandbox=True))
    assert closed == [True]
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("weaker isolation on this machine") == 2
    assert "programs can write every file" in printed and "programs may not start processes" in printed


def test_every_gap_has_a_sentence():
    names = {"network", "files", "processes", "calls"}
    assert set(WEAKER) == names
    assert set(run_tests("", [], LIMITS, namespaces=False, filters=False).missing) == names
