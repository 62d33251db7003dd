"""Shards of data sets: a file, or a split that `datasets` gives. All are read in batches of rows,
from any row on. No type is inferred: text of JSON or CSV that looks like a date stays text, and 5
stays 5. In place of a row that cannot be read stands a text that says what is wrong with it, so
that `tokenise.py` alone counts bad rows."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset, IterableDataset

from dschat_ppo.data.cache import content_key, file_key
from dschat_ppo.errors import UserError, in_one_line, reading

KINDS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
SUPPORTED = f"{', '.join(KINDS)} (also with {' or '.join(COMPRESSED)})"
BATCH_ROWS = 1000
_OF_TOOLS = ("tools", "tool_calls", "functions", "function_call")  # keys of objects
_AROUND = 40  # characters before and after an error in a file that a message quotes

Row = dict[str, Any]
Raw = Row | str  # or what is wrong with a row
NumberedRows = Iterator[tuple[int, Raw]]  # rows with their numbers from 1 on
# What a shard needs to read on behind a row, in numbers, texts, lists and dicts; each kind of shard
# has its own
Offset = Any
KeepBytes = Callable[[bytes], Any]  # bytes of a table -> what stands for them in a row
RowsWithOffsets = Iterator[tuple[int, Raw, Offset]]  # numbers, rows, and the offset behind each


def file_kind(path: str | Path) -> str | None:
    """How a data file is read, by its name such as `a.csv.gz`; None if it is not one."""
    name = Path(path).name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return KINDS.get(Path(name).suffix)


# Shards


@dataclass(frozen=True)
class Batch:
    """Rows of a data set, "FILE, row N" of each, and where the rows behind them begin: an offset in
    a shard, or a position in several shards."""

    origins: list[str]
    rows: list[Raw]
    end: Any = None


def number_of_bytes(content: bytes) -> Any:
    """What stands for bytes in a row whose bytes nobody reads."""
    return {"bytes": len(content)}


def read_shard(
    shard: Shard, offset: Offset = None, keep: KeepBytes = number_of_bytes
) -> Iterator[Batch]:
    """The rows of a shard from an offset on. A `UserError` names the shard and its flag."""
    name = shard.name
    try:
        with reading("cannot be read"):
            rows_left = shard.numbered_rows(offset, keep)
            batch = list(islice(rows_left, BATCH_ROWS))
            while batch:
                origins = [f"{name}, row {row_number}" for row_number, _, _ in batch]
                rows = [row for _, row, _ in batch]
                _, _, end = batch[-1]
                yield Batch(origins, rows, end)
                batch = list(islice(rows_left, BATCH_ROWS))
    except UserError as problem:
        raise UserError(f"{shard.flag} {name}: {problem}") from problem


class SplitShard:
    """A split that `datasets` gives: a table, or one of a `revision` on the hub that is read row by
    row. `key` identifies its rows on this machine, `content` wherever they are stored; `start` is
    the state before the first."""

    def __init__(self, name: str, flag: str, rows: Dataset | IterableDataset, revision: str):
        self.name = name
        self.flag = flag
        self.key = f"{name} {revision}"
        self.content = self.key
        if isinstance(rows, Dataset):
            files = [Path(file["filename"]) for file in rows.cache_files]
            # a fingerprint does not hold what the function of a `map` read
            self.key = " ".join([rows._fingerprint, *map(file_key, files)])
            self.content = content_key(files)
            rows = rows.with_format("arrow").to_iterable_dataset()
        self.rows: IterableDataset = rows.with_format("arrow")
        self.start = self.rows.state_dict()

    def numbered_rows(self, offset: Offset, keep: KeepBytes = number_of_bytes) -> RowsWithOffsets:
        """The rows behind an offset: [state of `datasets` before a table of rows, number of rows
        before that table, number of the row that the offset is behind]."""
        state, row_number, last_number = offset or (self.start, 0, 0)
        # files before it are not read; a state loaded before would stay
        self.rows.load_state_dict(state)
        for table in self.rows.iter(batch_size=BATCH_ROWS):
            rows_before = row_number
            for row in _rows_of_table(table, keep):
                row_number += 1
                if row_number > last_number:
                    yield row_number, row, [state, rows_before, row_number]
            state = self.rows.state_dict()


@dataclass(frozen=True)
class FileShard:
    """A data file."""

    path: Path
    flag: str

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def key(self) -> str:
        """What identifies the rows on this machine."""
        return file_key(self.path)

    @property
    def content(self) -> str:
        """What identifies the rows wherever the file lies."""
        return content_key([self.path])

    @property
    def kind(self) -> str | None:
        return file_kind(self.path)

    def check(self) -> None:
        """Refuse what is no data file. Reads its first bytes alone."""
        what = f"{self.flag} {self.path}"
        if self.kind is None:
            raise UserError(
                f"{what}: '{self.path.suffix}' files are not supported; use one of {SUPPORTED}"
            )
        if not self.path.is_file():
            raise UserError(f"{what}: is not a regular file")
        with reading(f"{what}: cannot be read"), self.path.open("rb") as file:
            if file.read(100).startswith(b"version https://git-lfs.github.com/"):
                raise UserError(
                    f"{what}: is a Git LFS pointer, not the data; run `git lfs pull` in its"
                    " repository"
                )

    def numbered_rows(self, offset: Offset, keep: KeepBytes = number_of_bytes) -> RowsWithOffsets:
        """The rows behind an offset. That of lines of text or JSON is [bytes, lines] of the file
        that are read already; that of other files is the number of a row, and they are read from
        their start."""
        kind = self.kind
        if kind == "text" or (kind == "json" and _is_json_lines(self.path)):
            bytes_read, line_number = offset or (0, 0)
            with _opened(self.path) as file:
                if file.seekable():
                    file.seek(bytes_read)
                else:
                    deque(islice(file, line_number), maxlen=0)
                for line in file:
                    bytes_read += len(line)
                    line_number += 1
                    filled = line.strip()
                    if not filled:
                        continue
                    row: Raw
                    try:
                        if kind == "text":
                            row = {"text": line.decode("utf-8-sig").rstrip("\r\n")}
                        else:
                            row = _checked_row(_DECODER.decode(filled.decode("utf-8-sig")))
                    except (RecursionError, ValueError) as problem:
                        row = _refusal(problem, filled.decode("utf-8-sig", "ignore"))
                    yield line_number, row, [bytes_read, line_number]
            return
        last_number = offset or 0
        if kind == "json":
            rows = _json_rows(self.path)
        elif kind in ("parquet", "arrow"):
            rows = _table_rows(self.path, kind, last_number, keep)
        else:
            rows = _separated_rows(self.path, "," if kind == "csv" else "\t")
        for row_number, row in rows:
            if row_number > last_number:
                yield row_number, row, row_number


Shard = FileShard | SplitShard


# Bytes, text and rows


def _opened(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed."""
    codec = COMPRESSED.get(path.suffix.lower())
    if codec:
        return io.BufferedReader(pa.input_stream(str(path), compression=codec), 2**20)
    return path.open("rb")


