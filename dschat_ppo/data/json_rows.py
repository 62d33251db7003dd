"""JSON and JSON Lines to columns whose values are exactly those of the file.

A column of one type becomes an Arrow column of that type. A column whose objects have different keys, or that mixes
numbers with text, becomes a column of JSON text, which `datasets` decodes when a row is read: one Arrow type would add
empty keys to objects and turn 5 into 5.0. Text that looks like a date stays text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Features, Json
from datasets.features.features import generate_from_arrow_type
from datasets.utils.json import ujson_loads

from dschat_ppo.data.bad_lines import BATCH_BYTES, BadLines
from dschat_ppo.data.json_stream import json_values, reason

_BATCH_ROWS = 2000
_BOM = codecs.BOM_UTF8
Batch = tuple[list[int], list[dict[str, Any]]]  # numbers of the rows, and the rows


@dataclass
class JsonColumns:
    """What is known of the columns of a file: its Arrow `types` so far, the columns that are stored `as_json` text, and
    the `kinds` of values ("text or a number", "a list", "an object"), of which a column has only one."""

    types: dict[str, pa.DataType] = field(default_factory=dict)
    as_json: set[str] = field(default_factory=set)
    kinds: dict[str, str] = field(default_factory=dict)

    def features(self) -> Features:
        return Features(
            {
                name: Json() if name in self.as_json else generate_from_arrow_type(kind)
                for name, kind in self.types.items()
            }
        )

    def add(self, batch: Batch, bad: BadLines) -> tuple[list[int], dict[str, pa.Array]]:
        """Convert a batch, and extend the types by those it needs. `bad` receives the rows that do not fit; the others
        come back as their numbers and columns."""
        numbers, rows = batch
        faults: dict[int, str] = {}
        for name in dict.fromkeys(name for row in rows for name in row):
            values = [row.get(name) for row in rows]
            wanted = self.kinds.get(name)
            kinds = {_KINDS[kind] for kind in set(map(type, values)) - {type(None)}}
            if wanted is None and kinds:
                wanted = self.kinds[name] = next(_KINDS[type(value)] for value in values if value is not None)
            if kinds - {wanted}:
                for place, value in enumerate(values):
                    if value is not None and _KINDS[type(value)] != wanted:
                        fault = f"has {_KINDS[type(value)]} in '{name}', the rows before it have {wanted}"
                        faults.setdefault(place, fault)
        if not faults:
            try:
                return numbers, self._arrays(rows)
            except (UnicodeEncodeError, OverflowError, ValueError):  # half of a surrogate pair, 65 bits, NaN
                for place, row in enumerate(rows):
                    fault = _fault(row)
                    if fault:
                        faults[place] = fault
                if not faults:
                    raise
        for place, fault in sorted(faults.items()):
            bad.add(f"row {numbers[place]}", fault, json.dumps(rows[place], ensure_ascii=False))
        left = [place for place in range(len(rows)) if place not in faults]
        return self.add(([numbers[place] for place in left], [rows[place] for place in left]), bad)

    def _arrays(self, rows: list[dict[str, Any]]) -> dict[str, pa.Array]:
        arrays = {}
        for name in dict.fromkeys([*self.types, *(name for row in rows for name in row)]):
            values = [row.get(name) for row in rows]
            self.types.setdefault(name, pa.null())
            if name not in self.as_json:
                array = _plain_array(values)
                merged = _merge(self.types[name], array.type) if array is not None else None
                if array is not None and merged is not None:
                    self.types[name] = merged
                    arrays[name] = array if array.type == merged else pa.array(values, type=merged)
                    continue
            texts = [None if value is None else _dumps(value) for value in values]  # raises before `as_json` changes
            self.as_json.add(name)
            arrays[name] = pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(texts, pa.string()))
        return arrays


_LONG_NUMBER = re.compile("[0-9]{19}")
_KINDS = {list: "a list", dict: "an object"} | dict.fromkeys((str, bool, int, float), "text or a number")


def _dumps(value: Any) -> str:
    """JSON text. `OverflowError`: it holds an integer of more than 64 bits, which `datasets` cannot read again.
    `ValueError`: it holds NaN or infinity."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if _LONG_NUMBER.search(text):
        try:
            ujson_loads(text)
        except ValueError as problem:
            raise OverflowError(str(problem)) from None
    return text


def _plain_array(values: list[Any]) -> pa.Array | None:
    """`values` with their own type, or None if no Arrow type holds exactly these values."""
    if {bool, int, float, str} & set(map(type, values)) and len(set(map(type, values)) - {type(None)}) > 1:
        return None
    try:
        array = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return None
    return None if _has_gaps(array, values) else array


def _has_gaps(array: pa.Array, values: list[Any]) -> bool:
    """Whether Arrow adds keys to objects, or changes numbers inside lists and objects."""
    if pa.types.is_struct(array.type):
        fields = [array.field(place) for place in range(array.type.num_fields)]
        if not fields or any(child.null_count > array.null_count for child in fields):
            return True
        return any(_has_gaps(child, values) for child in fields)
    if pa.types.is_list(array.type):
        return _has_gaps(array.values, values)
    return pa.types.is_floating(array.type) and bool(values) and _mixes_numbers(values)


def _mixes_numbers(values: Any) -> bool:
    """Whether an integer lies anywhere inside; Arrow would turn it into a float like the others."""
    if isinstance(values, dict):
        return any(map(_mixes_numbers, values.values()))
    if isinstance(values, list):
        return any(map(_mixes_numbers, values))
    return isinstance(values, int) and not isinstance(values, bool)


