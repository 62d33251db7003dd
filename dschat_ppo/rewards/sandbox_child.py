"""Run one program and its tests, isolated from the machine as far as the kernel permits. Started by `sandbox.py`.

`python -I sandbox_child.py REPORT`, with the job as JSON on standard input. It writes lines to descriptor REPORT that
start with the job's token: first the missing isolation, then the number of each test that passed. Without the token,
the program could forge these lines.

The script imports only the standard library and nothing of this project: it must start fast and not read the run's
files.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import secrets
import select
import signal
import struct
import sys
import time
import types

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
READ_ONLY, PRIVATE = 1, 1 << 18
NO_SUID, NO_DEVICES, NO_PROGRAMS, BIND = 2, 4, 8, 4096
SET_DEATH_SIGNAL, SET_DUMPABLE, SET_FILTER, SET_SUBREAPER, SET_NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
CAPABILITY_VERSION_3 = 0x20080522
INSIDE = 1000  # user and group number that the program sees
FOLDER_MODE = 0o700
DEVICES = ("null", "zero", "full", "random", "urandom")
WATCH_MILLISECONDS = 100
MOST_SECONDS_AT_ONCE = 2.0  # counted of the time limit, which waits while the machine sleeps or all is stopped

PROCESS_EVENTS = (
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "subprocess.Popen",
)  # fmt: skip

# machine -> (AUDIT_ARCH, column of the numbers in CALLS)
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# groups of system calls, with their numbers on x86_64 and aarch64; None where there is no such call
CALLS: dict[str, dict[str, tuple]] = {
    "always": {  # memory that setrlimit does not count, other processes' memory, mounts, and rarely used kernel code
        "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
        "memfd_create": (319, 279), "memfd_secret": (447, 447), "io_uring_setup": (425, 425), "bpf": (321, 280),
        "userfaultfd": (323, 282), "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218),
        "keyctl": (250, 219), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
        "kcmp": (312, 272), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
        "fsopen": (430, 430), "open_tree": (428, 428), "move_mount": (429, 429), "mount_setattr": (442, 442),
    },
    "network": {"socket": (41, 198)},
    "processes": {"fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281)},
    "signals": {
        "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
        "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
        "setpriority": (141, 140), "prlimit64": (302, 261), "sched_setaffinity": (203, 122),
        "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    },
}  # fmt: skip
CLONE, CLONE3, CLONE_THREAD, ANY_NEW_NAMESPACE = (56, 220), 435, 0x10000, 0x7E020000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
ALLOW, FAIL_WITH = 0x7FFF0000, 0x00050000
# (numbers of a system call, argument, test, value, result of the test): the call fails if the test has this result
NEW_PROCESS = (CLONE, 0, ANY_BIT, CLONE_THREAD, False)
ARGUMENTS = [
    (CLONE, 0, ANY_BIT, ANY_NEW_NAMESPACE, True),  # in a new user namespace, a program has all capabilities
    ((157, 167), 0, EQUAL, SET_DEATH_SIGNAL, True),  # prctl
    ((72, 25), 1, EQUAL, 8, True), ((72, 25), 1, EQUAL, 15, True),  # fcntl(F_SETOWN), (F_SETOWN_EX): they signal others
]  # fmt: skip

libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    """`struct mount_attr` of mount_setattr(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "namespace")]


class FilterProgram(ctypes.Structure):
    """`struct sock_fprog` of seccomp(2)."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def checked(result: int) -> None:
    """Raise `OSError` for a C call that failed."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def prctl(option: int, value: int) -> None:
    checked(libc.prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3))


def others_may(rights: int, path: str) -> bool:
    """Whether any user has these rights (4: read, 1: enter) for `path` and every folder above it."""
    while path != "/":
        if os.stat(path).st_mode & rights != rights:
            return False
        path = os.path.dirname(path)
    return True


def leave_root(folder: str) -> bool:
    """Switch to a random user id that owns only `folder`, if other users can read Python's files and reach `folder`."""
    places = [place for place in sys.path if os.path.isdir(place)]
    if not places or not all(others_may(5, os.path.realpath(place)) for place in places):
        return False
    if not others_may(1, os.path.dirname(os.path.realpath(folder))):  # a private TMPDIR
        return False
    number = 2**30 + secrets.randbelow(2**30)
    try:
        os.chown(folder, number, number)
        os.setgroups([])
        os.setresgid(number, number, number)
        os.setresuid(number, number, number)
    except OSError:
        return False
    prctl(SET_DUMPABLE, 1)  # otherwise /proc/self belongs to root
    return True


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def enter_namespaces() -> None:
    """New namespaces: no network, no other processes, no shared memory of others, and private mounts."""
    user, group = os.geteuid(), os.getegid()
    checked(libc.unshare(NEW_USER | NEW_MOUNTS | NEW_IPC | NEW_PIDS | NEW_NETWORK))
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{INSIDE} {user} 1")
    write("/proc/self/gid_map", f"{INSIDE} {group} 1")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    checked(libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()))


