"""What the kernel knows of other processes, where there is a /proc (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


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


def own_names() -> Iterator[str]:
    """Short names of all processes of this user."""
    if not Path("/proc").is_dir():
        return
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == os.getuid():
                    yield Path(entry.path, "comm").read_text(encoding="utf-8", errors="replace").strip()
            except OSError:  # it has ended meanwhile
                continue
