"""Signs of life of this process. What it does with them is the watchdog's business (`runtime/watchdog.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class _Signs:
    """`last` in seconds of the monotonic clock; `watchdog_paused`: how many such blocks are open."""

    last: float
    watchdog_paused: int = 0
    on_heartbeat: Callable[[float], None] | None = None


_SIGNS = _Signs(time.monotonic())


def heartbeat() -> None:
    """This process makes progress: called in every loop whose rounds take less than the watchdog's limit. Cheap."""
    _SIGNS.last = time.monotonic()
    if _SIGNS.on_heartbeat is not None:
        _SIGNS.on_heartbeat(_SIGNS.last)


@contextmanager
def watchdog_paused() -> Iterator[None]:
    """The block may take as long as it likes: other ranks prepare the data, or this one does."""
    _SIGNS.watchdog_paused += 1
    heartbeat()
    try:
        yield
    finally:
        _SIGNS.watchdog_paused -= 1
        heartbeat()


def idle_seconds() -> float:
    """Seconds since the last sign of life; 0 inside `watchdog_paused`."""
    return 0.0 if _SIGNS.watchdog_paused else time.monotonic() - _SIGNS.last


def is_patient() -> bool:
    """Whether a block of `watchdog_paused` is open."""
    return _SIGNS.watchdog_paused > 0


def on_heartbeat(listener: Callable[[float], None] | None) -> None:
    """Call `listener` with the time of each beat; None: nobody."""
    _SIGNS.on_heartbeat = listener
