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


class _RankLog(logging.StreamHandler[TextIO]):
    """Writes records with time and phase; that it cannot (a full disk) is said once."""

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self.failed = False

    def emit(self, record: logging.LogRecord) -> None:
        record.where = where()
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the name is logging's
        problem = sys.exc_info()[1]
        if isinstance(problem, OSError):
            self.say_once(problem)
        else:
            super().handleError(record)

    def say_once(self, problem: OSError) -> None:
        """The log cannot be written: for the user."""
        if not self.failed:
            self.failed = True
            text = (
                f"rank {rank()}: {self.stream.name} cannot be written ({problem.strerror}); the run goes on without it"
            )
            print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Kept:
    path: Path
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
        stream = path.open("a", encoding="utf-8", errors="backslashreplace")
        print(_heading(), file=stream, flush=True)
    except OSError as problem:
        raise UserError(f"--output_dir {folder}: {path} cannot be written ({problem.strerror})") from None
    handler = _RankLog(stream)
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger()
    if not root.handlers and logging.lastResort is not None:
        root.addHandler(logging.lastResort)  # what is used where there is no handler, as there is one from here on
    loggers = (root, logger(), logging.getLogger("DeepSpeed"), logging.getLogger("transformers"))
    for log in loggers:
        if log is root or not log.propagate:
            log.addHandler(handler)
    _KEPT.append(_Kept(path, handler, warnings.showwarning, loggers))
    warnings.showwarning = _show_and_keep
    faulthandler.enable(stream)


def end_log() -> None:
    """Close the log, if one is kept."""
    while _KEPT:
        kept = _KEPT.pop()
        warnings.showwarning = kept.show_warning
        for log in kept.loggers:
            log.removeHandler(kept.handler)
        faulthandler.enable(sys.__stderr__ or 2)
        kept.handler.stream.close()


def log_path() -> Path | None:
    """The file that is kept, or None."""
    return _KEPT[-1].path if _KEPT else None


def to_log(text: str) -> None:
    """Write `text` to this rank's log alone; nowhere if none is kept.

    Takes no lock: the watchdog calls it while the thread that hangs may hold any.
    """
    for kept in _KEPT:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank()} [{where()}] {text}\n"
        try:
            number = os.open(kept.path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(number, line.encode("utf-8", errors="backslashreplace"))
            finally:
                os.close(number)
        except OSError as problem:
            kept.handler.say_once(problem)


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
