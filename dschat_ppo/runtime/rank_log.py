"""The log file that each rank keeps in the output folder: what it said, warnings, tracebacks, stacks of a crash."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from dschat_ppo.common.dist import rank, world_size
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import where
from dschat_ppo.errors import UserError

_FORMAT = "%(asctime)s %(levelname)s [%(where)s] %(message)s"


class _RankLog(logging.Handler):
    """Writes records with time and phase; that it cannot (a full disk) is said once.

    Each line is one write to the file's end, without a buffer: nothing is lost when the process is killed.
    """

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.failed = False

    def write(self, text: str) -> None:
        """Write lines. Raises `OSError`."""
        os.write(self.descriptor, f"{text}\n".encode("utf-8", errors="backslashreplace"))

    def write_if_possible(self, text: str) -> None:
        """Write lines, or say that it is not possible."""
        try:
            self.write(text)
        except OSError as problem:
            if not self.failed:
                self.failed = True
                print(f"rank {rank()}: {self.path} cannot be written ({problem.strerror}); the run goes on without it",
                      file=sys.stderr, flush=True)  # fmt: skip

    def emit(self, record: logging.LogRecord) -> None:
        record.where = where()
        try:
            line = self.format(record)
        except (TypeError, ValueError, KeyError):  # arguments that do not fit the message
            self.handleError(record)
        else:
            self.write_if_possible(line)


@dataclass(frozen=True)
class _Kept:
    handler: _RankLog
    show_warning: Callable[..., Any]
    loggers: tuple[logging.Logger, ...]


_KEPT: list[_Kept] = []


def keep_log(folder: Path) -> None:
    """Keep `folder/logs/rank_R.log` from here on, after what earlier runs wrote there.

    It gets the log lines from INFO on (on every rank; other libraries' from WARNING on, or as they are set), Python's
    warnings, what `to_log` is given, and the stacks of all threads if the process crashes (a segmentation fault).

    Raises:
        UserError: it cannot be written.
    """
    end_log()
    path = folder / "logs" / f"rank_{rank()}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _RankLog(path)
        handler.write(_heading())
    except OSError as problem:
        raise UserError(f"--output_dir {folder}: {path} cannot be written ({problem.strerror})") from None
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(_last_resort())
    loggers = (root, logger(), logging.getLogger("DeepSpeed"), logging.getLogger("transformers"))
    for log in loggers:
        if log is root or not log.propagate:
            log.addHandler(handler)
    _KEPT.append(_Kept(handler, warnings.showwarning, loggers))
    warnings.showwarning = _show_and_keep
    faulthandler.enable(handler.descriptor)


def _last_resort() -> logging.Handler:
    """What Python uses where a record finds no handler, since at the root there is one from here on."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: not _has_handler(logging.getLogger(record.name)))
    return handler


def _has_handler(log: logging.Logger) -> bool:
    """Whether this logger or one above it, but for the root, has a handler that shows its records."""
    return log.parent is not None and (bool(log.handlers) or _has_handler(log.parent))


def end_log() -> None:
    """Close the log, if one is kept."""
    while _KEPT:
        kept = _KEPT.pop()
        warnings.showwarning = kept.show_warning
        for log in kept.loggers:
            log.removeHandler(kept.handler)
        faulthandler.enable(sys.__stderr__ or 2)
        kept.handler.close()
        os.close(kept.handler.descriptor)


def log_path() -> Path | None:
    """The file that is kept, or None."""
    return _KEPT[-1].handler.path if _KEPT else None


def to_log(text: str) -> None:
    """Write `text` to this rank's log alone; nowhere if none is kept.

    Takes no lock: the watchdog calls it while the thread that hangs may hold any.
    """
    for kept in _KEPT:
        kept.handler.write_if_possible(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank()} [{where()}] {text}")


def _heading() -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return f"-------- {started}: rank {rank()} of {world_size()}, process {os.getpid()} on {os.uname().nodename}"


def _show_and_keep(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
    line: str | None = None,
) -> None:  # fmt: skip
    kept = _KEPT[-1]
    kept.show_warning(message, category, filename, lineno, file, line)
    if file is None:
        text = f"{category.__name__}: {message} ({filename}:{lineno})"
        kept.handler.handle(logging.makeLogRecord({"msg": text, "levelno": logging.WARNING, "levelname": "WARNING"}))
