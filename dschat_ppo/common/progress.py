"""Signs of life of this process. What it does with them is the watchdog's business (`common/watchdog.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class _Signs:
    """`last` in seconds of the monotonic clock; `patient`: how many blocks that may take their time are open."""

    last: float
    patient: int = 0
    heed: Callable[[float], None] | None = None


_SIGNS = _Signs(time.monotonic())


def beat() -> None:
    """This process makes progress: called in every loop whose rounds take less than the watchdog's limit. Cheap."""
    _SIGNS.last = time.monotonic()
    if _SIGNS.heed is not None:
        _SIGNS.heed(_SIGNS.last)


@contextmanager
def patient() -> Iterator[None]:
    """The block may take as long as it likes: other ranks prepare the data, or this one does."""
    _SIGNS.patient += 1
    beat()
    try:
        yield
    finally:
        _SIGNS.patient -= 1
        beat()


def idle_seconds() -> float:
    """Seconds since the last sign of life; 0 inside `patient`."""
    return 0.0 if _SIGNS.patient else time.monotonic() - _SIGNS.last


def is_patient() -> bool:
    """Whether a block of `patient` is open."""
    return _SIGNS.patient > 0


def heed(listener: Callable[[float], None] | None) -> None:
    """Call `listener` with the time of each beat; None: nobody."""
    _SIGNS.heed = listener
