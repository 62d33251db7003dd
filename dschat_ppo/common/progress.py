"""The progress of a run on rank 0: one line that is redrawn in a terminal, and a plain line now and
then elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from typing import Any

from tqdm import tqdm

from dschat_ppo.common.logging import print_line
from dschat_ppo.common.phases import current_phase
from dschat_ppo.common.ranks import is_main

REDRAW_SECONDS = 0.2  # in a terminal
PLAIN_SECONDS = 30.0  # where each line stays
WINDOW = 20  # steps over which rates are measured

_SHOWN: list[Progress] = []  # the innermost last


class Progress:
    """Shows how far a run of `total` steps is, with its rate and the time left. A context manager;
    other ranks show nothing. `done`: the steps before this process."""

    def __init__(self, title: str, total: int, done: int = 0, unit: str = "step"):
        self.title = title
        self.total = total
        self.done = done
        self.unit = unit
        self.note = ""
        self.phase = ""  # in progress, such as "rollout 40/64 answers"
        self._ends: deque[tuple[float, float]] = deque(maxlen=WINDOW + 1)  # (time, tokens) of steps
        self._bar: Any = None

    def __enter__(self) -> Progress:
        self.measure_from_here()
        self.line_printed()
        if is_main():
            _SHOWN.append(self)
            if sys.stderr.isatty():
                # of a terminal without a size, too, such as that of a CI
                rows = shutil.get_terminal_size().lines
                self._bar = tqdm(total=None, bar_format="{desc}", leave=False, ncols=0, nrows=rows)
                self._draw()
        return self

    def __exit__(self, *problem: object) -> None:
        if self in _SHOWN:
            _SHOWN.remove(self)
        if self._bar is not None:
            self._bar.close()

    def measure_from_here(self) -> None:
        """Measure rates from now on: what came before, such as an evaluation, does not count."""
        self._ends.clear()
        self._ends.append((time.monotonic(), 0.0))

    def advance(self, tokens: float = 0.0, note: str = "") -> None:
        """Count a step, of `tokens` tokens over all ranks; `note` follows the time left."""
        self.done = self.done + 1
        self.note = note
        self.phase = ""
        self._ends.append((time.monotonic(), tokens))
        self.draw_if_due()

    def line_printed(self) -> None:
        """Postpone the next plain line, because a line about this step was printed."""
        self._printed = time.monotonic()

    @property
    def rates(self) -> tuple[float, float]:
        """(seconds of a step, tokens of all ranks in a second) over the last steps; 0 before the
        first."""
        seconds = self._ends[-1][0] - self._ends[0][0]
        tokens = sum(tokens for _, tokens in list(self._ends)[1:])
        if seconds:
            return (seconds / (len(self._ends) - 1), tokens / seconds)
        return (0.0, 0.0)

    @property
    def left(self) -> str:
        """The time left, such as "1:24 left"; "" before the first step and at the end."""
        step_seconds, _ = self.rates
        if step_seconds and self.done < self.total:
            return f"{duration(step_seconds * (self.total - self.done))} left"
        return ""

    def text(self) -> str:
        """The line: how far the run is; the phase in progress, or else the rate; the time left; the
        note."""
        percent = 100 * self.done // max(self.total, 1)
        fields = [f"{self.title} {self.unit} {self.done}/{self.total} ({percent} %)"]
        step_seconds, _ = self.rates
        if self.phase:
            fields.append(self.phase)
        elif step_seconds >= 1:
            fields.append(f"{step_seconds:.2g} s/{self.unit}")
        elif step_seconds:
            fields.append(f"{1 / step_seconds:.3g} {self.unit}s/s")
        return " | ".join(filter(None, [*fields, self.left, self.note]))

    def draw_if_due(self) -> None:
        """Show the line if the last one is old enough; in a terminal also at the end."""
        interval = PLAIN_SECONDS if self._bar is None else REDRAW_SECONDS
        is_old = time.monotonic() - self._printed >= interval
        is_end = self._bar is not None and self.done == self.total and not self.phase
        if (is_old or is_end) and _SHOWN and _SHOWN[-1] is self:
            self._draw()

    def _draw(self) -> None:
        self.line_printed()
        if self._bar is None:
            print_line(self.text())
        else:
            width = max(shutil.get_terminal_size().columns - 1, 1)
            self._bar.set_description_str(self.text()[:width])


def report_phase(done: int, total: int, unit: str, name: str | None = None) -> None:
    """Show that `done` of `total` things of the phase in progress are done, if a `Progress` is
    shown. Cheap; called between passes. `name`: of the phase, if not `current_phase()`."""
    if _SHOWN:
        _SHOWN[-1].phase = f"{name or current_phase()} {done}/{total} {unit}"
        _SHOWN[-1].draw_if_due()


def duration(seconds: float) -> str:
    """ "0:04", "12:30", "1:02:03" or "2 d 03:04:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02}:{rest:02}"
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"
