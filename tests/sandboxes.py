"""The sandbox as it is on this machine, and as on one without bubblewrap; the processes of one
test's sandboxes."""

import time
from contextlib import suppress

import psutil
import pytest

from dschat_ppo.rewards import sandbox
from dschat_ppo.rewards.sandbox import Isolation, isolation

FOUND = isolation()
WEAK = Isolation(bwrap=False, has_proc=False, leaves_root=FOUND.leaves_root)
needs_bwrap = pytest.mark.skipif(not FOUND.bwrap, reason=FOUND.missing.partition(", so")[0])
needs_proc = pytest.mark.skipif(
    not FOUND.has_proc, reason="no /proc of its own: bubblewrap or this container"
)
everywhere = pytest.mark.parametrize(
    "how", [pytest.param(FOUND, id="bwrap", marks=needs_bwrap), pytest.param(WEAK, id="weak")]
)


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
