"""Parts of data sets: a file, or a split that `datasets` gives. All are read in batches of rows, from any place on. No
type is inferred: text of JSON or CSV that looks like a date stays text, and 5 stays 5. A row that cannot be read is an
error, or counted and left out (`--bad_rows`)."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count, islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset, IterableDataset

from dschat_ppo.data.cache import content_key, file_key
from dschat_ppo.errors import UserError, in_one_line, reading

KINDS = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
    ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
SUPPORTED = f"{', '.join(KINDS)} (also with {' or '.join(COMPRESSED)})"
BATCH_ROWS, BATCH_BYTES = 1000, 2**20  # bytes of lines
QUOTED_CHARACTERS, AROUND_CHARACTERS = 200, 40  # of a bad row; before and after a place in a file
MOST_BAD = {"few": 0.01, "skip": 1.0, "error": 0.0}  # share of the rows of a data set that --bad_rows drops
WAY_OUT = "--bad_rows skip leaves such rows out"
_DEEPEST = 200  # levels of lists and objects in a row: Python ends near 1,000, wherever it parses the row again
_SPACE, _BOM = re.compile(r"[ \t\r\n]*"), b"\xef\xbb\xbf"
_LFS = b"version https://git-lfs.github.com/"

Row = dict[str, Any]


# Bad rows


def too_many(bad: int, rows: int, policy: str) -> bool:
    """Whether `--bad_rows` does not accept so many bad rows; if all are bad, no value does."""
    return bad > MOST_BAD[policy] * rows or 0 < rows == bad


def way_out(bad: int, rows: int, policy: str) -> str:
    """The hint at `--bad_rows skip` after a count, where that would help."""
    return "" if policy == "skip" or bad == rows else f"; {WAY_OUT}"


@dataclass
class BadRows:
    """Counts the bad rows of a file; the first one raises `UserError` unless `skip`."""

    skip: bool
    count: int = 0
    first: str = ""

    def add(self, message: str, lines: int = 1) -> None:
        """Count a bad row of so many lines. The message says where it is and what is wrong; it does not name the
        file."""
        if not self.skip:
            raise UserError(f"{message}; {WAY_OUT}")
        self.first = self.first or message
        self.count += lines

    def forget(self) -> None:
        """Count from here on."""
        self.count, self.first = 0, ""


def _quoted(text: str) -> str:
    """The first characters of a bad row."""
    return f"{text[:QUOTED_CHARACTERS]!r}" + ("..." if len(text) > QUOTED_CHARACTERS else "")


def _text(content: bytes) -> str:
    """UTF-8 text. The error quotes the text around the first other byte, which is shown as a backslash, x and its
    number."""
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        before = content[: problem.start].decode()[-AROUND_CHARACTERS:]
        after = content[problem.start : problem.start + AROUND_CHARACTERS].decode(errors="backslashreplace")
        raise UserError(f"is not UTF-8 text (save the file as UTF-8): {before + after!r}") from None


# Parts


def kind_of(path: str | Path) -> str | None:
    """How a data file is read, by its name such as `a.csv.gz`; None if it is not one."""
    name = Path(path).name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return KINDS.get(Path(name).suffix)


@dataclass(frozen=True)
class Batch:
    """Rows of a data set, "NAME, row N" of each, and the place after them, in numbers, texts, lists and dicts.
    `unreadable` rows among them are left out; `problem` is that of the first one, or ""."""

    origins: list[str]
    rows: list[Row]
    place: Any = None
    unreadable: int = 0
    problem: str = ""


# (numbers of rows from 1 on, rows, place after them): lines of JSON Lines and text, rows of other kinds; bad ones count
Found = Iterator[tuple[Sequence[int], list[Row], Any]]


def read_part(part: Part, skip: bool, place: Any = None) -> Iterator[Batch]:
    """The rows of a part from `place` on. Without `skip`, one that cannot be read is an error, a `UserError` that names
    the part and its flag as all errors do."""
    bad, name = BadRows(skip), part.name
    try:
        with reading("cannot be read"):
            for numbers, rows, place in part.batches(bad, place):  # noqa: B020  the last one
                origins = [f"{name}, row {number}" for number in numbers]
                yield Batch(origins, rows, place, bad.count, bad.first and f"{name}, {bad.first}")
                bad.forget()
            if bad.count:
                yield Batch([], [], place, bad.count, f"{name}, {bad.first}")
    except UserError as problem:
        cause = problem.__cause__
        is_damaged = isinstance(cause, EOFError | zlib.error) or "Truncated compressed" in str(cause)
        hint = "; copy or download it again" if is_damaged else ""
        raise UserError(f"{part.flag} {name}: {problem}{hint}") from cause


@dataclass(frozen=True, eq=False)
class SetPart:
    """A split that `datasets` gives: a table, or one on the hub that is read row by row. `rows` are in the format
    "arrow", `start` is their state before the first. `key` identifies them on this machine, `content` wherever they are
    stored."""

    name: str
    flag: str
    rows: IterableDataset
    key: str
    content: str
    start: dict[str, Any]

    @classmethod
    def of(cls, name: str, flag: str, rows: Dataset | IterableDataset, revision: str) -> SetPart:
        """That of a table, or of a `revision` on the hub."""
        key = content = f"{name} {revision}"
        if isinstance(rows, Dataset):
            with reading(f"{flag} {name}: cannot be read"):
                files = [Path(file["filename"]) for file in rows.cache_files]
                # a fingerprint does not hold what the function of a `map` read
                key, content = " ".join([rows._fingerprint, *map(file_key, files)]), content_key(files)
            rows = rows.with_format("arrow").to_iterable_dataset()
        rows = rows.with_format("arrow")
        return cls(name, flag, rows, key, content, rows.state_dict())

    def batches(self, bad: BadRows, place: Any) -> Found:
        state, number = place or (self.start, 0)
        self.rows.load_state_dict(state)  # files before it are not read; a state loaded before would stay
        for table in self.rows.iter(batch_size=BATCH_ROWS):
            rows = _rows_of_table(table)
            first, number = number + 1, number + len(rows)
            yield range(first, number + 1), rows, [self.rows.state_dict(), number]


@dataclass(frozen=True)
class FilePart:
    """A data file."""

    path: Path
    flag: str

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def key(self) -> str:
        """What identifies the rows on this machine."""
        with reading(f"{self.flag} {self.path}: cannot be read"):
            return file_key(self.path)

    @property
    def content(self) -> str:
        """What identifies the rows wherever the file lies."""
        with reading(f"{self.flag} {self.path}: cannot be read"):
            return content_key([self.path])

    @property
    def kind(self) -> str | None:
        return kind_of(self.path)

    def check(self) -> None:
        """Refuse what is no data file. Reads its first bytes alone."""
        what = f"{self.flag} {self.path}"
        if self.kind is None:
            raise UserError(f"{what}: '{self.path.suffix}' files are not supported; use one of {SUPPORTED}")
        if not self.path.is_file():
            raise UserError(f"{what}: is not a regular file")
        with reading(f"{what}: cannot be read"), self.path.open("rb") as file:
            first = file.read(len(_LFS))
        if not first:
            raise UserError(f"{what}: the file is empty")
        if first == _LFS:
            raise UserError(f"{what}: is a Git LFS pointer, not the data; run `git lfs pull` in its repository")

    def batches(self, bad: BadRows, place: Any) -> Found:
        """Files of lines and Parquet are opened at `place`; other files are read from their start."""
        is_json = self.kind == "json"
        if self.kind == "text" or (is_json and (isinstance(place, list) or _is_json_lines(self.path))):
            yield from line_batches(self.path, bad, place or [0, 0], _row_of_json if is_json else _row_of_text)
        elif self.kind in ("parquet", "arrow"):
            yield from _table_batches(self.path, self.kind, place or 0)
        else:
            rows = (_json_rows if is_json else _separated_rows)(self.path, bad)
            while part := list(islice(rows, BATCH_ROWS)):
                if part[-1][0] > (place or 0):
                    yield [number for number, _ in part], [row for _, row in part], part[-1][0]
                else:
                    bad.forget()  # they were counted when these rows were read before


Part = FilePart | SetPart


def _opened(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed."""
    codec = COMPRESSED.get(path.suffix.lower())
    if codec is None:
        return path.open("rb")
    if codec == "gzip":  # pyarrow refuses the zeros with which some programs fill up the last block
        return io.BufferedReader(gzip.GzipFile(path), BATCH_BYTES)
    return io.BufferedReader(pa.input_stream(str(path), compression=codec), BATCH_BYTES)


