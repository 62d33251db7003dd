"""Parts of data sets: a file, a table, a split on the hub. All are read in batches of rows, from any place on."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset, IterableDataset
from datasets.table import InMemoryTable

from dschat_ppo.data.bad_lines import BadLines
from dschat_ppo.data.cache import file_key
from dschat_ppo.data.file_formats import BATCH_ROWS, Batch, Row, is_json_lines, json_lines, opened, other_batches
from dschat_ppo.data.sources import COMPRESSED, SUFFIXES
from dschat_ppo.errors import UserError, reading

SUPPORTED = f"{', '.join(SUFFIXES)} (also with {' or '.join(COMPRESSED)})"
Kind = Literal["json", "csv", "tsv", "parquet", "arrow", "text"]
_KINDS: dict[str, Kind] = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
    ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
_LFS = b"version https://git-lfs.github.com/"


class Part(Protocol):
    """A file, or a split of a table. `name`: in messages, with its flag. `key`: identifies the rows on this machine."""

    @property
    def name(self) -> str: ...
    @property
    def flag(self) -> str: ...
    @property
    def key(self) -> str: ...

    def batches(self, bad: BadLines, place: Any) -> Iterator[Batch]:
        """The rows from `place` on, None for the start. `bad` receives lines that cannot be read. Errors do not name
        the part."""


def read_part(part: Part, bad: BadLines, place: Any = None) -> Iterator[Batch]:
    """The rows of a part from `place` on. An error is a `UserError` that names the part and its flag."""
    batches: Iterator[Batch] | None = None
    while True:
        try:
            with reading("cannot be read"):
                batches = batches or part.batches(bad, place)
                batch = next(batches, None)
        except UserError as problem:
            raise UserError(f"{part.flag} {part.name}: {problem}") from problem.__cause__
        if batch is None:
            return
        yield batch


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

    def batches(self, bad: BadLines, place: Any) -> Iterator[Batch]:
        rows = self.rows.with_format("arrow")
        for start in range(place or 0, len(rows), BATCH_ROWS):
            found = _rows_of_table(rows[start : start + BATCH_ROWS])
            yield Batch(range(start + 1, start + len(found) + 1), found, start + len(found))


@dataclass(frozen=True)
class HubPart:
    """A split on the hub, read row by row. `key` holds its revision."""

    name: str
    flag: str
    rows: IterableDataset
    key: str

    def batches(self, bad: BadLines, place: Any) -> Iterator[Batch]:
        number = 0
        if place is not None:  # files before it are not read
            self.rows.load_state_dict(place["state"])
            number = place["number"]
        for columns in self.rows.iter(batch_size=BATCH_ROWS):
            rows = _rows_of_columns(json.loads(json.dumps(columns, default=_as_json)))
            first, number = number + 1, number + len(rows)
            yield Batch(range(first, number + 1), rows, {"state": self.rows.state_dict(), "number": number})


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
    def kind(self) -> Kind | None:
        return kind_of(self.path)

    def check(self) -> None:
        """Refuse what is no data file. Reads its first bytes alone."""
        what = f"{self.flag} {self.path}"
        if self.kind is None:
            raise UserError(f"{what}: '{self.path.suffix}' files are not supported; use one of {SUPPORTED}")
        if not self.path.is_file():
            raise UserError(f"{what}: is not a regular file")
        if self.path.stat().st_size == 0:
            raise UserError(f"{what}: the file is empty")
        with reading(f"{what}: cannot be read"), self.path.open("rb") as file:
            if file.read(len(_LFS)) == _LFS:
                raise UserError(f"{what}: is a Git LFS pointer, not the data; run `git lfs pull` in its repository")

    def batches(self, bad: BadLines, place: Any) -> Iterator[Batch]:
        """JSON Lines and Parquet are opened at `place`; other files are read from their start."""
        try:
            if self.kind == "json" and (isinstance(place, list) or is_json_lines(self.path)):
                yield from json_lines(self.path, bad, place or [0, 0])
            elif self.kind == "parquet":
                yield from _table_batches(*_parquet_tables(self.path, place or 0), place or 0)
            elif self.kind == "arrow":
                yield from _table_batches(_arrow_tables(self.path), 0, place or 0)
            else:
                yield from other_batches(self.path, self.kind, bad, place or 0)
        except (EOFError, zlib.error, OSError) as problem:
            if self.path.suffix.lower() not in COMPRESSED or getattr(problem, "errno", None) is not None:
                raise
            if isinstance(problem, EOFError) or "Truncated" in str(problem):
                raise UserError("the compressed file is truncated; copy or download it again") from None
            raise UserError(f"the compressed file is damaged ({problem}); copy or download it again") from None


def kind_of(path: Path) -> Kind | None:
    """How a file is read, by its name; None if it is not a data file."""
    name = path.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return _KINDS.get(Path(name).suffix)


def _table_batches(tables: Iterator[pa.Table], before: int, after: int) -> Iterator[Batch]:
    """Batches of the rows behind row `after`; `before` rows of the file come before the tables."""
    for table in tables:
        first, before = before + 1, before + len(table)
        if before > after:
            part = table.slice(max(0, after - first + 1))
            yield Batch(range(before - len(part) + 1, before + 1), _rows_of_table(part), before)


def _parquet_tables(path: Path, after: int) -> tuple[Iterator[pa.Table], int]:
    """(tables of the row groups from that of row `after + 1` on, number of the rows before them)."""
    file = pa.parquet.ParquetFile(_source(path), memory_map=True)
    group = before = 0
    while group < file.num_row_groups and before + file.metadata.row_group(group).num_rows <= after:
        before += file.metadata.row_group(group).num_rows
        group += 1
    groups = list(range(group, file.num_row_groups))
    batches = file.iter_batches(BATCH_ROWS, row_groups=groups, use_threads=False)
    return (pa.Table.from_batches([batch]) for batch in batches), before


def _arrow_tables(path: Path) -> Iterator[pa.Table]:
    source = _source(path)
    with pa.memory_map(source) if isinstance(source, str) else source as content:
        try:
            stream: Any = pa.ipc.open_stream(content)
        except pa.ArrowInvalid:
            content.seek(0)
            file = pa.ipc.open_file(content)
            stream = map(file.get_batch, range(file.num_record_batches))
        for batch in stream:
            table = pa.Table.from_batches([batch])
            yield from (table.slice(start, BATCH_ROWS) for start in range(0, len(table), BATCH_ROWS))


def _source(path: Path) -> str | pa.BufferReader:
    """A file for pyarrow; a compressed one is read whole."""
    if path.suffix.lower() not in COMPRESSED:
        return str(path)
    with opened(path) as file:
        return pa.BufferReader(file.read())


def _rows_of_table(table: pa.Table) -> list[Row]:
    """The rows of an Arrow table in values of JSON: dates and decimals as text, of bytes only their number."""
    table.validate(full=True)  # the only check that its text is UTF-8
    for place, part in enumerate(table.schema):
        if pa.types.is_dictionary(part.type):  # as pandas writes categories
            table = table.set_column(place, part.name, table.column(place).cast(part.type.value_type))
    columns = Dataset(InMemoryTable(table.replace_schema_metadata(None)))[:]
    for part in table.schema:
        kind = part.type
        if not (pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            columns[part.name] = json.loads(json.dumps(columns[part.name], default=_as_json))
    return _rows_of_columns(columns)


def _as_json(value: Any) -> Any:
    return {"bytes": len(value)} if isinstance(value, bytes) else str(value)


def _rows_of_columns(columns: dict[str, list[Any]]) -> list[Row]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
