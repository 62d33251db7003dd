"""Log lines: rank 0 prints, warnings are marked, no line breaks the progress line, and libraries
print warnings only, once."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import TextIO

from dschat_ppo.common.processes import leave_dead_terminal
from dschat_ppo.common.ranks import is_main
from dschat_ppo.errors import escaped, safe_text

_HIDDEN: list[TextIO] = []  # where stdout leads outside of the `quiet_prints` blocks that are open
_VERBOSE = [os.environ.get("DSCHAT_PPO_VERBOSE") == "1"]
# warnings in whose place this project prints a line
_REPLACED = "Setting accelerator to CPU", "LOAD REPORT"


class _BarSafeHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if record.levelno == logging.WARNING:
            line = f"warning: {line}"
        print_line(line)


def print_line(line: str) -> None:
    """Print a line: on a terminal above the progress line, in a log file without repeating that. It
    may quote data, so characters that a terminal obeys are escaped. If nobody reads any more (the
    terminal is closed), nothing is printed from then on, and the run continues."""
    stdout = sys.stdout
    if _HIDDEN:
        stdout = _HIDDEN[-1]
    line = safe_text(escaped(line))
    try:
        if sys.stderr.isatty():
            from tqdm import tqdm  # not at the top, so that --help does not wait for it

            tqdm.write(line, file=stdout)
        else:
            print(line, file=stdout, flush=True)
    except OSError as problem:
        if problem.errno not in (errno.EPIPE, errno.EIO):  # of a pipe, of a terminal
            raise
        leave_dead_terminal([stdout.fileno()])


def logger() -> logging.Logger:
    """The project's logger. Rank 0 prints from INFO on, the other ranks from ERROR on. The log
    files of all ranks receive everything from INFO on (`run/rank_log.py`)."""
    log = logging.getLogger("dschat_ppo")
    if not any(isinstance(handler, _BarSafeHandler) for handler in log.handlers):
        log.addHandler(_BarSafeHandler(logging.INFO if is_main() else logging.ERROR))
        log.propagate = False
        log.setLevel(logging.INFO)
    return log


@cache
def log_once(text: str, level: int = logging.INFO) -> None:
    """Log a line once in this process, for what is read several times."""
    logger().log(level, text)


class _WarningsOnce(logging.Filter):
    """Filter of a printing handler: passes errors, and on rank 0 also warnings, each text once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        lowest_level = logging.WARNING if is_main() else logging.ERROR
        passes = record.levelno >= lowest_level and text not in self.seen and _is_new(record)
        self.seen.add(text)
        return passes


def _is_new(record: logging.LogRecord) -> bool:
    """Whether no line of this project says the same as the record."""
    return not any(known in record.getMessage() for known in _REPLACED)


def set_verbose(verbose: bool) -> None:
    """Decide whether libraries print everything, before they are imported. `DSCHAT_PPO_VERBOSE=1`
    means `verbose`."""
    _VERBOSE[0] = verbose or os.environ.get("DSCHAT_PPO_VERBOSE") == "1"
    log = logging.getLogger("DeepSpeed")
    log.removeFilter(_is_new)
    if not _VERBOSE[0]:
        log.addFilter(_is_new)  # it stays when DeepSpeed sets its logger up


def quiet_libraries() -> None:
    """Print only warnings of the libraries, once and on rank 0, and errors; after
    `set_verbose(True)`, everything from INFO on. The log files of all ranks get every warning in
    any case."""
    import deepspeed  # noqa: F401  (creates the logger that is set here)

    log = logging.getLogger("DeepSpeed")
    log.setLevel(logging.WARNING)
    if _VERBOSE[0]:
        log.setLevel(logging.INFO)
    for handler in log.handlers:
        handler.setLevel(log.level)
    _print_once(log)
    quiet_hugging_face()


def _print_once(log: logging.Logger) -> None:
    """Let the handlers of a library that print pass only `_WarningsOnce`, unless everything is
    printed."""
    if _VERBOSE[0]:
        return
    for handler in log.handlers:
        # others write files, or are those of another program
        prints = type(handler) is logging.StreamHandler
        is_filtered = any(isinstance(known, _WarningsOnce) for known in handler.filters)
        if prints and not is_filtered:
            handler.addFilter(_WarningsOnce())


def quiet_hugging_face() -> None:
    """`quiet_libraries` for programs that do without DeepSpeed, whose import takes seconds."""
    import datasets
    import transformers

    if _VERBOSE[0]:
        transformers.logging.set_verbosity_info()
        return
    transformers.logging.set_verbosity_warning()
    _print_once(logging.getLogger("transformers"))
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning)


@contextmanager
def quiet_prints() -> Iterator[None]:
    """Discard what libraries print in the block (DeepSpeed prints on every rank), unless
    `set_verbose(True)`; lines of this project are printed."""
    if _VERBOSE[0]:
        yield
        return
    stdout = sys.stdout
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        _HIDDEN.append(stdout)
        try:
            yield
        finally:
            _HIDDEN.pop()


def titled_table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """A title, and below it the rows in two columns."""
    pairs = list(rows)
    width = max(len(left) for left, _ in pairs)
    return "\n".join([title] + [f"  {left.ljust(width)}  {right}" for left, right in pairs])


set_verbose(False)  # for programs without `--verbose`
