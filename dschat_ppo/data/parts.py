"""Parts of data sets: a file, a table, a split on the hub. All are read in batches of rows, from any place on. No type
is inferred: text of JSON or CSV that looks like a date stays text, and 5 stays 5."""

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
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset, IterableDataset

from dschat_ppo.data.bad_lines import NOT_UTF8, QUOTED_CHARACTERS, BadLines, around_bad_byte
from dschat_ppo.data.cache import content_key, file_key
from dschat_ppo.data.sources import COMPRESSED, SUPPORTED, kind_of
from dschat_ppo.errors import UserError, in_one_line, reading

BATCH_ROWS, BATCH_BYTES = 1000, 2**20  # bytes of lines
_DEEPEST = 200  # levels of lists and objects in a row: Python ends near 1,000, wherever it parses the row again
_SPACE, _BOM = re.compile(r"[ \t\r\n]*"), b"\xef\xbb\xbf"
_LFS = b"version https://git-lfs.github.com/"
_SEPARATORS = {",": "commas; rename it to NAME.csv", "\t": "tabs; rename it to NAME.tsv", ";": "';'; convert it",
               "|": "'|'; convert it"}  # fmt: skip

Row = dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """Rows of a part, their numbers from 1 on (lines of JSON Lines and text, rows of other kinds; skipped rows count),
    and the place after them, in numbers, texts, lists and dicts. `unreadable` rows among them are left out; `problem`
    is that of the first one, or ""."""

    numbers: Sequence[int]
    rows: list[Row]
    place: Any
    unreadable: int = 0
    problem: str = ""


def read_part(part: Part, skip: bool, place: Any = None) -> Iterator[Batch]:
    """The rows of a part from `place` on. Without `skip`, one that cannot be read is an error, a `UserError` that names
    the part and its flag as all errors do."""
    bad = BadLines(skip)
    try:
        with reading("cannot be read"):
            for batch in part.batches(bad, place):
                yield replace(batch, unreadable=bad.count, problem=bad.first)
                bad.forget()
                place = batch.place
            if bad.count:
                yield Batch([], [], place, bad.count, bad.first)
    except UserError as problem:
        raise UserError(f"{part.flag} {part.name}: {problem}") from problem.__cause__


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

    def batches(self, bad: BadLines, place: Any) -> Iterator[Batch]:
        """Files of lines and Parquet are opened at `place`; other files are read from their start."""
        is_json = self.kind == "json"
        try:
            if self.kind == "text" or (is_json and (isinstance(place, list) or _is_json_lines(self.path))):
                yield from line_batches(self.path, bad, place or [0, 0], _row_of_json if is_json else _row_of_text)
            elif self.kind in ("parquet", "arrow"):
                yield from _table_batches(self.path, self.kind, place or 0)
            else:
                rows = (_json_rows if is_json else _separated_rows)(self.path, bad)
                while part := list(islice(rows, BATCH_ROWS)):
                    if part[-1][0] > (place or 0):
                        yield Batch([number for number, _ in part], [row for _, row in part], part[-1][0])
                    else:
                        bad.forget()  # they were counted when these rows were read before
        except (OSError, EOFError, zlib.error) as problem:
            if self.path.suffix.lower() not in COMPRESSED or getattr(problem, "errno", None) is not None:
                raise
            is_cut = isinstance(problem, EOFError) or "Truncated" in str(problem)
            damage = "truncated" if is_cut else f"damaged ({problem})"
            raise UserError(f"the compressed file is {damage}; copy or download it again") from None


@dataclass(frozen=True)
class TablePart:
    """A split that `datasets` holds as a table."""

    name: str
    flag: str
    rows: Dataset

    @property
    def files(self) -> list[Path]:
        """The Arrow files of the table."""
        return [Path(file["filename"]) for file in self.rows.cache_files]

    @property
    def key(self) -> str:
        with reading(f"{self.flag} {self.name}: cannot be read"):
            # a fingerprint does not hold what the function of a `map` read
            return " ".join([str(self.rows._fingerprint), *map(file_key, self.files)])

    @property
    def content(self) -> str:
        """What identifies the rows wherever the files lie."""
        with reading(f"{self.flag} {self.name}: cannot be read"):
            return content_key(self.files)

    def batches(self, bad: BadLines, place: Any) -> Iterator[Batch]:
        rows = self.rows.with_format("arrow")
        for start in range(place or 0, len(rows), BATCH_ROWS):
            found = _rows_of_table(rows[start : start + BATCH_ROWS])
            yield Batch(range(start + 1, start + len(found) + 1), found, start + len(found))


