"""Requests to stop: signals, and the end of the launcher. They are noted here; the trainers ask at safe places."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from dschat_ppo.errors import StopRequested
from dschat_ppo.runtime.processes import ancestor, command, look_up, signal_at_parents_end

_LAUNCHER, _RUNNERS = "deepspeed.launcher.launch", {"deepspeed", "ds"}
_GONE = -1  # no process has this number


@dataclass
class _Requests:
    """`signal`: the first that came; `told`: who watches says that the run is to stop; `interrupted`: there was a
    SIGINT; `launcher`, and `runner` above it: process numbers where they are DeepSpeed's, else None."""

    signal: int | None = None
    told: bool = False
    interrupted: bool = False
    launcher: int | None = None
    runner: int | None = None
    before: dict[int, Any] = field(default_factory=dict)
    forks_are_watched: bool = False


_REQUESTS = _Requests()


def install() -> None:
    """From here on SIGTERM and SIGINT are noted; a second SIGINT raises `KeyboardInterrupt`, so a person can insist.

    A signal that is ignored stays ignored. Where DeepSpeed's launcher is the parent, its end brings SIGTERM, however it
    ends (the kernel sends it, on Linux). Processes that this one forks do not take part: SIGTERM ends them, and they
    leave SIGINT to this one. For the main thread.
    """
    _forget()
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)
        if before not in (signal.SIG_IGN, _note):
            _REQUESTS.before[number] = before
            signal.signal(number, _note)
    if not _REQUESTS.forks_are_watched:
        os.register_at_fork(after_in_child=_in_forked_child)
        _REQUESTS.forks_are_watched = True
    _find_launcher()


def restore() -> None:
    """Undo `install`."""
    for number, before in _REQUESTS.before.items():
        signal.signal(number, before)
    _REQUESTS.before.clear()
    _forget()


def _forget() -> None:
    _REQUESTS.signal = _REQUESTS.launcher = _REQUESTS.runner = None
    _REQUESTS.interrupted = _REQUESTS.told = False


def requested() -> bool:
    """Whether this rank is asked to stop: a signal came, or the launcher or the `deepspeed` command above it is gone.

    Ranks may differ in it for a while: who acts on it agrees with the others first.
    """
    return reason() is not None


def noticed() -> bool:
    """Whether a signal came or `tell` was called: the cheap part of `requested`, to be asked at every token."""
    return _REQUESTS.told or _REQUESTS.signal is not None


def tell() -> None:
    """Who watches (the launcher, the other ranks) says that the run is to stop; from any thread."""
    _REQUESTS.told = True


def reason() -> str | None:
    """Why this rank is asked to stop ("SIGTERM", "SIGINT", "the launcher has ended", "another rank is to stop"), or
    None."""
    if _REQUESTS.signal is not None:
        return signal.Signals(_REQUESTS.signal).name
    if _launcher_is_gone():
        return "the launcher has ended"
    return "another rank is to stop" if _REQUESTS.told else None


@contextmanager
def helpers_may_end(doing: str) -> Iterator[None]:
    """For a block that starts processes of its own: the launcher's SIGTERM reaches them too, and they end at once.

    Raises:
        StopRequested: the request came before the block; or in the place of what it is to the block: a `RuntimeError`
            where a process was gone, the end of a connection or a time-out where the one that holds their queue was,
            an `ImportError` where another rank's compilation was to give a module.
    """
    from multiprocess import ProcessError  # here: --help need not wait for it

    end_if_asked(doing)
    try:
        yield
    except (RuntimeError, ImportError, OSError, EOFError, ProcessError):
        if not requested():
            raise
        raise _stopped(doing) from None


def end_if_asked(doing: str) -> None:
    """For work before training, which can be left at any place.

    Raises:
        StopRequested: this rank is asked to stop (as far as `noticed` tells).
    """
    if noticed():
        raise _stopped(doing)


def _stopped(doing: str) -> StopRequested:
    return StopRequested(f"stopped ({reason()}) while it {doing}; run the same command again")


def _note(number: int, _frame: FrameType | None) -> None:
    _REQUESTS.signal = _REQUESTS.signal or number
    if number == signal.SIGINT:
        if _REQUESTS.interrupted:
            raise KeyboardInterrupt
        _REQUESTS.interrupted = True


def _in_forked_child() -> None:
    if _REQUESTS.before:
        _REQUESTS.before.clear()
        _forget()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _find_launcher() -> None:
    """Remember DeepSpeed's launcher and runner. Any other parent (a shell) may end without taking this run along."""
    parent = os.getppid()
    process = look_up(parent)
    if process is None or _LAUNCHER not in command(parent):
        if process is not None and "CROSS_RANK" in os.environ and ancestor(_LAUNCHER) is None:
            _REQUESTS.launcher = _GONE  # it set that variable, and was killed while this rank began
        return
    _REQUESTS.launcher = parent
    words = command(process.parent)
    if "deepspeed.launcher.runner" in words or not _RUNNERS.isdisjoint(Path(word).name for word in words[:2]):
        _REQUESTS.runner = process.parent
    signal_at_parents_end(signal.SIGTERM)


def _launcher_is_gone() -> bool:
    if _REQUESTS.launcher is None:
        return False
    if os.getppid() != _REQUESTS.launcher:
        return True
    process = look_up(_REQUESTS.launcher)
    return process is None or (_REQUESTS.runner is not None and process.parent != _REQUESTS.runner)