# Parquet and Arrow


def _table_batches(path: Path, kind: str, after: int) -> Found:
    """Batches of the rows behind row `after`. Row groups of Parquet before it are not read."""
    is_compressed = path.suffix.lower() in COMPRESSED
    source: Any = pa.BufferReader(_opened(path).read()) if is_compressed else pa.memory_map(str(path))
    end = 0  # of the rows of the file that are passed
    if kind == "parquet":
        table = pa.parquet.ParquetFile(source)
        sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
        first = sum(end <= after for end in accumulate(sizes))
        end = sum(sizes[:first])
        batches = table.iter_batches(BATCH_ROWS, row_groups=range(first, len(sizes)), use_threads=False)
    else:
        try:
            whole = pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            whole = pa.ipc.open_file(source).read_all()
        batches = iter(whole.to_batches(BATCH_ROWS))
    for batch in batches:
        end += len(batch)
        if end > after:
            rows = _rows_of_table(pa.Table.from_batches([batch.slice(max(0, after + len(batch) - end))]))
            yield range(end - len(rows) + 1, end + 1), rows, end


def _rows_of_table(table: pa.Table) -> list[Row]:
    """Rows in values of JSON: dates and decimals as text, of bytes only their number."""
    table.validate(full=True)  # the only check that its text is UTF-8
    if len(set(table.column_names)) < table.num_columns:
        raise UserError(f"several columns have the same name: {', '.join(table.column_names)}")

    def as_json(value: Any) -> Any:
        return {"bytes": len(value)} if isinstance(value, bytes) else str(value)

    return json.loads(json.dumps(table.to_pylist(), default=as_json))