def _merge(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both exactly as they are, or None."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if pa.types.is_list(first) and pa.types.is_list(second):
        inner = _merge(first.value_type, second.value_type)
        return None if inner is None else pa.list_(inner)
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        if {part.name for part in first} != {part.name for part in second}:
            return None
        parts = {part.name: _merge(part.type, second.field(part.name).type) for part in first}
        return None if None in parts.values() else pa.struct(list(parts.items()))
    return None


def _fault(row: dict[str, Any]) -> str:
    """Why no table holds this row; "" if one does."""
    try:
        _dumps(row).encode()
        for value in row.values():
            pa.array([value])
    except UnicodeEncodeError:
        return "holds half of a surrogate pair, which is not text"
    except OverflowError:
        return "holds a number of more than 64 bits"
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return ""
    except ValueError:
        return "holds NaN or Infinity, which is not JSON"
    return ""


def json_batches(path: Path, bad: BadLines) -> Iterator[Batch]:
    """The rows of a file of JSON Lines, of one array, or of objects over several lines each.

    Row numbers are line numbers in JSON Lines; otherwise they count the objects. Both count from 1. A bad row in an
    array, or between objects over several lines, is an error even if bad lines are skipped: the next row cannot be
    found. Messages do not name the file.
    """
    if is_json_lines(path):
        for numbers, rows, _ in line_batches(path, bad):
            for first in range(0, len(rows), _BATCH_ROWS):
                yield numbers[first : first + _BATCH_ROWS], rows[first : first + _BATCH_ROWS]
    else:
        yield from _stream_batches(path, bad)


def is_json_lines(path: Path) -> bool:
    """Whether a JSON file has one row in each line, rather than one array or objects over several lines each."""
    with path.open("rb") as file:
        start = file.read(BATCH_BYTES).removeprefix(_BOM)
        text = start.lstrip()
    return text[:1] != b"[" and not (text[:1] == b"{" and _is_one_value_or_over_lines(text))


def _is_one_value_or_over_lines(text: bytes) -> bool:
    """Whether a file is not JSON Lines, by its first part: one object alone, or objects over several lines each."""
    first, newline, rest = text.partition(b"\n")
    try:
        json.loads(first)
        return not rest.strip() and len(text) < BATCH_BYTES
    except (ValueError, RecursionError):
        if not newline:
            return False
    try:
        json.JSONDecoder().raw_decode(text.decode(errors="ignore"))
    except (ValueError, RecursionError):
        return False
    return True


def line_batches(
    path: Path, bad: BadLines, place: tuple[int, int] = (0, 0), batch_bytes: int = BATCH_BYTES
) -> Iterator[tuple[list[int], list[dict[str, Any]], tuple[int, int]]]:
    """(line numbers from 1 on, rows, the place after them) for batches of a file of JSON Lines, of `batch_bytes` at
    least. `place` is (bytes, lines) of the file that are read already."""
    offset, number = place
    with path.open("rb") as file:
        if offset == 0 and file.read(len(_BOM)) == _BOM:
            offset = len(_BOM)
        file.seek(offset)
        while lines := file.readlines(batch_bytes):
            numbers, rows = [], []
            for line in lines:
                number += 1
                if line.isspace():
                    continue
                fault = ""
                try:
                    row = json.loads(line.decode().rstrip("\r\n"))
                except UnicodeDecodeError:
                    bad.add_bytes(f"line {number}", line.strip())
                    continue
                except json.JSONDecodeError as problem:
                    fault = f"is not JSON ({reason(problem)} at column {problem.pos + 1})"
                except RecursionError:
                    fault = "is nested too deeply"
                else:
                    fault = _misfit(row)
                if fault:
                    bad.add(f"line {number}", fault, line.strip().decode(errors="backslashreplace"))
                else:
                    numbers.append(number)
                    rows.append(row)
            offset += sum(map(len, lines))
            yield numbers, rows, (offset, number)


def _misfit(row: Any) -> str:
    if not isinstance(row, dict):
        return "is not an object with named fields"
    return "" if row else "is an object without fields"


def _stream_batches(path: Path, bad: BadLines) -> Iterator[Batch]:
    number, numbers, rows = 0, [], []
    for number, row in enumerate(json_values(path), start=1):
        if isinstance(row, str):
            row = {"text": row}
        if fault := _misfit(row):
            bad.add(f"row {number}", fault, json.dumps(row))
            continue
        numbers.append(number)
        rows.append(row)
        if len(rows) == _BATCH_ROWS:
            yield numbers, rows
            numbers, rows = [], []
    columns = _columns_of(rows[0]) if number == 1 and len(rows) == 1 else None
    if columns is not None:
        numbers, rows = list(range(1, len(columns) + 1)), columns
    yield numbers, rows


def _columns_of(table: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Rows of a file that is one object of columns, as pandas writes it; None if it is something else."""
    parts = list(table.values())
    if parts and all(isinstance(part, dict) and list(part) == list(parts[0]) for part in parts):
        if list(parts[0]) != [str(place) for place in range(len(parts[0]))]:
            return None
        parts = [list(part.values()) for part in parts]
    elif not (
        parts
        and all(isinstance(part, list) and len(part) == len(parts[0]) for part in parts)
        and all(isinstance(value, str) for part in parts for value in part)
    ):
        return None
    return [dict(zip(table, values, strict=True)) for values in zip(*parts, strict=True)]