def make_files_private(folder: str, megabytes: int) -> None:
    """Make all mounts read-only, mount an empty tmpfs of limited size at `folder`, and hide devices and processes."""
    attributes = MountAttributes(set=READ_ONLY, propagation=PRIVATE)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    checked(libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), size))
    mount("none", folder, "tmpfs", NO_SUID | NO_DEVICES, f"size={megabytes}m,mode={FOLDER_MODE:o}")
    os.chdir(folder)
    nodes = {name: os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES if os.path.exists(f"/dev/{name}")}
    mount("none", "/dev", "tmpfs", NO_SUID | NO_PROGRAMS, "size=64k,mode=755")
    for name, node in nodes.items():
        write(f"/dev/{name}", "")
        mount(f"/proc/self/fd/{node}", f"/dev/{name}", "", BIND)
        os.close(node)
    checked(libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/dev", 0, ctypes.byref(attributes), size))
    flags = READ_ONLY | NO_SUID | NO_DEVICES | NO_PROGRAMS
    try:
        mount("proc", "/proc", "proc", flags)
    except OSError:  # in containers that hide parts of /proc
        mount("none", "/proc", "tmpfs", flags, "size=4k,mode=755")


def isolate(folder: str, job: dict) -> list[str]:
    """Enter namespaces; returns the isolation that is missing: "network", "files", "processes"."""
    was_root = os.geteuid() == 0
    is_root = was_root and not leave_root(folder)
    if not job["namespaces"]:
        return ["network", "files", "processes"]
    try:
        enter_namespaces()
    except OSError:
        return ["network", "files", "processes"]
    return ["processes"] if is_root else []  # RLIMIT_NPROC does not apply to root


def memory_of(process: int) -> int:
    """The proportional set size of a process in KiB; 0 if it has ended."""
    try:
        with open(f"/proc/{process}/smaps_rollup") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    except OSError:
        return 0


def shared_memory_of(process: int) -> dict[str, int]:
    """Inode -> KiB of each shared mapping of memory: it holds pages that no process has mapped any more."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError), open(f"/proc/{process}/maps") as file:
        for place, rights, offset, _, inode, *path in map(str.split, file):
            if rights[3] == "s" and path[:1] == ["/dev/zero"]:
                start, end = (int(number, 16) for number in place.split("-"))
                found[inode] = max(found.get(inode, 0), (int(offset, 16) + end - start) // 1024)
    return found


def watch(child: int, seconds: float, most_kib: int) -> None:
    """Wait for the end of the program; kill it and all that it started at its time limit, if its processes together
    hold more than `most_kib`, or if the caller closes standard input, at the latest by its own end.

    Without a private /proc, no memory is counted here. RLIMIT_AS limits a program of one process.
    """
    program, looked = os.pidfd_open(child), time.monotonic()
    poll = select.poll()
    poll.register(program, select.POLLIN)
    poll.register(0, 0)  # without events `poll` reports only that the other end closed
    while not poll.poll(WATCH_MILLISECONDS) and seconds > 0:
        before, looked = looked, time.monotonic()
        seconds -= min(looked - before, MOST_SECONDS_AT_ONCE)
        inside = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        is_private = not os.path.exists(f"/proc/{os.getpid()}/cmdline")
        if is_private and len(inside) > 1:
            shared: dict[str, int] = {}
            for process in inside:
                shared |= {name: max(kib, shared.get(name, 0)) for name, kib in shared_memory_of(process).items()}
            if sum(map(memory_of, inside)) + sum(shared.values()) > most_kib:
                break
    signal.pidfd_send_signal(program, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            os.waitpid(-1, 0)  # the children of what ends here are now this process's own: it is their subreaper
            for orphan in children():
                os.kill(orphan, signal.SIGKILL)


def children() -> list[int]:
    """The processes whose parent is this one; none where /proc is that of the namespace, which ends with its first."""
    try:
        with open("/proc/thread-self/children") as file:
            return [int(number) for number in file.read().split()]
    except OSError:
        return []


def drop_rights() -> None:
    """Drop all capabilities, block set-user-ID programs, and end when the parent ends."""
    prctl(SET_NO_NEW_PRIVILEGES, 1)
    checked(libc.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()))
    prctl(SET_DEATH_SIGNAL, signal.SIGKILL)


def set_limits(job: dict, missing: list[str]) -> None:
    """Set the kernel's limits on CPU time, memory, file size, descriptors and processes."""
    limits = {
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_AS: job["memory_mb"] * 2**20,
        resource.RLIMIT_FSIZE: job["file_mb"] * 2**20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if "processes" not in missing:
        limits[resource.RLIMIT_NPROC] = job["processes"]
    for limit, value in limits.items():
        highest = resource.getrlimit(limit)[1]
        value = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(limit, (value, value))


def instructions(architecture: int, denied: list[int], denied_arguments: list[tuple]) -> bytes:
    """A filter of system calls in classic BPF: those in `denied` fail with EPERM.

    Args:
        architecture: its AUDIT_ARCH; calls of another one (such as 32-bit calls) fail.
        denied: numbers of system calls.
        denied_arguments: (number, argument, test, value, result): the call fails if the test has this result.
    """
    number, kind, arguments = 0, 4, 16  # offsets in `struct seccomp_data`
    refuse = (RETURN, 0, 0, FAIL_WITH | errno.EPERM)
    lines = [(LOAD, 0, 0, kind), (EQUAL, 1, 0, architecture), refuse]
    lines += [(LOAD, 0, 0, number), (AT_LEAST, 0, 1, 0x40000000), refuse]  # x32
    for call in denied:
        lines += [(EQUAL, 0, 1, call), refuse]
    lines += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, FAIL_WITH | errno.ENOSYS)]  # libc then uses clone: flags to read
    for call, argument, test, value, result in denied_arguments:
        lines += [(EQUAL, 0, 4, call), (LOAD, 0, 0, arguments + 8 * argument)]
        lines += [(test, *((0, 1) if result else (1, 0)), value), refuse, (LOAD, 0, 0, number)]
    lines.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def filter_calls(groups: list[str]) -> bool:
    """Let the kernel refuse groups of `CALLS` from now on; False if it does not filter on this machine."""
    architecture, column = ARCHITECTURES.get(os.uname().machine, (0, 0))
    if architecture == 0 or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    numbers = [number[column] for group in groups for number in CALLS[group].values()]
    rules = [*ARGUMENTS, *([NEW_PROCESS] if "processes" in groups else [])]
    program = instructions(
        architecture, [n for n in numbers if n is not None], [(call[column], *rule) for call, *rule in rules]
    )
    filters = FilterProgram(len(program) // 8, program)
    return libc.prctl(SET_FILTER, 2, ctypes.byref(filters), 0, 0) == 0


def refuse_calls(missing: list[str], job: dict) -> list[str]:
    """Filter system calls, also in place of missing namespaces; returns what is still missing then."""
    groups = ["always", *(name for name in ("network", "processes") if name in missing)]
    if "network" in missing:  # no namespaces: the program would see the run's processes
        groups.append("signals")
    if not job["filters"] or not filter_calls(groups):
        return [*missing, "calls"]
    return [name for name in missing if name != "network"]


def forbid(missing: list[str]) -> None:
    """Where the kernel does not isolate network or processes, let Python refuse them (programs can circumvent that)."""

    def refuse(event: str, arguments: tuple) -> None:
        network = "network" in missing and event.startswith("socket.")
        if network or ("processes" in missing and event in PROCESS_EVENTS):
            raise PermissionError(f"{event} is not permitted here")

    if missing:
        sys.addaudithook(refuse)


def run(program: str, tests: list[str], token: str, report: int) -> None:
    """Execute the program as a module and each test in its namespace; report the tests that do not raise."""
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    exec(compile(program, "answer.py", "exec"), module.__dict__)
    for number, test in enumerate(tests):
        with contextlib.suppress(BaseException):
            exec(compile(test, f"test_{number}.py", "exec"), module.__dict__)
            os.write(report, f"{token} {number}\n".encode())


def outlive_signals() -> None:
    """Handle SIGTERM and SIGINT by doing nothing: DeepSpeed's launcher sends SIGTERM to all its descendants when the
    run is to stop. SIGKILL ends this process at the time limit. `SIG_IGN` would be inherited by other programs."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def restore_signals() -> None:
    """Default handlers in processes that the program forks."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    outlive_signals()
    report, job = int(sys.argv[1]), json.loads(sys.stdin.buffer.readline())
    folder = os.getcwd()
    missing = isolate(folder, job)
    prctl(SET_SUBREAPER, 1)
    child = os.fork()  # process 1 of the new namespace: when it ends, all others in it end
    if child:
        os.close(report)
        prctl(SET_DUMPABLE, 0)  # the program cannot write into this process
        watch(child, job["wall_seconds"], job["memory_mb"] * 1024)
        os._exit(0)
    if "network" not in missing:
        try:
            make_files_private(folder, job["file_mb"])
        except OSError:
            missing.append("files")
    os.register_at_fork(after_in_child=restore_signals)
    drop_rights()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    os.close(nowhere)
    set_limits(job, missing)
    forbid(missing)
    missing = refuse_calls(missing, job)
    os.write(report, f"{job['token']} {json.dumps(missing)}\n".encode())
    try:
        run(job["program"], job["tests"], job.pop("token"), report)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