# Lines of JSON or text


def line_batches(path: Path, bad: BadRows, place: list[int], row_of: Callable[[str], Row]) -> Found:
    """A row for each line that is not blank. `place` is [bytes, lines] of the file that are read already."""
    offset, number = place
    with _opened(path) as file:
        if file.seekable():
            file.seek(offset)
        else:
            deque(islice(file, number), maxlen=0)
        while lines := file.readlines(BATCH_BYTES):
            numbers, rows = [], []
            for line in lines:
                number += 1
                line = line.removeprefix(_BOM) if number == 1 else line
                try:
                    if (text := _text(line).rstrip("\r\n")).strip():
                        rows.append(row_of(text))
                        numbers.append(number)
                except UserError as problem:
                    bad.add(f"line {number} {problem}")
            offset += sum(map(len, lines))
            yield numbers, rows, [offset, number]


def _row_of_text(text: str) -> Row:
    return {"text": text}


def _row_of_json(text: str) -> Row:
    try:
        return _checked_row(_decoded(_DECODER.decode, text), text)
    except UserError as problem:
        raise UserError(f"{problem}: {_quoted(text.strip())}") from None


# JSON


def _is_json_lines(path: Path) -> bool:
    """Whether each line of a JSON file is a row, rather than one array, one object, or objects over several lines."""
    with _opened(path) as file:
        filled = filter(None, (line.removeprefix(_BOM).strip() for line in file))
        first, second = next(filled, b""), next(filled, b"")
    if first[:1] != b"{":
        return first[:1] != b"["
    try:
        json.loads(first)
    except (ValueError, RecursionError):  # a bad line, or an object over several, perhaps with a list of objects
        return first != b"{" and (".json" not in path.suffixes or (second[:1] == b"{" and second[-1:] != b","))
    return bool(second)  # an object by itself may hold columns


def _constant(name: str) -> None:
    """NaN, which many programs write for a missing number, is null. Infinity is refused."""
    if name != "NaN":
        raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(parse_constant=_constant)


def _decoded(function: Callable[..., Any], *text: Any) -> Any:
    """`function(*text)`; an error says what is wrong."""
    try:
        return function(*text)
    except RecursionError:
        raise UserError("is nested too deeply") from None
    except ValueError as problem:  # also Infinity, or a number of more than 4,300 digits
        reason = re.sub(r"( starting)?( at)?: line 1 column (\d+) .*", r" at column \3", in_one_line(problem))
        raise UserError(f"is not JSON ({reason})") from problem


def _checked_row(row: Any, text: str) -> Row:
    """`row`, whose JSON is `text`. Refuses a value that is no row of named fields, that would not be parsed again, or
    that no file can hold."""
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
    return row


def _json_rows(path: Path, bad: BadRows) -> Iterator[tuple[int, Row]]:
    """The rows of one array, of one object of columns, or of objects over several lines each. The text of the file is
    in memory, the rows are made one at a time."""
    with _opened(path) as file:
        text = _text(file.read().removeprefix(_BOM)).lstrip()
    values = _json_values(text)
    first = list(islice(values, 2))
    if len(first) == 1 and not text.startswith("["):
        first = _rows_of_object(first[0]) or first
    for number, value in enumerate(chain(first, values), start=1):
        row = {"text": value} if isinstance(value, str) else value
        written = _decoded(json.dumps, row)
        try:
            yield number, _checked_row(row, written)
        except UserError as problem:
            bad.add(f"row {number} {problem}: {_quoted(written)}")


