"""What the kernel knows of other processes, where there is a /proc, and tells of their end (Linux)."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def signal_at_parents_end(number: int) -> None:
    """From here on the kernel sends this process signal `number` when the thread that forked it ends, however it does.

    The processes that this one forks do not take it over. Of a thread that has ended already nothing is told. Without
    effect where the system is not Linux.
    """
    if _LIBC is not None:
        _LIBC.prctl(_SET_DEATH_SIGNAL, ctypes.c_ulong(number))


@dataclass(frozen=True)
class Process:
    """`started`: clock ticks since the machine's start, which tell processes of one number apart; `ended`: a zombie;
    `ticks`: clock ticks that it has computed."""

    parent: int
    started: int
    ended: bool
    ticks: int


def look_up(pid: int) -> Process | None:
    """The process of this number, or None where there is none or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name in parentheses may hold anything
    return Process(int(fields[1]), int(fields[19]), fields[0] in "ZX", int(fields[11]) + int(fields[12]))


def children() -> dict[int, Process]:
    """The processes that this one has started, by their numbers; none where there is no /proc."""
    found = {}
    for entry in os.scandir("/proc") if Path("/proc").is_dir() else ():
        process = look_up(int(entry.name)) if entry.name.isdigit() else None
        if process is not None and process.parent == os.getpid():
            found[int(entry.name)] = process
    return found


def command(pid: int) -> list[str]:
    """The words of its command line; none for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.split("\0")[:-1]


def ancestor(word: str) -> tuple[int, Process] | None:
    """The nearest process above this one that has `word` in its command line, and its number."""
    pid = os.getpid()
    while (process := look_up(pid)) is not None:
        if word in command(pid):
            return pid, process
        pid = process.parent
    return None


def processes_at(*places: Path) -> set[int]:
    """Other processes that run in one of these folders or have one of these files open, of those that this user may
    look at; none where there is no /proc."""
    wanted = {os.path.realpath(place) for place in places}
    numbers = {int(entry.name) for entry in Path("/proc").glob("[0-9]*")} - {os.getpid()}
    return {number for number in numbers if not wanted.isdisjoint(_places_of(number))}


def _places_of(pid: int) -> Iterator[str]:
    """The folder that it runs in and the files that it has open."""
    with suppress(OSError):  # another user's, or it has ended meanwhile
        for link in (f"/proc/{pid}/cwd", *(entry.path for entry in os.scandir(f"/proc/{pid}/fd"))):
            with suppress(FileNotFoundError):  # closed meanwhile
                yield os.readlink(link)
