"""The log file of each rank in the output folder: log lines, warnings, tracebacks, stacks of a crash."""

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

from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import where
from dschat_ppo.common.ranks import rank, world_size
from dschat_ppo.errors import UserError, without_credentials

_FORMAT = "%(asctime)s %(levelname)s [%(where)s] %(message)s"


class _RankLog(logging.Handler):
    """Writes records with time and phase. If it cannot (a full disk), it prints that once. Each record is one
    unbuffered append to the file: nothing is lost when the process is killed."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.failed = False

    def write(self, text: str) -> None:
        """Write lines. Raises `OSError`."""
        os.write(self.descriptor, f"{without_credentials(text)}\n".encode("utf-8", errors="backslashreplace"))

    def write_if_possible(self, text: str) -> None:
        """Write lines, or print once that they cannot be written."""
        try:
            self.write(text)
        except OSError as problem:
            if not self.failed:
                self.failed = True
                line = f"{self.path} cannot be written ({problem.strerror}); the run continues without it"
                print(f"rank {rank()}: {line}", file=sys.stderr, flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        record.where = where()
        try:
            line = self.format(record)
        except (TypeError, ValueError, KeyError):  # arguments that do not fit the message
            self.handleError(record)
        else:
            self.write_if_possible(line)


@dataclass(frozen=True)
class _OpenLog:
    """An open log, and what `close_log` restores."""

    handler: _RankLog
    show_warning: Callable[..., Any]
    loggers: tuple[logging.Logger, ...]


_OPEN: list[_OpenLog] = []  # one at most


def open_log(folder: Path) -> None:
    """Append to `folder/logs/rank_R.log` from here on. It receives this project's log lines from INFO on (those of
    other libraries from WARNING on, or from their own level), Python's warnings, the text of `write_to_log`, and the
    stacks of all threads after a crash."""
    close_log()
    path = folder / "logs" / f"rank_{rank()}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _RankLog(path)
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        host = os.uname().nodename
        handler.write(f"-------- {started}: rank {rank()} of {world_size()}, process {os.getpid()} on {host}")
    except OSError as problem:
        raise UserError(f"--output_dir {folder}: {path} cannot be written ({problem.strerror})") from None
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(_stderr_handler())
    loggers = (root, logger(), logging.getLogger("DeepSpeed"), logging.getLogger("transformers"))
    for log in loggers:
        if log is root or not log.propagate:
            log.addHandler(handler)
    _OPEN.append(_OpenLog(handler, warnings.showwarning, loggers))
    warnings.showwarning = _show_and_log_warning
    faulthandler.enable(handler.descriptor)


def _stderr_handler() -> logging.Handler:
    """What Python uses for a record without a handler: it stops doing so when the root logger has one."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: not _is_shown(logging.getLogger(record.name)))
    return handler


def _is_shown(log: logging.Logger) -> bool:
    """Whether this logger or one above it, except the root, has a handler."""
    return log.parent is not None and (bool(log.handlers) or _is_shown(log.parent))


def close_log() -> None:
    """Close the log, if it is open."""
    while _OPEN:
        opened = _OPEN.pop()
        warnings.showwarning = opened.show_warning
        for log in opened.loggers:
            log.removeHandler(opened.handler)
        faulthandler.enable(sys.__stderr__ or 2)
        opened.handler.close()
        os.close(opened.handler.descriptor)


def log_path() -> Path | None:
    """The open log file, or None."""
    return _OPEN[-1].handler.path if _OPEN else None


def write_to_log(text: str) -> None:
    """Write only to this rank's log, if open, without a lock: the watchdog calls it while a thread may hold any."""
    for opened in _OPEN:
        opened.handler.write_if_possible(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank()} [{where()}] {text}")


def _show_and_log_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
    line: str | None = None,
) -> None:  # fmt: skip
    opened = _OPEN[-1]
    opened.show_warning(message, category, filename, lineno, file, line)
    if file is None:
        text = f"{category.__name__}: {message} ({filename}:{lineno})"
        opened.handler.handle(logging.makeLogRecord({"msg": text, "levelno": logging.WARNING, "levelname": "WARNING"}))