def _json_values(text: str) -> Iterator[Any]:
    """The elements of one array, or values that follow each other. An error in the JSON ends the file, even if bad rows
    are skipped: the next value cannot be found."""
    in_array = text.startswith("[")
    place = _behind_space(text, int(in_array))
    while text[place : place + 1] != ("]" if in_array else ""):
        try:
            value, place = _decoded(_json_value, text, place, in_array)
        except UserError as problem:
            place = getattr(problem.__cause__, "pos", place)
            near = text[max(0, place - AROUND_CHARACTERS) : place + AROUND_CHARACTERS]
            raise UserError(f"{problem}: {near!r}") from None
        yield value


def _json_value(text: str, place: int, in_array: bool) -> tuple[Any, int]:
    """The value at a place, and the place of the next value or of the end of the array."""
    value, place = _DECODER.raw_decode(text, place)
    place = _behind_space(text, place)
    if not in_array:
        return value, place
    if text.startswith("]", place):
        if (after := _behind_space(text, place + 1)) < len(text):
            raise json.JSONDecodeError("Extra data", text, after)
        return value, place
    if not text.startswith(",", place):
        raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
    place = _behind_space(text, place + 1)
    if text.startswith("]", place):
        raise json.JSONDecodeError("Illegal trailing comma before end of array", text, place)
    return value, place


def _behind_space(text: str, place: int) -> int:
    return _SPACE.match(text, place).end()  # type: ignore[union-attr]  # it matches ""


def _rows_of_object(table: Any) -> list[Row] | None:
    """Rows of a file that is one object of columns, as pandas writes it: objects with the keys "0", "1" and so on, or
    lists of texts. None if it is something else."""
    parts = list(table.values()) if isinstance(table, dict) else []
    if all(isinstance(part, dict) and list(part) == list(map(str, range(len(parts[0])))) for part in parts):
        parts = [list(part.values()) for part in parts]
    elif not all(isinstance(part, list) and all(isinstance(value, str) for value in part) for part in parts):
        return None
    if len(set(map(len, parts))) != 1:
        return None
    return [dict(zip(table, values, strict=True)) for values in zip(*parts, strict=True)]


# CSV


def _separated_rows(path: Path, bad: BadRows) -> Iterator[tuple[int, Row]]:
    """Rows of a CSV or TSV file. Every value is text: an answer may be "4", "N/A" or empty."""
    delimiter = "," if kind_of(path) == "csv" else "\t"
    csv.field_size_limit(sys.maxsize)
    with _opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
        lines = csv.reader(text, delimiter=delimiter, strict=True)
        names: list[str] = []  # as pandas gives them: `Unnamed: 0` for an empty one, `a.1` for the second `a`
        for place, field in enumerate(next(filter(None, lines), [])):
            name = _text(field.encode(errors="surrogateescape"))
            candidates = chain([name or f"Unnamed: {place}"], (f"{name}.{number}" for number in count(1)))
            names.append(next(word for word in candidates if word not in names))
        if len(names) == 1 and (marks := [mark for mark in ";\t," if mark in names[0] and mark != delimiter]):
            wrong = f"the header is one column, {_quoted(names[0])}, with the separator {marks[0]!r}"
            raise UserError(f"{wrong}; a .csv file needs commas and a .tsv file tabs")
        number = 0
        while True:
            before = lines.line_num
            try:
                if (fields := next(lines, None)) is None:
                    return
                content = delimiter.join(fields).encode(errors="surrogateescape")
                if len(fields) < len(names) and not content.strip():
                    continue  # a blank line
                number += 1
                if len(fields) != len(names):
                    wrong = f"has {len(fields)} fields, the header has {len(names)}; put text that contains the "
                    raise UserError(f"{wrong}separator in double quotes: {_quoted(_text(content))}")
                _text(content)
            except csv.Error as problem:
                number += 1
                wrong = f"is not CSV ({problem}); text with a quote needs it twice, inside double quotes"
                bad.add(f"row {number}, line {before + 1}, {wrong}", max(1, lines.line_num - before))
            except UserError as problem:
                bad.add(f"row {number} {problem}", max(1, lines.line_num - before))
            else:
                yield number, dict(zip(names, fields, strict=True))
