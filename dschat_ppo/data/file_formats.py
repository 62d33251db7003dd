"""Files of rows in JSON, CSV and text, read in batches.

JSON values are those of the file: no type is inferred, text that looks like a date stays text, and 5 stays 5.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import pyarrow as pa

from dschat_ppo.data.bad_lines import NOT_UTF8, QUOTED_CHARACTERS, BadLines, around_bad_byte
from dschat_ppo.errors import UserError, in_one_line

BATCH_ROWS, BATCH_BYTES = 1000, 2**20  # bytes of JSON
_FIRST_BYTES = 2**20  # that show the layout of a JSON file
_BOM = b"\xef\xbb\xbf"
_DEEPEST = 200  # levels of lists and objects in a row: Python ends near 1,000, wherever it parses the row again
_SEPARATORS = {",": "commas", "\t": "tabs", ";": "';'", "|": "'|'"}
_FIRST_RECORDS = 20  # that show which separator a file uses

Row = dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """Some rows of a part, their numbers from 1 on (lines of JSON Lines and text, rows of other kinds; skipped rows
    count), and the place after them, in values that JSON can hold."""

    numbers: Sequence[int]
    rows: list[Row]
    place: Any


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        with gzip.open(path) as file:
            yield file  # type: ignore[misc]
    elif suffix == ".zst":
        with io.BufferedReader(pa.input_stream(str(path), compression="zstd"), BATCH_BYTES) as file:
            yield file
    else:
        with path.open("rb") as file:
            yield file


# JSON


def is_json_lines(path: Path) -> bool:
    """Whether a JSON file has one row in each line, rather than one array, one object, or objects over several lines
    each."""
    with opened(path) as file:
        text = file.read(_FIRST_BYTES).removeprefix(_BOM).lstrip()
    if text[:1] != b"{":
        return text[:1] != b"["
    first, newline, rest = text.partition(b"\n")
    try:
        json.loads(first)
        return bool(rest.strip()) or len(text) >= _FIRST_BYTES
    except (ValueError, RecursionError):
        pass
    try:
        json.JSONDecoder().raw_decode(text.decode(errors="ignore"))
    except (ValueError, RecursionError):
        return True  # a bad line
    return not newline


def json_lines(path: Path, bad: BadLines, place: list[int]) -> Iterator[Batch]:
    """`place` is [bytes, lines] of the file that are read already."""
    offset, number = place
    with opened(path) as file:
        _skip_bytes(file, offset)
        while lines := file.readlines(BATCH_BYTES):
            numbers, rows = [], []
            for line in lines:
                number += 1
                if number == 1:
                    line = line.removeprefix(_BOM)
                if line.isspace():
                    continue
                try:
                    text = line.decode().rstrip("\r\n")
                    row = _with_reason(_DECODER.decode, text)
                    _check_row(row, text)
                except UnicodeDecodeError:
                    bad.add_bytes(f"line {number}", line.strip())
                except UserError as problem:
                    bad.add(f"line {number}", str(problem), text.strip())
                else:
                    numbers.append(number)
                    rows.append(row)
            offset += sum(map(len, lines))
            yield Batch(numbers, rows, [offset, number])


def _skip_bytes(file: BinaryIO, count: int) -> None:
    if file.seekable():
        file.seek(count)
    while not file.seekable() and count and (block := file.read(min(count, BATCH_BYTES))):
        count -= len(block)


def _constant(name: str) -> None:
    """NaN, which many programs write for a missing number, is null. Infinity is refused."""
    if name != "NaN":
        raise UserError("holds Infinity, which is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_constant)


def _with_reason(decode: Any, *text: Any) -> Any:
    """`decode(*text)`; an error says what is wrong with the row."""
    try:
        return decode(*text)
    except RecursionError:
        raise UserError("is nested too deeply") from None
    except json.JSONDecodeError as problem:
        reason = problem.msg.rstrip(": ").removesuffix(" at").removesuffix(" starting")
        raise UserError(f"is not JSON ({reason} at column {problem.pos + 1})") from problem
    except UserError:
        raise
    except ValueError as problem:  # a number of more than 4,300 digits
        raise UserError(f"is not JSON ({in_one_line(problem)})") from None


def _check_row(row: Any, text: str) -> None:
    """Refuse a value that is no row of named fields, that would not be parsed again, or that no file can hold."""
    if not isinstance(row, dict):
        raise UserError("is not an object with named fields")
    if not row:
        raise UserError("is an object without fields")
    if text.count("[") + text.count("{") > _DEEPEST:
        level: list[Any] = [row]
        for _ in range(_DEEPEST):
            level = [each for value in level if isinstance(value, list | dict)
                     for each in (value.values() if isinstance(value, dict) else value)]  # fmt: skip
        if level:
            raise UserError("is nested too deeply")
    if "\\u" in text:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UserError("holds half of a surrogate pair, which is not text") from None


def _json_rows(path: Path, bad: BadLines) -> Iterator[tuple[int, Row]]:
    """The rows of one array, or of objects over several lines each."""
    with opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        try:
            values = _json_values(_Text(text))
            first = list(islice(values, 2))
            if len(first) == 1 and (table := _rows_of_object(first[0][0])) is not None:
                yield from enumerate(table, start=1)
                return
            for number, (row, written) in enumerate(chain(first, values), start=1):
                row = {"text": row} if isinstance(row, str) else row
                try:
                    _check_row(row, written)
                except UserError as problem:
                    bad.add(f"row {number}", str(problem), written)
                else:
                    yield number, row
        except UnicodeDecodeError as problem:
            raise UserError(f"{NOT_UTF8}: {around_bad_byte(problem.object)!r}") from None


class _Text:
    """The text of a JSON file, of which only a piece lies in memory."""

    def __init__(self, file: TextIO):
        self._file = file
        self.piece, self.place, self.is_whole = "", 0, False  # `place`: in the piece, behind what is read

    def more(self) -> bool:
        """Read on; False at the end. A piece grows by its own length, so that a long value is tried few times."""
        self.piece, self.place = self.piece[self.place :], 0
        found = self._file.read(max(BATCH_BYTES, len(self.piece)))
        self.piece, self.is_whole = self.piece + found, not found
        return not self.is_whole

    def mark(self) -> str:
        """Go to the next character that is no space, and return it; "" at the end."""
        while True:
            self.place = _SPACE.match(self.piece, self.place).end()  # type: ignore[union-attr]  # it matches ""
            if self.place < len(self.piece) or not self.more():
                return self.piece[self.place : self.place + 1]

    def value(self) -> tuple[Any, str]:
        """The value here, with its text; goes behind it. What ends near the end of the piece may continue behind it."""
        while True:
            try:
                value, end = _with_reason(_DECODER.raw_decode, self.piece, self.place)
                if self.is_whole or end < len(self.piece) - _LONGEST_WORD:
                    written, self.place = self.piece[self.place : end], end
                    return value, written
            except UserError as problem:
                cause = problem.__cause__
                if self.is_whole or not isinstance(cause, json.JSONDecodeError):
                    raise
                if "Unterminated" not in cause.msg and cause.pos < len(self.piece) - _LONGEST_WORD:
                    raise
            self.more()

    @property
    def shown(self) -> str:
        return repr(self.piece[self.place : self.place + QUOTED_CHARACTERS])


_SPACE = re.compile(r"[ \t\r\n]*")
_LONGEST_WORD = 12  # characters that the decoder reads at once outside of texts and digits: two escapes of a character


def _json_values(text: _Text) -> Iterator[tuple[Any, str]]:
    """Each value of one array, or of a sequence of values, with its text. A value that cannot be read ends the file,
    even if bad rows are skipped: the next one cannot be found."""
    number, end = 0, "]" if text.mark() == "[" else ""
    text.place += len(end)
    is_open = text.mark() != end
    while is_open:
        number += 1
        text.mark()
        try:
            yield text.value()
        except UserError as problem:
            row, cause = f"row {number}", problem.__cause__
            if not isinstance(cause, json.JSONDecodeError):
                raise UserError(f"{row} {problem}") from None
            is_cut = "Unterminated" in cause.msg or cause.pos >= len(text.piece.rstrip())
            reason = str(problem).rpartition(" at column")[0] + ")"
            row += " has no end: the file is truncated" if is_cut else f" {reason}"
            raise UserError(f"{row}: {text.shown}") from None
        is_open = (mark := text.mark()) != end
        if is_open and end and not mark:
            raise UserError(f"its array has no end after row {number}: the file is truncated")
        if is_open and end and mark != ",":
            raise UserError(f"row {number} is not followed by a comma: {text.shown}")
        text.place += len(end)  # the comma, or the end of the array
    if not number:
        text.place += len(end)
    if text.mark():
        raise UserError(f"has more text after the end of its array: {text.shown}")


def _rows_of_object(table: Any) -> list[Row] | None:
    """Rows of a file that is one object of columns, as pandas writes it; None if it is something else."""
    parts = list(table.values()) if isinstance(table, dict) else []
    if parts and all(isinstance(part, dict) and list(part) == list(map(str, range(len(parts[0])))) for part in parts):
        parts = [list(part.values()) for part in parts]
    elif not (
        parts
        and all(isinstance(part, list) and len(part) == len(parts[0]) for part in parts)
        and all(isinstance(value, str) for part in parts for value in part)
    ):
        return None
    return [dict(zip(table, values, strict=True)) for values in zip(*parts, strict=True)]


# CSV and text


def other_batches(path: Path, kind: str | None, bad: BadLines, after: int) -> Iterator[Batch]:
    """Batches of the rows behind row `after`. Lines before it are not counted as bad again."""
    if kind == "json":
        rows = _json_rows(path, bad)
    elif kind == "text":
        rows = _text_rows(path, bad)
    else:
        rows = _separated_rows(path, "," if kind == "csv" else "\t", bad)
    while part := list(islice(rows, BATCH_ROWS)):
        numbers = [number for number, _ in part]
        if numbers[-1] > after:
            yield Batch(numbers, [row for _, row in part], numbers[-1])
        else:
            bad.forget()


def _text_rows(path: Path, bad: BadLines) -> Iterator[tuple[int, Row]]:
    """One row with the column `text` for each line that is not blank."""
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                text = (line.removeprefix(_BOM) if number == 1 else line).decode().rstrip("\r\n")
            except UnicodeDecodeError:
                bad.add_bytes(f"line {number}", line.strip())
                continue
            if text.strip():
                yield number, {"text": text}


@contextmanager
def _opened_csv(path: Path, delimiter: str) -> Iterator[Any]:
    csv.field_size_limit(sys.maxsize)
    with opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
        yield csv.reader(text, delimiter=delimiter, strict=True)


def _separated_rows(path: Path, delimiter: str, bad: BadLines) -> Iterator[tuple[int, Row]]:
    """Rows of a CSV or TSV file. Every value is text: an answer may be "4", "N/A" or empty."""
    _require_separator(path, delimiter)
    with _opened_csv(path, delimiter) as lines:
        try:
            header: list[str] = next((fields for fields in lines if fields), [])
        except csv.Error as problem:
            raise UserError(f"the header is not CSV ({problem})") from None
        if _escaped_bytes(header, delimiter) is not None:
            raise UserError(f"the header {NOT_UTF8}: {around_bad_byte(_escaped_bytes(header, delimiter) or b'')!r}")
        names: list[str] = []  # as pandas gives them: `Unnamed: 0` for an empty one, `a.1` for the second `a`
        for place, name in enumerate(header):
            candidates = chain([name or f"Unnamed: {place}"], (f"{name}.{number}" for number in count(1)))
            names.append(next(word for word in candidates if word not in names))
        number = 0
        while True:
            first_line = lines.line_num + 1
            try:
                fields = next(lines)
            except StopIteration:
                return
            except csv.Error as problem:
                number += 1
                cause = f"is not CSV ({problem}); text with a quote needs it twice, inside double quotes"
                swallowed = lines.line_num - first_line + 1
                bad.add(f"row {number}", cause, f"line {first_line}", max(1, swallowed))
                continue
            if not fields or (len(fields) == 1 < len(names) and not fields[0].strip()):
                continue  # a blank line
            number += 1
            if len(fields) != len(names):
                cause = f"has {len(fields)} fields, the header has {len(names)}"
                cause += "; put text that contains the separator in double quotes"
                bad.add(f"row {number}", cause, delimiter.join(fields), lines.line_num - first_line + 1)
            elif (content := _escaped_bytes(fields, delimiter)) is not None:
                bad.add_bytes(f"row {number}", content)
            else:
                yield number, dict(zip(names, fields, strict=True))


def _escaped_bytes(fields: list[str], delimiter: str) -> bytes | None:
    """The bytes of fields that are not UTF-8; None if they are."""
    text = delimiter.join(fields)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="surrogateescape")
    return None


def _require_separator(path: Path, delimiter: str) -> None:
    """Refuse a file of one column that has several columns, and rows of as many fields, by another separator."""
    if len((_first_records(path, delimiter) or [[]])[0]) > 1:
        return
    for other in (mark for mark in _SEPARATORS if mark != delimiter):
        header, *rows = _first_records(path, other) or [[]]
        if len(header) > 1 and any(len(fields) == len(header) for fields in rows):
            wanted, found = _SEPARATORS[delimiter], _SEPARATORS[other]
            renamed = {",": "rename it to NAME.csv", "\t": "rename it to NAME.tsv"}.get(other, "convert it")
            raise UserError(f"fields are separated by {wanted}; this file seems to use {found}; {renamed}")


def _first_records(path: Path, delimiter: str) -> list[list[str]]:
    """The first records that are not blank, up to one that is not CSV."""
    found: list[list[str]] = []
    with _opened_csv(path, delimiter) as lines, suppress(csv.Error):
        found.extend(islice(filter(None, lines), _FIRST_RECORDS))
    return found
