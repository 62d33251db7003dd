"""What a reward function returns: a score, None, or a dict with `score` and other numbers; for a batch, a list of
these, or OpenRLHF's dict of lists. Needs only the standard library, because worker processes import it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, SupportsFloat

MOST_NUMBERS = 32  # other numbers of a function
_LONGEST_NAME = 64
NO_NUMBER = "returned a value that is not a number"


class Returned(NamedTuple):
    """The result for one response. `score` is a number (which may be NaN or infinite), None if the function leaves the
    response to other sources, or the reason why there is none. `numbers`: other finite numbers to log, by name."""

    score: float | str | None
    numbers: dict[str, float]


def returned_rows(result: Any, per_row: bool) -> list[Returned]:
    """The results in what a function returned, one for each response; `TypeError` for another form."""
    if per_row:
        return [_returned(result)]
    if isinstance(result, dict) and "rewards" in result:
        return returned_rows(_rows_of_openrlhf(result), per_row)
    if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
        keys = f", nor a dict with 'rewards' (its keys: {list(result)[:8]})" if isinstance(result, dict) else ""
        raise TypeError(f"returned {type(result).__name__}, not a list of numbers{keys}")
    return [_returned(value) for value in result]


def _rows_of_openrlhf(result: dict[str, Any]) -> list[dict[str, Any]]:
    """OpenRLHF's `{"rewards": (B,), "scores": (B,), "extra_logs": {name: (B,) or a number}}` as a dict for each row."""
    logs = result.get("extra_logs") or {}
    columns = {**logs, **{name: result[name] for name in ("scores",) if name in result}, "score": result["rewards"]}
    values = {name: list(column) if _is_sequence(column) else column for name, column in columns.items()}
    if not isinstance(values["score"], list):
        raise TypeError("returned 'rewards' that is not a list of numbers")
    rows = range(len(values["score"]))
    return [
        {name: value[row] if isinstance(value, list) else value for name, value in values.items()
         if not isinstance(value, list) or len(value) == len(rows)}
        for row in rows
    ]  # fmt: skip


def _is_sequence(value: Any) -> bool:
    """Whether it has rows: a list, or a tensor or array that is no single number."""
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0


def _returned(value: Any) -> Returned:
    if not isinstance(value, dict):
        return Returned(_score(value), {})
    others = {clean_name(key): _number(other) for key, other in value.items() if key != "score"}
    numbers = [(name, other) for name, other in others.items() if other is not None and math.isfinite(other)]
    if "score" not in value:
        return Returned(f"returned a dict without 'score' (its keys: {', '.join(list(others)[:8]) or 'none'})", {})
    return Returned(_score(value["score"]), dict(numbers[:MOST_NUMBERS]))


def _score(value: Any) -> float | str | None:
    if value is None:
        return None
    number = _number(value)
    return NO_NUMBER if number is None else number


def _number(value: Any) -> float | None:
    """A number or bool of Python, NumPy or PyTorch; None for anything else."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def clean_name(key: Any) -> str:
    """A key of the user as a part of a metric's name: ASCII letters, digits, `_`, `.`, `-` and `@`."""
    return re.sub(r"[^A-Za-z0-9_.@-]", "_", str(key)[:_LONGEST_NAME]) or "_"


class CallLog:
    """Numbers that a function of TRL's form logs during one call, with `log_metric` and `log_extra`."""

    def __init__(self) -> None:
        self._metrics: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}

    @property
    def loggers(self) -> dict[str, Callable[..., None]]:
        """Argument name -> callable."""
        return {"log_metric": self._log_metric, "log_extra": self._log_extra}

    def _log_metric(self, name: Any, value: Any) -> None:
        """One number for the whole call; of several with the same name, the mean counts."""
        number = _number(value)
        if number is not None and math.isfinite(number):
            self._metrics.setdefault(clean_name(name), []).append(number)

    def _log_extra(self, column: Any, values: Any) -> None:
        """One value for each response of the call; those that are not numbers are ignored."""
        self._columns[clean_name(column)] = list(values)

    def added_to(self, rows: list[Returned]) -> list[Returned]:
        """The rows with the logged numbers; those that the function returned itself take precedence."""
        metrics = {name: math.fsum(values) / len(values) for name, values in self._metrics.items()}
        columns = {name: values for name, values in self._columns.items() if len(values) == len(rows)}
        found = []
        for place, row in enumerate(rows):
            logged = {name: _number(values[place]) for name, values in columns.items()}
            finite = {name: number for name, number in logged.items() if number is not None and math.isfinite(number)}
            found.append(Returned(row.score, dict(list((metrics | finite | row.numbers).items())[:MOST_NUMBERS])))
        return found