@dataclass(frozen=True)
class HubPart:
    """A split on the hub, read row by row. `key` holds its revision, `start` the state of `rows` before the first."""

    name: str
    flag: str
    rows: IterableDataset
    key: str
    start: dict[str, Any]

    @property
    def content(self) -> str:
        """What identifies the rows."""
        return self.key

    def batches(self, bad: BadLines, place: Any) -> Iterator[Batch]:
        place = place or {"state": self.start, "number": 0}
        self.rows.load_state_dict(place["state"])  # files before it are not read; a state loaded before would stay
        number = place["number"]
        for columns in self.rows.iter(batch_size=BATCH_ROWS):
            rows = _rows_of_columns(columns)
            first, number = number + 1, number + len(rows)
            yield Batch(range(first, number + 1), rows, {"state": self.rows.state_dict(), "number": number})


Part = FilePart | TablePart | HubPart


def _opened(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed."""
    codec = COMPRESSED.get(path.suffix.lower())
    if codec is None:
        return path.open("rb")
    if codec == "gzip":  # pyarrow refuses the zeros with which some programs fill up the last block
        return io.BufferedReader(gzip.GzipFile(path), BATCH_BYTES)
    return io.BufferedReader(pa.input_stream(str(path), compression=codec), BATCH_BYTES)


# Parquet and Arrow


def _table_batches(path: Path, kind: str, after: int) -> Iterator[Batch]:
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
            yield Batch(range(end - len(rows) + 1, end + 1), rows, end)


def _rows_of_table(table: pa.Table) -> list[Row]:
    table.validate(full=True)  # the only check that its text is UTF-8
    if len(set(table.column_names)) < table.num_columns:
        raise UserError(f"several columns have the same name: {', '.join(table.column_names)}")
    return _rows_of_columns(table.to_pydict())


def _rows_of_columns(columns: dict[str, list[Any]]) -> list[Row]:
    """Rows in values of JSON: dates and decimals as text, of bytes only their number."""

    def as_json(value: Any) -> Any:
        return {"bytes": len(value)} if isinstance(value, bytes) else str(value)

    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return json.loads(json.dumps(rows, default=as_json))


# Lines of JSON or text


def line_batches(path: Path, bad: BadLines, place: list[int], row_of: Callable[[str], Row]) -> Iterator[Batch]:
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
                if number == 1:
                    line = line.removeprefix(_BOM)
                try:
                    text = line.decode().rstrip("\r\n")
                    if text.strip():
                        rows.append(row_of(text))
                        numbers.append(number)
                except UnicodeDecodeError:
                    bad.add_bytes(f"line {number}", line.strip())
                except UserError as problem:
                    bad.add(f"line {number}", str(problem), text.strip())
            offset += sum(map(len, lines))
            yield Batch(numbers, rows, [offset, number])


def _row_of_text(text: str) -> Row:
    return {"text": text}


def _row_of_json(text: str) -> Row:
    row = _with_reason(_DECODER.decode, text)
    _check_row(row, text)
    return dict(row)


# JSON


def _is_json_lines(path: Path) -> bool:
    """Whether each line of a JSON file is a row, rather than one array, one object, or objects over several lines."""
    with _opened(path) as file:
        text = file.read(BATCH_BYTES).removeprefix(_BOM).lstrip()
        if text[:1] != b"{":
            return text[:1] != b"["
        if b"\n" not in text:
            text += file.readline()
        first, _, rest = text.partition(b"\n")
        rest = rest or file.read(BATCH_BYTES)
    with suppress(ValueError, RecursionError):
        json.loads(first)
        return bool(rest.strip())  # an object by itself may hold columns
    with suppress(ValueError, RecursionError):
        json.JSONDecoder().raw_decode((first + b"\n" + rest).decode(errors="ignore"))
        return False  # it begins on the first line and ends on a later one
    return first.strip() != b"{"  # a bad line


def _constant(name: str) -> None:
    """NaN, which many programs write for a missing number, is null. Infinity is refused."""
    if name != "NaN":
        raise ValueError(f"{name} is no number")


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
    except ValueError as problem:  # Infinity, or a number of more than 4,300 digits
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
    """The rows of one array, or of objects over several lines each. The file is read whole."""
    with _opened(path) as file:
        content = file.read()
    try:
        values = _json_values(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise UserError(f"{NOT_UTF8}: {around_bad_byte(content)!r}") from None
    del content
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


def _json_values(text: str) -> Iterator[tuple[Any, str]]:
    """Each value of one array, or of a sequence of values, with its text. A value that cannot be read ends the file,
    even if bad rows are skipped: the next one cannot be found."""

    def behind_space(place: int) -> int:
        return _SPACE.match(text, place).end()  # type: ignore[union-attr]  # it matches ""

    number, place = 0, behind_space(0)
    end = "]" if text[place] == "[" else ""
    place = behind_space(place + len(end))
    while (mark := text[place : place + 1]) != end:
        number += 1
        try:
            value, behind = _with_reason(_DECODER.raw_decode, text, place)
        except UserError as problem:
            cause, reason = problem.__cause__, re.sub(r" at column \d+", "", str(problem))
            if isinstance(cause, json.JSONDecodeError) and (
                "Unterminated" in cause.msg or not text[cause.pos :].strip()
            ):
                reason = "has no end: the file is truncated"
            raise UserError(f"row {number} {reason}: {text[place : place + QUOTED_CHARACTERS]!r}") from None
        yield value, text[place:behind]
        place = behind_space(behind)
        if end and (mark := text[place : place + 1]) != end:
            if mark != ",":
                wrong = f"row {number} is not followed by a comma" if mark else "the array has no end: it is truncated"
                raise UserError(f"{wrong}: {text[place : place + QUOTED_CHARACTERS]!r}")
            place = behind_space(place + 1)
    if rest := text[place + len(end) :].strip():
        raise UserError(f"has more text after the end of its array: {rest[:QUOTED_CHARACTERS]!r}")


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


def _separated_rows(path: Path, bad: BadLines) -> Iterator[tuple[int, Row]]:
    """Rows of a CSV or TSV file. Every value is text: an answer may be "4", "N/A" or empty."""
    delimiter = "," if kind_of(path) == "csv" else "\t"
    with _opened(path) as file:
        lines_of_text = (line.decode(errors="replace") for line in file if line.strip())
        first, later = next(lines_of_text, ""), "".join(islice(lines_of_text, 20))
    for mark, mend in _SEPARATORS.items() if delimiter not in first else ():
        if mark in first and mark in later:
            wanted = _SEPARATORS[delimiter].partition(";")[0]
            raise UserError(f"fields are separated by {wanted}; this file seems to use {mend}")
    csv.field_size_limit(sys.maxsize)
    with _opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
        lines = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            header: list[str] = next(filter(None, lines), [])
        except csv.Error as problem:
            raise UserError(f"the header is not CSV ({problem})") from None
        if (content := _escaped_bytes(header, delimiter)) is not None:
            raise UserError(f"the header {NOT_UTF8}: {around_bad_byte(content)!r}")
        names: list[str] = []  # as pandas gives them: `Unnamed: 0` for an empty one, `a.1` for the second `a`
        for place, name in enumerate(header):
            candidates = chain([name or f"Unnamed: {place}"], (f"{name}.{number}" for number in count(1)))
            names.append(next(word for word in candidates if word not in names))
        number = 0
        while True:
            before = lines.line_num
            try:
                fields, cause = next(lines), ""
            except StopIteration:
                return
            except csv.Error as problem:
                cause = f"is not CSV ({problem}); text with a quote needs it twice, inside double quotes"
                fields = [f"line {before + 1}"]
            if not fields or (not cause and len(fields) == 1 < len(names) and not fields[0].strip()):
                continue  # a blank line
            number += 1
            if not cause and len(fields) != len(names):
                cause = f"has {len(fields)} fields, the header has {len(names)}"
                cause += "; put text that contains the separator in double quotes"
            if cause:
                bad.add(f"row {number}", cause, delimiter.join(fields), max(1, lines.line_num - before))
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
