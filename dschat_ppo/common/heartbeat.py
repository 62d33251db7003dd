"""The heartbeat: the process reports progress. The watchdog acts when it stops
(`run/watchdog.py`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class _State:
    last: float  # heartbeat, in seconds of the monotonic clock
    pauses: int = 0  # number of open `watchdog_paused`


_STATE = _State(time.monotonic())


def heartbeat() -> None:
    """Report progress: call it in every loop whose iterations take less than the watchdog's limit.
    Cheap."""
    _STATE.last = time.monotonic()


@contextmanager
def watchdog_paused() -> Iterator[None]:
    """The block may take any time, without a heartbeat: other ranks prepare the data, or this one
    does."""
    _STATE.pauses += 1
    heartbeat()
    try:
        yield
    finally:
        _STATE.pauses -= 1
        heartbeat()


def idle_seconds() -> float:
    """Seconds since the last heartbeat; 0 inside `watchdog_paused`."""
    if _STATE.pauses:
        return 0.0
    return time.monotonic() - _STATE.last


def watchdog_is_paused() -> bool:
    """Whether a block of `watchdog_paused` is open."""
    return _STATE.pauses > 0
