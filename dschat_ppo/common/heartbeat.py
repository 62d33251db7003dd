"""The heartbeat: the process reports progress. The watchdog acts when it stops (`run/watchdog.py`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_MOST_SECONDS_AT_ONCE = 2.0


class TimeLeft:
    """A limit in seconds that counts only while this process runs, not while it is stopped (SIGSTOP). Call `seconds` at
    least once a second: more than two are not counted at once."""

    def __init__(self, limit: float):
        self._left, self._asked = limit, time.monotonic()

    def seconds(self) -> float:
        """How many are left; 0 or less when the limit has passed."""
        now = time.monotonic()
        self._left -= min(now - self._asked, _MOST_SECONDS_AT_ONCE)
        self._asked = now
        return self._left


@dataclass
class _State:
    last: float  # heartbeat, in seconds of `running_clock`
    pauses: int = 0  # number of open `watchdog_paused`
    stopped: float = 0.0  # seconds in which the process was stopped


_STATE = _State(time.monotonic())


def running_clock() -> float:
    """Seconds of the monotonic clock, without those in which the process was stopped (`note_stop`)."""
    return time.monotonic() - _STATE.stopped


def note_stop(seconds: float) -> None:
    """The process was stopped (SIGSTOP) for so long until now: that is no time without progress."""
    _STATE.stopped += seconds
    _STATE.last = min(_STATE.last, running_clock())


def heartbeat() -> None:
    """Report progress: call it in every loop whose iterations take less than the watchdog's limit. Cheap."""
    _STATE.last = running_clock()


@contextmanager
def watchdog_paused() -> Iterator[None]:
    """The block may take any time, without a heartbeat: other ranks prepare the data, or this one does."""
    _STATE.pauses += 1
    heartbeat()
    try:
        yield
    finally:
        _STATE.pauses -= 1
        heartbeat()


def idle_seconds() -> float:
    """Seconds since the last heartbeat; 0 inside `watchdog_paused`."""
    return 0.0 if _STATE.pauses else running_clock() - _STATE.last


def watchdog_is_paused() -> bool:
    """Whether a block of `watchdog_paused` is open."""
    return _STATE.pauses > 0
