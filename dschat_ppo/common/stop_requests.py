"""Stop requests: signals, and the end of the launcher. They are noted here; trainers poll them
where they can stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from dschat_ppo.common.processes import (
    command_line,
    find_process,
    leave_dead_terminal,
    signal_when_parent_ends,
)
from dschat_ppo.errors import StopRequested

_LAUNCHER = "deepspeed.launcher.launch"
_RUNNERS = {"deepspeed", "ds"}


@dataclass
class _Requests:
    """`signal`: the first one received; `flag`: set by the watchdog; `interrupted`: a SIGINT was
    received; `launcher`, and `runner` above it: process numbers where they are DeepSpeed's, else
    None."""

    signal: int | None = None
    flag: bool = False
    interrupted: bool = False
    launcher: int | None = None
    runner: int | None = None


_REQUESTS = _Requests()


def install() -> None:
    """Note SIGTERM, SIGINT and SIGHUP from here on; a second SIGINT raises `KeyboardInterrupt`. For
    the main thread.

    A signal that is ignored stays ignored. If DeepSpeed's launcher is the parent, its end causes
    SIGTERM, however it ends (the kernel sends it, on Linux). SIGTERM ends forked processes, which
    ignore SIGINT and SIGHUP.
    """
    reset()
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, _on_signal)
    _find_launcher()


def reset() -> None:
    """Forget all requests, and the launcher."""
    vars(_REQUESTS).update(vars(_Requests()))


def requested() -> bool:
    """Whether this rank is to stop: a signal came, or the launcher or the `deepspeed` command above
    it has ended. Ranks may disagree for a while: synchronise the answer over all ranks before you
    act on it."""
    return reason() is not None


def flag_is_set() -> bool:
    """Whether a signal came or `set_flag` was called: the cheap part of `requested`, fast enough
    for every token."""
    return _REQUESTS.flag or _REQUESTS.signal is not None


def interrupted() -> bool:
    """Whether this process has received SIGINT since `install`."""
    return _REQUESTS.interrupted


def set_flag() -> None:
    """Request a stop, from any thread: for the watchdog, which observes the launcher and the other
    ranks."""
    _REQUESTS.flag = True


def reason() -> str | None:
    """Why this rank is to stop, such as "SIGTERM", "the launcher has ended" or "another rank is to
    stop", or None."""
    if _REQUESTS.signal is not None:
        return signal.Signals(_REQUESTS.signal).name
    if _launcher_has_ended():
        return "the launcher has ended"
    if _REQUESTS.flag:
        return "another rank is to stop"
    return None


@contextmanager
def subprocesses_may_stop(doing: str) -> Iterator[None]:
    """For a block that starts processes, which the launcher's SIGTERM ends too. During a stop it
    raises `StopRequested`, before the block or in place of the errors that their end causes, such
    as an `ImportError` of a module that another rank was compiling. `doing` is what the block does,
    in the past tense, for the message."""
    raise_if_stop_requested(doing)
    try:
        yield
    except (RuntimeError, ImportError, OSError):
        if not requested():
            raise
        raise _stopped(doing) from None


def raise_if_stop_requested(doing: str) -> None:
    """For work before training, which can be left at any place: `StopRequested` if
    `flag_is_set`."""
    if flag_is_set():
        raise _stopped(doing)


def _stopped(doing: str) -> StopRequested:
    return StopRequested(f"stopped ({reason()}) while it {doing}; run the same command again")


def _on_signal(signal_number: int, _frame: FrameType | None) -> None:
    _REQUESTS.signal = _REQUESTS.signal or signal_number
    if signal_number == signal.SIGHUP:
        leave_dead_terminal()
    if signal_number == signal.SIGINT:
        if _REQUESTS.interrupted:
            raise KeyboardInterrupt
        _REQUESTS.interrupted = True


def _after_fork_in_child() -> None:
    """In a forked process, SIGTERM ends it, and SIGINT and SIGHUP are ignored."""
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        reset()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for signal_number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(signal_number, signal.SIG_IGN)


os.register_at_fork(after_in_child=_after_fork_in_child)


def _find_launcher() -> None:
    """Remember DeepSpeed's launcher and runner. Any other parent (a shell) may end without ending
    this run."""
    parent = os.getppid()
    process = find_process(parent)
    if process is None or _LAUNCHER not in command_line(parent):
        return
    _REQUESTS.launcher = parent
    words = command_line(process.parent)
    if "deepspeed.launcher.runner" in words or not _RUNNERS.isdisjoint(
        Path(word).name for word in words[:2]
    ):
        _REQUESTS.runner = process.parent
    signal_when_parent_ends(signal.SIGTERM)


def _launcher_has_ended() -> bool:
    if _REQUESTS.launcher is None:
        return False
    if os.getppid() != _REQUESTS.launcher:
        return True
    process = find_process(_REQUESTS.launcher)
    return process is None or (_REQUESTS.runner is not None and process.parent != _REQUESTS.runner)
