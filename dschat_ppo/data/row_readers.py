"""Read one data file of any kind, batch by batch, and write it as one Arrow file with the number of each row."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet
from datasets import Features, Value
from datasets.table import table_cast

from dschat_ppo.data.bad_lines import BATCH_BYTES, NOT_UTF8, BadLines, around_bad_byte
from dschat_ppo.data.json_rows import JsonColumns, json_batches
from dschat_ppo.errors import UserError

ORIGIN = "_origin"  # column with the number of the file and of the row, see `splits.Origins`
FILE_SHIFT = 40  # bits of the row's number
_SKIPPED = b"dschat_ppo_skipped"  # in the metadata of the Arrow file
_BATCH_ROWS = 2000
EMPTY = "the data set is empty"
_SEPARATORS = {",": "commas", "\t": "tabs", ";": "';'", "|": "'|'"}
_FIRST_RECORDS = 20  # that show which separator a file uses

Kind = Literal["json", "csv", "tsv", "parquet", "arrow", "text"]
KINDS: dict[str, Kind] = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
    ".arrow": "arrow", ".txt": "text",
}  # fmt: skip


@dataclass(frozen=True)
class Skipped:
    """Lines that were left out: how many, and the place, cause and first characters of the first one."""

    count: int = 0
    first: str = ""


@contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """For a block that writes converted data: an error, such as a full disk, becomes a `UserError` without the data's
    name."""
    try:
        yield
    except OSError as problem:
        if problem.errno is None:  # not of the system
            raise
        raise UserError(
            f"cannot be converted in {folder}: {problem.strerror}; free disk space there, or name another folder with "
            "--data_output_path"
        ) from None


def unpack(path: Path, target: Path) -> None:
    """Decompress a `.gz` or `.zst` file, block by block; only the disk limits its size. Errors do not name the file."""
    try:
        with target.open("wb") as out:
            if path.suffix.lower() == ".gz":
                with gzip.open(path) as packed:
                    while block := packed.read(BATCH_BYTES):
                        out.write(block)
            else:
                with pa.input_stream(str(path), compression="zstd") as packed:
                    while block := packed.read(BATCH_BYTES):
                        out.write(block)
    except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as problem:
        if isinstance(problem, EOFError) or "Truncated" in str(problem):
            raise UserError("the compressed file is truncated; copy or download it again") from None
        if isinstance(problem, OSError) and problem.errno is not None:  # a full disk, not a damaged file
            raise
        raise UserError(f"the compressed file is damaged ({problem}); copy or download it again") from None


def write_table(kind: Kind, path: Path, target: Path, file_number: int, skip: bool, as_json: frozenset[str]) -> None:
    """Convert a file to an Arrow stream with the column `ORIGIN` (int64): `file_number << FILE_SHIFT | row`.

    Rows count from 1: lines of JSON Lines and text, data rows of other kinds; skipped rows count. Errors do not name
    the file.

    Args:
        path: the file, not compressed.
        file_number: number of the file within its data set.
        skip: leave out lines that cannot be read, see `read_skipped`; otherwise they are an error.
        as_json: columns of a JSON file to store as JSON text.
    """
    known = JsonColumns(as_json=set(as_json))
    bad = BadLines(skip)
    if not _write(kind, path, target, file_number, bad, known, Skipped()):
        again = BadLines(skip)
        _write(kind, path, target, file_number, again, known, Skipped(bad.count, bad.first))


def read_skipped(target: Path) -> Skipped:
    """The lines that `write_table` left out of an Arrow file."""
    with pa.memory_map(str(target)) as source:
        metadata = pa.ipc.open_stream(source).schema.metadata or {}
    return Skipped(*json.loads(metadata.get(_SKIPPED, b"[]")))


def _write(
    kind: Kind, path: Path, target: Path, file_number: int, bad: BadLines, known: JsonColumns, skipped: Skipped
) -> bool:
    """Write the Arrow file; False if it must be written once more: what it says about the file was not known at its
    start (types of JSON columns, skipped lines). The whole file is read even then."""
    schema, writer, is_complete, total = None, None, True, 0
    with pa.OSFile(str(target), "wb") as sink:
        for numbers, table, features in read_tables(kind, path, bad, known):
            if ORIGIN in table.column_names:
                raise UserError(f"the column name '{ORIGIN}' is reserved; rename the column")
            total += len(numbers)
            features = Features({**features, ORIGIN: Value("int64")})
            if schema is None and kind == "json":
                schema = Features({**known.features(), ORIGIN: Value("int64")}).arrow_schema
            elif schema is None:
                schema = features.arrow_schema
            if is_complete and kind == "json" and not schema.equals(features.arrow_schema):
                is_complete = False
            if not is_complete:
                continue
            if writer is None:
                metadata = {**(schema.metadata or {}), _SKIPPED: json.dumps([skipped.count, skipped.first]).encode()}
                schema = schema.with_metadata(metadata)
                writer = pa.ipc.new_stream(sink, schema)
            origins = pa.array(numbers, pa.int64())
            if file_number:
                origins = pa.compute.bit_wise_or(origins, pa.scalar(file_number << FILE_SHIFT, pa.int64()))
            table = table.append_column(ORIGIN, origins)
            table = table.select(schema.names) if set(table.column_names) == set(schema.names) else table
            if table.schema.types != schema.types:
                table = table_cast(table, schema)
            writer.write_table(table.replace_schema_metadata(schema.metadata))
        if writer is not None:
            writer.close()
    if total == 0:
        raise UserError(f"every row is bad; the first: {bad.first}" if bad.count else EMPTY)
    return is_complete and bad.count == skipped.count


def read_tables(
    kind: Kind, path: Path, bad: BadLines, known: JsonColumns, after: int = 0
) -> Iterator[tuple[Sequence[int], pa.Table, Features]]:
    """(numbers of the rows, the rows, their features) of one batch after the other. Rows up to the number `after` may
    be left out, where the file can be opened behind them (Parquet)."""
    if kind == "json":
        for batch in json_batches(path, bad):
            numbers, arrays = known.add(batch, bad)
            yield numbers, pa.table(arrays), known.features()
    elif kind in ("csv", "tsv"):
        yield from _separated(path, "," if kind == "csv" else "\t", bad)
    elif kind == "text":
        yield from _text_lines(path, bad)
    else:
        group, first = _row_group(path, after) if kind == "parquet" else (0, 1)
        for table in _parquet_tables(path, group) if kind == "parquet" else _arrow_tables(path):
            table.validate(full=True)  # the only check that its text is UTF-8
            table = _without_dictionaries(table)
            yield range(first, first + len(table)), table, Features.from_arrow_schema(table.schema)
            first += len(table)


def _row_group(path: Path, after: int) -> tuple[int, int]:
    """The row group of a Parquet file that holds row number `after + 1`, and the number of its first row."""
    before = 0
    with pa.parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if before + rows > after:
                return group, before + 1
            before += rows
        return file.num_row_groups, before + 1


def _parquet_tables(path: Path, first_group: int) -> Iterator[pa.Table]:
    with pa.parquet.ParquetFile(path, memory_map=True) as file:
        groups = list(range(first_group, file.num_row_groups))
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, use_threads=False):
            yield pa.Table.from_batches([batch])


def _arrow_tables(path: Path) -> Iterator[pa.Table]:
    with pa.memory_map(str(path)) as source:
        try:
            stream: Any = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            source.seek(0)
            file = pa.ipc.open_file(source)
            stream = map(file.get_batch, range(file.num_record_batches))
        for batch in stream:
            if len(batch):
                yield pa.Table.from_batches([batch])


def _without_dictionaries(table: pa.Table) -> pa.Table:
    """Columns that number their values, as pandas writes categories, become those values."""
    for place, part in enumerate(table.schema):
        if pa.types.is_dictionary(part.type):
            table = table.set_column(place, part.name, table.column(place).cast(part.type.value_type))
    return table


def _separated(path: Path, delimiter: str, bad: BadLines) -> Iterator[tuple[list[int], pa.Table, Features]]:
    """Rows of a CSV or TSV file. Every value is text: an answer may be "4", "N/A" or empty."""
    csv.field_size_limit(sys.maxsize)
    _require_separator(path, delimiter)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next((fields for fields in lines if fields), [])
        except csv.Error as problem:
            raise UserError(f"the header is not CSV ({problem})") from None
        if _escapes(header):
            content = ",".join(header).encode(errors="surrogateescape")
            raise UserError(f"the header {NOT_UTF8}: {around_bad_byte(content)!r}")
        names = _unique_names(header)
        features = Features(dict.fromkeys(names, Value("string")))
        numbers, columns, number = [], [], 0
        while True:
            first_line = lines.line_num + 1
            try:
                fields = next(lines)
            except StopIteration:
                break
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
                cause = (
                    f"has {len(fields)} fields, the header has {len(names)}; put text that contains the separator in "
                    "double quotes"
                )
                bad.add(f"row {number}", cause, delimiter.join(fields), lines.line_num - first_line + 1)
                continue
            if not "".join(fields).isascii() and _escapes(fields):
                bad.add_bytes(f"row {number}", delimiter.join(fields).encode(errors="surrogateescape"))
                continue
            numbers.append(number)
            columns.append(fields)
            if len(numbers) == _BATCH_ROWS:
                yield numbers, _text_table(names, columns), features
                numbers, columns = [], []
        if numbers:
            yield numbers, _text_table(names, columns), features


def _text_table(names: list[str], rows: list[list[str]]) -> pa.Table:
    return pa.table([pa.array(values, pa.string()) for values in zip(*rows, strict=True)], names)


def _unique_names(header: list[str]) -> list[str]:
    """Column names as pandas gives them: `Unnamed: 0` for an empty one, `a.1` for the second `a`."""
    names: list[str] = []
    for place, name in enumerate(header):
        candidates = chain([name or f"Unnamed: {place}"], (f"{name}.{number}" for number in count(1)))
        names.append(next(word for word in candidates if word not in names))
    return names


def _escapes(fields: list[str]) -> bool:
    try:
        "".join(fields).encode()
    except UnicodeEncodeError:
        return True
    return False


def _require_separator(path: Path, delimiter: str) -> None:
    """Refuse a file of one column that has several columns, and rows of as many fields, by another separator."""
    if len(next(_first_records(path, delimiter), [])) > 1:
        return
    for other in (mark for mark in _SEPARATORS if mark != delimiter):
        header, *rows = chain(_first_records(path, other), [[]])
        if len(header) > 1 and any(len(fields) == len(header) for fields in rows):
            wanted, found = _SEPARATORS[delimiter], _SEPARATORS[other]
            renamed = {",": "rename it to NAME.csv", "\t": "rename it to NAME.tsv"}.get(other, "convert it")
            raise UserError(f"fields are separated by {wanted}; this file seems to use {found}; {renamed}")


def _first_records(path: Path, delimiter: str) -> Iterator[list[str]]:
    """The first records that are not blank, up to one that is not CSV."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        try:
            yield from islice(filter(None, csv.reader(file, delimiter=delimiter, strict=True)), _FIRST_RECORDS)
        except csv.Error:
            return


def _text_lines(path: Path, bad: BadLines) -> Iterator[tuple[list[int], pa.Table, Features]]:
    """One row with the column `text` for each line that is not blank."""
    features, number = Features({"text": Value("string")}), 0
    with path.open("rb") as file:
        while lines := file.readlines(BATCH_BYTES):
            numbers, texts = [], []
            for line in lines:
                number += 1
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                try:
                    text = line.decode().rstrip("\r\n")
                except UnicodeDecodeError:
                    bad.add_bytes(f"line {number}", line.strip())
                    continue
                if text.strip():
                    numbers.append(number)
                    texts.append(text)
            yield numbers, pa.table({"text": pa.array(texts, pa.string())}), features
