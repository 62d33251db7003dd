"""Run one program and its tests, isolated from the machine as far as the kernel permits. Started by `sandbox.py`.

`python -I sandbox_child.py REPORT`, with the job as JSON on standard input. It writes lines to descriptor REPORT that
start with the job's token: first the missing isolation, then the number of each test that passed. Without the token,
the program could forge these lines.

The script imports only the standard library and nothing of this project: it must start fast and not read the run's
files.
"""

import contextlib
import ctypes
import json
import os
import resource
import secrets
import signal
import sys
import types

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
READ_ONLY, PRIVATE = 1, 1 << 18
NO_SUID, NO_DEVICES = 2, 4
SET_DEATH_SIGNAL, SET_DUMPABLE, SET_NO_NEW_PRIVILEGES = 1, 4, 38
CAPABILITY_VERSION_3 = 0x20080522
INSIDE = 1000  # user and group number that the program sees
FOLDER_MODE = 0o700

PROCESS_EVENTS = (
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "subprocess.Popen",
)  # fmt: skip

libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    """`struct mount_attr` of mount_setattr(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "namespace")]


def checked(result: int) -> None:
    """Raise `OSError` for a C call that failed."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def prctl(option: int, value: int) -> None:
    checked(libc.prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3))


def others_can_read(path: str) -> bool:
    """Whether any user can enter every folder above `path` and read it."""
    while path != "/":
        mode = os.stat(path).st_mode
        if not mode & 0o001 or not mode & 0o004:
            return False
        path = os.path.dirname(path)
    return True


def leave_root(folder: str) -> bool:
    """Switch to a random user id that owns only `folder`, if other users can read Python's files."""
    places = [place for place in sys.path if os.path.isdir(place)]
    if not places or not all(others_can_read(os.path.realpath(place)) for place in places):
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


def make_files_read_only(folder: str, megabytes: int) -> None:
    """Make all mounts read-only, and mount an empty tmpfs of limited size at `folder`."""
    attributes = MountAttributes(set=READ_ONLY, propagation=PRIVATE)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    checked(libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), size))
    options = f"size={megabytes}m,mode={FOLDER_MODE:o}".encode()
    checked(libc.mount(b"none", folder.encode(), b"tmpfs", NO_SUID | NO_DEVICES, options))
    os.chdir(folder)


def isolate(folder: str, job: dict) -> list[str]:
    """Isolate this process; returns the isolation that is missing: "network", "files", "processes"."""
    was_root = os.geteuid() == 0
    is_root = was_root and not leave_root(folder)
    if not job["namespaces"]:
        return ["network", "files", "processes"]
    try:
        enter_namespaces()
    except OSError:
        return ["network", "files", "processes"]
    missing = ["processes"] if is_root else []  # RLIMIT_NPROC does not apply to root
    try:
        make_files_read_only(folder, job["file_mb"])
    except OSError:
        missing.append("files")
    return missing


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
    report, job = int(sys.argv[1]), json.loads(sys.stdin.buffer.read())
    prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    missing = isolate(os.getcwd(), job)
    child = os.fork()  # process 1 of the new namespace: when it ends, all others in it end
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    os.register_at_fork(after_in_child=restore_signals)
    drop_rights()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    set_limits(job, missing)
    forbid(missing)
    os.write(report, f"{job['token']} {json.dumps(missing)}\n".encode())
    try:
        run(job["program"], job["tests"], job.pop("token"), report)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