def _constant(name: str) -> None:
    """NaN, which many programs write for a missing number, is null. Infinity is refused."""
    if name != "NaN":
        raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(parse_constant=_constant)


def _refusal(problem: Exception, text: str = "") -> str:
    """What is wrong with a line or file, and the text around the error. A byte that is not UTF-8 is
    shown as a backslash, x and its number; all other errors are those of JSON in `text`."""
    if isinstance(problem, UserError):
        return str(problem)
    if isinstance(problem, UnicodeDecodeError):
        around = problem.object[max(0, problem.start - _AROUND) : problem.end + _AROUND]
        return (
            "is not UTF-8 text (save the file as UTF-8):"
            f" {around.decode(errors='backslashreplace')!r}"
        )
    # also Infinity, nesting that is too deep, or a number of more than 4,300 digits
    reason = in_one_line(problem).replace("line 1 column", "column")
    position = getattr(problem, "pos", 0)
    return f"is not JSON ({reason}): {text[max(0, position - _AROUND) : position + _AROUND]!r}"


def _row_or_refusal(make: Callable[..., Row], content: Any) -> Raw:
    """The row that `make` gives, or what is wrong with it."""
    try:
        return make(content)
    except ValueError as problem:
        return _refusal(problem)


def _checked_row(row: Any) -> Row:
    """A row of JSON. Refuses one without named fields, and one that no file can hold."""
    if not isinstance(row, dict) or not row:
        raise UserError("is not an object with named fields")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError("holds half of a surrogate pair, which is not text") from None
    return row


# Parquet and Arrow


def _table_rows(path: Path, kind: str, last_number: int, keep: KeepBytes) -> NumberedRows:
    """The rows from the batch on that holds the one behind row `last_number`."""
    source: Any
    if path.suffix.lower() in COMPRESSED:
        source = pa.BufferReader(_opened(path).read())
    else:
        source = pa.memory_map(str(path))
    if kind == "parquet":
        batches = pa.parquet.ParquetFile(source).iter_batches(BATCH_ROWS, use_threads=False)
    else:
        try:
            full_table = pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            full_table = pa.ipc.open_file(source).read_all()
        batches = iter(full_table.to_batches(BATCH_ROWS))
    rows_before = 0
    for batch in batches:
        if rows_before + len(batch) > last_number:
            rows = _rows_of_table(pa.Table.from_batches([batch]), keep)
            yield from enumerate(rows, rows_before + 1)
        rows_before += len(batch)


