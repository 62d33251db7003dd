"""The log file of each rank in the output folder: log lines, warnings, tracebacks, stacks of a
crash."""

from __future__ import annotations

import faulthandler
import logging
import logging.handlers
import os
import sys
import time
from pathlib import Path

from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import where
from dschat_ppo.common.ranks import rank, world_size
from dschat_ppo.errors import UserError, safe_text

_FORMAT = "%(asctime)s %(levelname)s [%(where)s] %(message)s"
# they print their records themselves
_LIBRARIES = "DeepSpeed", "transformers", "datasets", "huggingface_hub"
_OPEN: list[_RankLog] = []  # one at most
_EARLY = logging.handlers.MemoryHandler(10_000, flushLevel=sys.maxsize)


class _RankLog(logging.Handler):
    """Writes each record with time and phase, by one unbuffered append: nothing is lost when the
    process is killed."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.failed = False
        self.setFormatter(logging.Formatter(_FORMAT))

    def write(self, text: str) -> None:
        """Write lines, or print once that they cannot be written."""
        try:
            os.write(
                self.descriptor,
                f"{safe_text(text)}\n".encode("utf-8", errors="backslashreplace"),
            )
        except OSError as problem:
            if not self.failed:
                self.failed = True
                line = (
                    f"{self.path} cannot be written ({problem.strerror}); the run continues"
                    " without it"
                )
                print(f"rank {rank()}: {line}", file=sys.stderr, flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        record.where = where()
        try:
            self.write(self.format(record).rstrip())
        except (TypeError, ValueError, KeyError):  # arguments that do not fit the message
            self.handleError(record)


def keep_early_lines() -> None:
    """Keep this project's lines from here on until `open_log` writes them: a run logs some before
    it has a folder."""
    _EARLY.buffer.clear()
    logger().addHandler(_EARLY)


def open_log(folder: Path) -> None:
    """Append to `folder/logs/rank_R.log` from here on: this project's log lines from INFO on, those
    of libraries by their level, Python's warnings, the text of `write_to_log`, and the stacks of
    all threads after a crash."""
    close_log()
    path = folder / "logs" / f"rank_{rank()}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _RankLog(path)
    except OSError as problem:
        raise UserError(
            f"--output_dir {folder}: {path} cannot be written ({problem.strerror})"
        ) from None
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    host = os.uname().nodename
    handler.write(
        f"-------- {started}: rank {rank()} of {world_size()}, process {os.getpid()} on {host}"
    )
    logger().removeHandler(_EARLY)
    _EARLY.setTarget(handler)
    _EARLY.flush()
    _EARLY.setTarget(None)  # which is closed before the process ends
    root = logging.getLogger()
    if not root.handlers and logging.lastResort is not None:
        # which Python does not use by itself once the root has a handler
        root.addHandler(logging.lastResort)
    for name in _LIBRARIES:
        logging.getLogger(name).propagate = False
    for log in _loggers():
        log.addHandler(handler)
    logging.captureWarnings(True)
    faulthandler.enable(handler.descriptor)
    _OPEN.append(handler)


def _loggers() -> list[logging.Logger]:
    return [logging.getLogger(), logger(), *map(logging.getLogger, _LIBRARIES)]


def close_log() -> None:
    while _OPEN:
        handler = _OPEN.pop()
        for log in _loggers():
            log.removeHandler(handler)
        logging.captureWarnings(False)
        faulthandler.enable(sys.__stderr__ or 2)
        handler.close()
        os.close(handler.descriptor)


def log_path() -> Path | None:
    """This rank's log file, if it is open."""
    if not _OPEN:
        return None
    return _OPEN[-1].path


def write_to_log(text: str, stacks: bool = False) -> None:
    """Write a text, and with `stacks` those of all threads, only to this rank's log, if open,
    without a lock: the watchdog calls it while a thread may hold any."""
    for handler in _OPEN:
        handler.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank()} [{where()}] {text}")
        if stacks:
            faulthandler.dump_traceback(handler.descriptor)
