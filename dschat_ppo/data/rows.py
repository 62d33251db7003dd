"""Raw rows of data sets: each is JSON text in one column of a table and is parsed when it is used, so its values are
those of the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import datasets
import pyarrow as pa
from datasets import Dataset

from dschat_ppo.common.paths import shown_path
from dschat_ppo.data.bad_lines import BadLines
from dschat_ppo.data.cache import NOTES_FILE, cached_dataset, notes_of, rows_key
from dschat_ppo.data.parts import Part, Row, read_part
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.stop_requests import raise_if_stop_requested

ROW, ORIGIN = "_row", "_origin"
_PART_SHIFT = 40  # bits of the number of a row in `ORIGIN`; those above are the number of its part
_SCHEMA = pa.schema({ROW: pa.string(), ORIGIN: pa.int64()})
_WRITTEN_ROWS = 1000  # at a time


@dataclass(frozen=True)
class Rows:
    """Rows of a data set. `rows[i]` has all `columns`; those that the file does not give it are None.

    Attributes:
        table: the text `ROW` of each row, and the int64 `ORIGIN`, which `Origins` describes.
        columns: all keys of the rows, in the order in which they appear.
    """

    table: Dataset
    columns: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Row:
        return parsed(self.table[index][ROW], self.columns)

    def __iter__(self) -> Iterator[Row]:
        return (parsed(each[ROW], self.columns) for each in self.table)

    def origin(self, index: int) -> int:
        """The value of a row in the column `ORIGIN`."""
        return int(self.table[index][ORIGIN])

    def select(self, numbers: Sequence[int]) -> Rows:
        """The rows with these numbers."""
        return Rows(self.table.select(numbers), self.columns)


def parsed(text: str, columns: Sequence[str]) -> Row:
    """The row of a value of the column `ROW`, with all columns of its data set."""
    return dict.fromkeys(columns) | json.loads(text)


@dataclass(frozen=True)
class Origins:
    """Names the rows of one data set for messages, by its files or its splits, in the order of their numbers. Small and
    picklable, for the processes of `Dataset.map`."""

    names: tuple[str, ...]

    def describe(self, origin: int) -> str:
        """The row with this value in the column `ORIGIN`, such as "data.jsonl, row 7"."""
        return f"{shown_path(self.names[origin >> _PART_SHIFT])}, row {origin & ((1 << _PART_SHIFT) - 1)}"


@dataclass(frozen=True)
class Skipped:
    """Lines that were left out: how many, and the place, cause and first characters of the first one."""

    count: int = 0
    first: str = ""

    def __add__(self, other: Skipped) -> Skipped:
        return Skipped(self.count + other.count, self.first or other.first)


def stored_rows(part: Part, number: int, skip: bool, root: str | None) -> tuple[Rows, Skipped]:
    """The rows of part `number` of a data set, from the cache below `root`. `skip` leaves out lines that cannot be
    read; otherwise they are an error."""

    def make(folder: Path) -> Dataset:
        bad = BadLines(skip)
        batches = read_part(part, bad)
        pairs = (
            (row, number << _PART_SHIFT | at)
            for batch in batches
            for at, row in zip(batch.numbers, batch.rows, strict=True)
        )
        rows = _written(folder, pairs, bad)
        if rows is None:
            reason = f"every row is bad; the first: {bad.first}" if bad.count else "the data set is empty"
            raise UserError(f"{part.flag} {part.name}: {reason}")
        return rows

    table = cached_dataset(root, rows_key(part.key, number, skip), make)
    notes = notes_of(table)
    skipped = Skipped(notes["skipped"], notes["first"] and f"{part.name}, {notes['first']}")
    return Rows(table, tuple(notes["columns"])), skipped


def regrouped(
    rows: Rows, identity: str, regroup: Callable[[Rows], Iterator[tuple[Row, int]]], root: str | None
) -> Rows:
    """The rows and their origins that `regroup(rows)` gives, at least one, from the cache. `identity` differs between
    functions that give others."""

    def make(folder: Path) -> Dataset:
        made = _written(folder, regroup(rows), BadLines(False))
        assert made is not None
        return made

    table = cached_dataset(root, rows_key(rows.table._fingerprint, identity, rows.columns), make)
    return Rows(table, tuple(notes_of(table)["columns"]))


def _written(folder: Path, pairs: Iterator[tuple[Row, int]], bad: BadLines) -> Dataset | None:
    """Write rows and their origins into a new entry of the cache; None if there are none."""
    columns: Row = {}
    path, count = folder / "rows.arrow", 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
        while part := list(islice(pairs, _WRITTEN_ROWS)):
            raise_if_stop_requested("prepared the data")
            texts = [json.dumps(row, ensure_ascii=False) for row, _ in part]
            for row, _ in part:
                columns.update(dict.fromkeys(row))
            writer.write_table(pa.table([texts, [origin for _, origin in part]], schema=_SCHEMA))
            count += len(part)
    notes = {"columns": list(columns), "skipped": bad.count, "first": bad.first}
    (folder / NOTES_FILE).write_text(json.dumps(notes), encoding="utf-8")
    return Dataset.from_file(str(path)) if count else None


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of several parts, one part after another, with the columns of all."""
    columns = dict.fromkeys(name for part in parts for name in part.columns)
    return Rows(datasets.concatenate_datasets([part.table for part in parts]), tuple(columns))
