"""Run one program and its tests under resource limits, watched by another process. Started by
`sandbox.py`.

`python -I -c SOURCE`, with the job as JSON on standard input. It writes lines to standard output
that start with the job's token: one with the process id when the program starts, then one with the
number of each test that passed. Without the token, the program could forge these lines. What the
program prints goes nowhere.

The script imports only the standard library and nothing of this project: it must start fast and not
read the run's files. With bwrap, it is process 1 of a namespace: programs cannot signal it, and all
of them end when it ends.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import types

SET_DUMPABLE, SET_SUBREAPER, SET_NO_NEW_PRIVILEGES = 4, 36, 38  # prctl(2)
WATCH_MILLISECONDS = 20
REAPED_AT_ONCE = 1000  # a program that forks without end must not keep its watcher busy
PROCESS_EVENTS = (
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.kill",
    "os.killpg",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
    "subprocess.Popen",
)
libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if libc.prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def memory_of(process: str) -> int:
    """The proportional set size of a process in KiB; infinite if it hides its memory, 0 if it has
    ended."""
    try:
        with open(f"/proc/{process}/smaps_rollup") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    except PermissionError:
        return 2**40
    except OSError:
        return 0


def is_within_limits(job: dict) -> bool:
    """Whether all processes of the namespace are few and hold little memory; True without its own
    /proc."""
    if not job["has_proc"]:
        return True
    inside = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    if len(inside) > job["processes"]:
        return False  # at once: adding up the memory of a thousand processes takes seconds
    if len(inside) <= 1:
        return True  # the kernel limits the memory of one
    return sum(map(memory_of, inside)) <= job["memory_mb"] * 1024


def reap() -> None:
    """Forget programs that have ended. They count until their parent asks for them, which is now
    this process: a subreaper."""
    with contextlib.suppress(ChildProcessError):  # none is left
        for _ in range(REAPED_AT_ONCE):
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return


def watch(child: int, job: dict) -> None:
    """Wait for the end of the program; kill it and all that it started if they exceed the limits,
    or when the caller closes standard input: at its time limit, or by its own end."""
    program = os.pidfd_open(child)
    poll = select.poll()
    poll.register(program, select.POLLIN)
    poll.register(0, 0)  # without events `poll` reports only that the other end closed
    while not poll.poll(WATCH_MILLISECONDS) and is_within_limits(job):
        reap()
    if job["bwrap"]:
        os._exit(0)  # ends the namespace
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(program, signal.SIGKILL)
    # until none is left: the children of what ends become this process's own
    with contextlib.suppress(ChildProcessError):
        while True:
            with open("/proc/thread-self/children") as file:
                for process in file.read().split():
                    os.kill(int(process), signal.SIGKILL)
            os.waitpid(-1, 0)


def leave_root(user: int) -> None:
    """Become another user, whose processes can still read what /proc has about themselves."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    prctl(SET_DUMPABLE, 1)


def set_limits(job: dict) -> None:
    """Set the kernel's limits on CPU time, memory, file size, descriptors and processes."""
    limits = {
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_AS: job["memory_mb"] * 2**20,
        resource.RLIMIT_FSIZE: job["file_mb"] * 2**20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if job["bwrap"] or job["leaves_root"]:  # otherwise it counts the other processes of the user
        limits[resource.RLIMIT_NPROC] = job["processes"]
    for limit, value in limits.items():
        highest = resource.getrlimit(limit)[1]
        if highest != resource.RLIM_INFINITY:
            value = min(value, highest)
        resource.setrlimit(limit, (value, value))


def refuse_event(event: str, arguments: tuple) -> None:
    """Let Python refuse network and processes where nothing else does: a program can circumvent
    that."""
    if event.startswith("socket.") or event in PROCESS_EVENTS:
        raise PermissionError(f"{event} is not permitted here")


def run_program(program: str, tests: list[str], token: str, report: int) -> None:
    """Execute the program as a module and each test in its namespace; report the tests that do not
    raise."""
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    exec(compile(program, "answer.py", "exec"), module.__dict__)
    for test_index, test in enumerate(tests):
        with contextlib.suppress(BaseException):
            exec(compile(test, f"test_{test_index}.py", "exec"), module.__dict__)
            os.write(report, f"{token} {test_index}\n".encode())


def restore_default_handlers() -> None:
    """In processes that the program forks."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """Read the job and fork: the child runs the program, and this process watches it."""
    # DeepSpeed's launcher sends SIGTERM to all its descendants when the run is to stop. SIGKILL
    # ends this process at the time limit. `SIG_IGN` would be inherited by other programs.
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: None)
    job = json.loads(sys.stdin.buffer.readline())
    prctl(SET_SUBREAPER, 1)
    child = os.fork()
    if child:
        prctl(SET_DUMPABLE, 0)  # the program cannot write into this process
        watch(child, job)
        os._exit(0)
    os.register_at_fork(after_in_child=restore_default_handlers)
    if job.get("user") is not None:
        leave_root(job["user"])
    prctl(SET_NO_NEW_PRIVILEGES, 1)
    report = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    set_limits(job)
    if not job["bwrap"]:
        sys.addaudithook(refuse_event)
    os.write(report, f"{job['token']} starts as {os.getpid()}\n".encode())
    try:
        run_program(job["program"], job["tests"], job.pop("token"), report)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
