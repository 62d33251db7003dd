"""Other processes of this machine, read from /proc; a signal when the parent ends; output that
nobody reads."""

from __future__ import annotations

import ctypes
import os
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# PR_SET_PDEATHSIG and PR_SET_DUMPABLE of prctl(2)
_SET_DEATH_SIGNAL = 1
_SET_DUMPABLE = 4
_LIBC = ctypes.CDLL(None)


def signal_when_parent_ends(signal_number: int) -> None:
    """Let the kernel send this process a signal when the thread that forked it ends, however it
    ends. Forked processes do not inherit this. No signal comes for a thread that has already
    ended."""
    _LIBC.prctl(_SET_DEATH_SIGNAL, ctypes.c_ulong(signal_number))


def deny_access_to_memory() -> None:
    """From here on, other processes of this user can neither read nor write this one's memory
    through /proc."""
    _LIBC.prctl(_SET_DUMPABLE, ctypes.c_ulong(0))


@dataclass(frozen=True)
class Process:
    """A process. `parent`: its number; `started`: clock ticks since the machine started, which
    distinguish processes of one number; `ended`: it is a zombie."""

    parent: int
    started: int
    ended: bool


def find_process(pid: int) -> Process | None:
    """The process of that number; None if there is none, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name in parentheses may hold anything
    return Process(int(fields[1]), int(fields[19]), fields[0] in "ZX")


def command_line(pid: int) -> list[str]:
    """The words of its command line; [] for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.split("\0")[:-1]


def ancestor(word: str) -> int | None:
    """The number of the nearest process above this one that has `word` in its command line."""
    pid = os.getpid()
    process = find_process(pid)
    while process is not None:
        if word in command_line(pid):
            return pid
        pid = process.parent
        process = find_process(pid)
    return None


def open_closed_streams() -> None:
    """Let each standard stream that the caller has closed (`>&-`) lead nowhere. Otherwise Python
    has None in its place, on which every method fails, and the next file that is opened gets its
    number, so that what a library prints ends up in that file."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def leave_dead_terminal(descriptors: Sequence[int] = (1, 2)) -> None:
    """Let file descriptors, by default stdout and stderr, lead nowhere if nobody reads them, as of
    a closed terminal or of a pipe whose reader has ended: each write would raise an error."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, 0)
    for descriptor, events in poll.poll(0):
        if events & (select.POLLHUP | select.POLLERR):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