def _rows_of_table(table: pa.Table, keep: KeepBytes) -> list[Row]:
    """Rows in values of JSON: dates and decimals as text, and for bytes what `keep` gives."""
    table.validate(full=True)  # the only check that its text is UTF-8
    if len(set(table.column_names)) < table.num_columns:
        raise UserError(f"several columns have the same name: {', '.join(table.column_names)}")
    rows = [_without_padding(row) for row in table.to_pylist()]

    def value_for_json(value: Any) -> Any:
        """What stands for a value that JSON has not."""
        if isinstance(value, bytes):
            return keep(value)
        return str(value)

    return json.loads(json.dumps(rows, default=value_for_json))


def _without_padding(value: Any, is_of_tools: bool = False) -> Any:
    """The value without the null keys inside tools and their calls: Arrow gives each object all
    keys of its column, so a call would have the arguments of all other calls."""
    if isinstance(value, dict):
        return {
            key: _without_padding(inner, is_of_tools or key in _OF_TOOLS)
            for key, inner in value.items()
            if inner is not None or not is_of_tools
        }
    if isinstance(value, list):
        return [_without_padding(inner, is_of_tools) for inner in value]
    return value


# JSON


def _is_json_lines(path: Path) -> bool:
    """Whether each line of a JSON file is a row, as in all not named .json; otherwise it is one
    array or object."""
    with _opened(path) as file:
        filled = (line.removeprefix(b"\xef\xbb\xbf").strip() for line in file if line.strip())
        first = next(filled, b"")
        second = next(filled, b"")
    if ".json" not in map(str.lower, path.suffixes):
        return not first.startswith(b"[")
    return first.startswith(b"{") and first.endswith(b"}") and bool(second)


def _json_rows(path: Path) -> NumberedRows:
    """The rows of an array or object, all in memory. An object is one row, or columns as pandas
    writes them, such as {"a": {"0": 5, "1": 6}}."""
    with _opened(path) as file:
        content = file.read()
    text = ""
    try:
        text = content.decode("utf-8-sig")
        del content  # perhaps gigabytes
        value = _DECODER.decode(text)
        text = ""
    except (RecursionError, ValueError) as problem:
        wrong = _refusal(problem, text)
        raise UserError(
            f"{wrong}; a .json file is one array, one object, or one object on each line"
        ) from None
    rows = [value]
    if isinstance(value, list):
        rows = value
    elif isinstance(value, dict):
        rows = _rows_of_columns(value) or [value]
    for row_number, row in enumerate(rows, start=1):
        yield row_number, _row_or_refusal(_checked_row, row)


def _rows_of_columns(value: dict[str, Any]) -> list[Row]:
    """The rows of an object that holds columns as pandas writes them; [] of any other object."""
    columns = list(value.values())
    if not columns or not isinstance(columns[0], dict):
        return []
    keys = list(columns[0])  # "0", "1", ...
    is_table = all(isinstance(column, dict) and list(column) == keys for column in columns)
    if not is_table or not all(map(str.isdigit, keys)):
        return []
    rows = list[Row]()
    for key in keys:
        rows.append({name: column[key] for name, column in value.items()})
    return rows


# CSV


def _separated_rows(path: Path, delimiter: str) -> NumberedRows:
    """Rows of a CSV or TSV file. Every value is text: an answer may be "4", "N/A" or empty. A quote
    in the wrong place ends the file, because any number of lines may be in that field."""
    csv.field_size_limit(sys.maxsize)
    with (
        _opened(path) as file,
        io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text,
    ):
        lines = csv.reader(text, delimiter=delimiter, strict=True)
        filled = (fields for fields in lines if "".join(fields).strip())

        def row_of(fields: list[str]) -> Row:
            """The row of a line. `UnicodeDecodeError` if it is not UTF-8."""
            content = delimiter.join(fields).encode(errors="surrogateescape").decode()
            if len(fields) != len(names):
                wrong = (
                    f"has {len(fields)} fields, the header has {len(names)}; put text that contains"
                    " the separator"
                )
                raise UserError(f"{wrong} in double quotes: {content[:200]!r}")
            return dict(zip(names, fields, strict=True))

        try:
            names = list[str]()
            for index, name in enumerate(next(filled, [])):
                names.append(name or f"Unnamed: {index}")  # as pandas calls an index
            if len(row_of(names)) < len(names):
                raise UserError(f"several columns have the same name: {', '.join(names)}")
            if len(names) == 1 and any(mark in names[0] for mark in ";\t,"):
                raise UserError(
                    f"the header is one column, {names[0]!r}; a .csv file needs commas, a .tsv file"
                    " tabs"
                )
            for row_number, fields in enumerate(filled, start=1):
                yield row_number, _row_or_refusal(row_of, fields)
        except UnicodeDecodeError as problem:  # in the header
            raise UserError(_refusal(problem)) from None
        except csv.Error as problem:
            wrong = f"line {lines.line_num} is not CSV ({problem})"
            raise UserError(
                f"{wrong}; text with a quote needs it twice, inside double quotes"
            ) from None
