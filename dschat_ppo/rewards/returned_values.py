"""What a reward function returns: a score, None, or a dict with `score` and other numbers; for a batch, a list of
these, or OpenRLHF's dict of lists. Needs only the standard library, because worker processes import it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsFloat

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
        result = _rows_of_openrlhf(result)
    if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
        keys = f", nor a dict with 'rewards' (its keys: {list(result)[:8]})" if isinstance(result, dict) else ""
        raise TypeError(f"returned {type(result).__name__}, not a list of numbers{keys}")
    return [_returned(value) for value in result]


def _rows_of_openrlhf(result: dict[str, Any]) -> list[dict[str, Any]]:
    """OpenRLHF's `{"rewards": (B,), "scores": (B,), "extra_logs": {name: (B,) or a number}}` as a dict for each row. A
    log with another number of values is of no row."""
    scores = {"scores": result["scores"]} if "scores" in result else {}
    columns = {**(result.get("extra_logs") or {}), **scores, "score": result["rewards"]}
    has_rows = {name: isinstance(column, list | tuple) or getattr(column, "ndim", 0) > 0
                for name, column in columns.items()}  # fmt: skip
    if not has_rows["score"]:
        raise TypeError("returned 'rewards' that is not a list of numbers")
    count = len(columns["score"])
    lists = {name: list(column) if has_rows[name] else [column] * count for name, column in columns.items()}
    return [{name: values[row] for name, values in lists.items() if len(values) == count} for row in range(count)]


def _returned(value: Any) -> Returned:
    if not isinstance(value, dict):
        value = {"score": value}
    if "score" not in value:
        keys = ", ".join(map(clean_name, list(value)[:8]))
        return Returned(f"returned a dict without 'score' (its keys: {keys or 'none'})", {})
    score = value["score"]
    number = _number(score)
    others = _finite_numbers({key: other for key, other in value.items() if key != "score"})
    return Returned(NO_NUMBER if number is None and score is not None else number, others)


def _number(value: Any) -> float | None:
    """A number or bool of Python, NumPy or PyTorch; None for anything else."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _finite_numbers(values: dict[Any, Any]) -> dict[str, float]:
    """The finite numbers among the values, by clean name."""
    found = {clean_name(key): _number(value) for key, value in values.items()}
    return {name: number for name, number in found.items() if number is not None and math.isfinite(number)}


def clean_name(key: Any) -> str:
    """A key of the user as a part of a metric's name: ASCII letters, digits, `_`, `.`, `-` and `@`."""
    return re.sub(r"[^A-Za-z0-9_.@-]", "_", str(key)[:_LONGEST_NAME]) or "_"


@dataclass(frozen=True)
class CallLog:
    """What a function of TRL's form logs during one call, by clean name."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: Any, value: Any) -> None:
        """One number for the whole call; of several with the same name, the mean counts."""
        for key, number in _finite_numbers({name: value}).items():
            self.metrics.setdefault(key, []).append(number)

    def log_extra(self, column: Any, values: Any) -> None:
        """One value for each response of the call; those that are not numbers are ignored."""
        self.columns[clean_name(column)] = list(values)

    def added_to(self, rows: list[Returned]) -> list[Returned]:
        """The rows with the logged numbers; those that the function returned itself take precedence."""
        metrics = {name: math.fsum(values) / len(values) for name, values in self.metrics.items()}
        columns = {name: values for name, values in self.columns.items() if len(values) == len(rows)}
        found = []
        for place, row in enumerate(rows):
            logged = _finite_numbers({name: values[place] for name, values in columns.items()})
            found.append(Returned(row.score, metrics | logged | row.numbers))
        return found
