"""A limit of processor time for a computation that a file of the user determines."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeIsUp(Exception):  # noqa: N818  the caller turns it into an error
    """The computation took longer than its limit."""


@contextmanager
def processor_time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the block (`TimeIsUp`) after `seconds` of this process's time in user mode.

    The interruption happens between two bytecodes or inside a match of `re`, which asks for signals. Signals reach the
    main thread only; in other threads nothing is limited. The limit of a surrounding block applies again afterwards,
    without the time of this one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGVTALRM, _interrupt)
    before = signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGVTALRM, signal.SIG_IGN)  # first: a late signal must not skip the next lines
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        signal.setitimer(signal.ITIMER_VIRTUAL, *before)  # of a block around this one


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise TimeIsUp
