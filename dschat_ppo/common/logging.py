"""Log lines and progress bars: rank 0 prints, and no line breaks a progress bar."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from tqdm import tqdm

from dschat_ppo.common.ranks import is_main

_VERBOSE = os.environ.get("DSCHAT_PPO_VERBOSE") == "1"


class _BarSafeHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_line(self.format(record))


def print_line(line: str) -> None:
    """Print a line: on a terminal above the progress bar, in a log file without redrawing the bar."""
    if sys.stderr.isatty():
        tqdm.write(line)
    else:
        print(line, flush=True)


def logger() -> logging.Logger:
    """The project's logger. Rank 0 prints from INFO on, the other ranks from ERROR on. The log files of all ranks
    receive everything from INFO on (`runtime/rank_log.py`)."""
    log = logging.getLogger("dschat_ppo")
    if not any(isinstance(handler, _BarSafeHandler) for handler in log.handlers):
        handler = _BarSafeHandler(logging.INFO if is_main() else logging.ERROR)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False
        log.setLevel(logging.INFO)
    return log


def quiet_libraries() -> None:
    """Suppress progress bars and informational messages of the libraries, unless `DSCHAT_PPO_VERBOSE=1`."""
    if _VERBOSE:
        return
    import deepspeed  # noqa: F401  (creates the logger that is set here)

    for name in ("DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet_hugging_face()


def quiet_hugging_face() -> None:
    """`quiet_libraries` for programs that do without DeepSpeed, whose import takes seconds."""
    if _VERBOSE:
        return
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning)


@contextmanager
def quiet_prints() -> Iterator[None]:
    """Discard what libraries print in the block (DeepSpeed prints on every rank), unless `DSCHAT_PPO_VERBOSE=1`."""
    if _VERBOSE:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def progress_bar(title: str, total: int, done: int = 0) -> Any:
    """A progress bar on rank 0, starting at `done`: redrawn every second on a terminal, every 30 s in a log file."""
    shown: dict[str, Any] = {"total": total, "initial": done, "desc": title, "disable": not is_main()}
    if sys.stderr.isatty():
        return tqdm(**shown, mininterval=1.0)
    return tqdm(**shown, mininterval=30.0, bar_format="{l_bar}{bar:20}{r_bar}\n")


def table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Two columns under a title, as text."""
    pairs = list(rows)
    width = max(len(left) for left, _ in pairs)
    return "\n".join([title] + [f"  {left.ljust(width)}  {right}" for left, right in pairs])
