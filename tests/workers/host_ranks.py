"""Forks ranks on the machines of `hosts.py` from one process that has imported the libraries.

host_ranks.py      reads a line of JSON for each machine and answers with the number of a process

    a machine: {"space": network namespace, "name": its name, "disk": folder, "place": where it sees that folder,
        "environments": [variables of a rank, ...], "script": path, "words": [text, ...], "out": path, "err": path,
        "code": path of the file that gets the exit code}

The process starts the ranks. A signal to its group reaches all of them, as Ctrl-C does; if it is killed, so are they.
"""

import ctypes
import os
import signal
import tempfile
from pathlib import Path

from dschat_ppo.common.processes import signal_when_parent_ends
from dschat_ppo.run import first_failure
from workers.fork_ranks import end_with, fork_for_each_line, import_libraries, redirect, run_script

NEW_MOUNTS, NEW_NAME, NEW_MEMORY, NEW_PROCESSES, NETWORK = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
PRIVATE, RECURSIVE, BIND = 1 << 18, 1 << 14, 1 << 12
LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount(source: str, place: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = (source.encode(), place.encode(), kind.encode() or None, flags, options.encode() or None)
    check(LIBC.mount(*words))


def enter(machine: dict) -> None:
    """Leave the network, names, memory and mounts of this machine, and the processes for children."""
    with open(f"/run/netns/{machine['space']}") as space:
        check(LIBC.setns(space.fileno(), NETWORK))
    check(LIBC.unshare(NEW_MOUNTS | NEW_NAME | NEW_MEMORY | NEW_PROCESSES))
    name = machine["name"].encode()
    check(LIBC.sethostname(name, len(name)))
    mount("none", "/", flags=PRIVATE | RECURSIVE)
    mount("none", "/dev/shm", "tmpfs", options="size=1g")
    mount(f"{machine['disk']}/hosts", "/etc/hosts", flags=BIND)
    mount(machine["disk"], machine["place"], flags=BIND)


def run_rank(machine: dict, environment: dict) -> None:
    signal_when_parent_ends(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    tempfile.tempdir = None  # that of this machine, which the process before may have looked up
    first_failure._OWN_FOLDERS = f"dschat_ppo_{os.getuid()}_{machine['name']}_"
    redirect(os.devnull, machine["out"], machine["err"])
    run_script(machine["script"], machine["words"])


def run_ranks(machine: dict) -> None:
    """As a launcher: the first rank that fails ends the others. Ends the process."""
    signal_when_parent_ends(signal.SIGKILL)
    mount("none", "/proc", "proc")
    ranks = []
    for environment in machine["environments"]:
        ranks.append(os.fork())
        if ranks[-1] == 0:
            run_rank(machine, environment)
    end_with(ranks, signal.SIGTERM)


def run_machine(machine: dict) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_when_parent_ends(signal.SIGKILL)
    enter(machine)
    first = os.fork()
    if first == 0:
        run_ranks(machine)
    code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    draft = Path(machine["code"] + ".draft")
    draft.write_text(str(code))
    draft.rename(machine["code"])
    os._exit(0)


def main() -> None:
    answers = import_libraries()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the machines
    for process in fork_for_each_line(run_machine):
        print(process, file=answers, flush=True)


if __name__ == "__main__":
    main()
