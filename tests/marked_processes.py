"""Processes of one test's sandboxes: tests beside it have sandboxes too."""

import time
from contextlib import suppress

import psutil

from dschat_ppo.rewards import sandbox


def mark_sandboxes(monkeypatch, mark: str) -> None:
    """Put a mark into the environment of the sandboxes that this test starts."""
    monkeypatch.setitem(sandbox._ENVIRONMENT, "MARK", mark)


def marked_processes(mark: str) -> list[int]:
    """Process ids of all running processes with this mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process.pid] if process.environ().get("MARK") == mark else []
    return found


def left_of(mark: str, seconds: float = 20.0) -> list[int]:
    """The marked processes that still run after so long; returns at once when there is none."""
    deadline = time.monotonic() + seconds
    while (found := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
