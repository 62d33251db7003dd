"""Raw rows of data sets, read once and then memory-mapped from the cache: JSON text in one column of a table, parsed
when it is used, so that its values are those of the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset

from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.data.cache import NOTES_FILE, cached_dataset, notes_of, rows_key
from dschat_ppo.data.locate import OpenSet, open_set
from dschat_ppo.data.parts import Batch, FilePart, Row, read_part
from dschat_ppo.data.sources import DataSource, is_hub_name
from dschat_ppo.errors import UserError, reading
from dschat_ppo.runtime.stop_requests import raise_if_stop_requested

ROW, ORIGIN = "_row", "_origin"
_PART_SHIFT = 40  # bits of the number of a row in `ORIGIN`; those above are the number of its part
_SCHEMA = pa.schema({ROW: pa.string(), ORIGIN: pa.int64()})
_GROUPED_ROWS = 1000  # written at a time


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


@dataclass(frozen=True)
class Splits:
    """The rows of one data set, for training and for evaluation (or None), and the lines of its files that are skipped
    because they cannot be read."""

    train: Rows
    eval: Rows | None
    origins: Origins
    skipped: Skipped = Skipped()


def load_splits(source: DataSource, cache_dir: str | None, bad_rows: str = "error", whole: bool = False) -> Splits:
    """Read a data set.

    Args:
        source: a file, a folder or a hub name.
        cache_dir: folder of the cache; None for that of `datasets`.
        bad_rows: `--bad_rows`; unless "error", lines of files that cannot be read are in `Splits.skipped`.
        whole: read as `train`, for evaluation, the split that `source` names or else all, whatever they are named; a
            hub data set with several must name one.
    """
    found = open_set(source, cache_dir)
    names = list(found.splits)
    if whole and source.split is None:
        if is_hub_name(source.location) and len(names) > 1:
            example = found.example(names[-1])
            raise UserError(f"{found.what}: has the splits {', '.join(names)}; choose one, as in {example}")
        if len(names) > 1:
            logger().info(f"data: {source.spec}: all its splits are used for evaluation: {', '.join(names)}")
        return splits_named(found, names, cache_dir, bad_rows)
    cuts, for_eval = (found.cuts(str(source.split)), []) if whole else found.chosen()
    pieces = [splits_named(found, [name], cache_dir, bad_rows, cut) for name, cut in cuts]
    if for_eval:
        files = ", ".join(part.path.name for _, part in found.numbered(for_eval) if isinstance(part, FilePart))
        if files:  # they make them so
            logger().info(f"data: {source.spec}: files for evaluation: {shorten(files, 300)}")
        pieces.append(splits_named(found, for_eval, cache_dir, bad_rows))
    train = joined_rows([piece.train for piece in pieces[: len(cuts)]])
    skipped = sum((piece.skipped for piece in pieces), Skipped())
    return Splits(train, pieces[-1].train if for_eval else None, pieces[0].origins, skipped)


def splits_named(found: OpenSet, names: Sequence[str], cache_dir: str | None, bad_rows: str, cut: str = "") -> Splits:
    """The rows of splits, in the order of their parts, as `train`; of one split perhaps a slice such as
    "train[:10%]"."""
    tables, skipped, columns = [], Skipped(), dict[str, tuple[str, tuple[str, ...]]]()
    for number, part in found.numbered(names):
        skip = bad_rows != "error"
        batches = (
            replace(batch, numbers=[number << _PART_SHIFT | at for at in batch.numbers])
            for batch in read_part(part, skip)
        )
        rows, notes = _stored(cache_dir, rows_key(part.key, number, skip), batches, f"{part.flag} {part.name}")
        tables.append(rows)
        skipped += Skipped(notes["skipped"], notes["first"] and f"{part.name}, {notes['first']}")
        if isinstance(part, FilePart):
            columns[str(part.kind)] = part.path.name, rows.columns
    if len({frozenset(each) for _, each in columns.values()}) > 1:  # one of them is not the data
        shown = "; ".join(f"{name} has {', '.join(each)}" for name, each in columns.values())
        raise UserError(f"{found.what}: holds files of different kinds and columns ({shown}); name one of the files")
    rows = joined_rows(tables)
    if cut:
        with reading(f"{found.what}: the split '{cut}'"):
            word = cut.partition("[")[0].strip()
            (place,) = datasets.ReadInstruction.from_spec(cut).to_absolute({word: len(rows)})
        if place.from_ >= place.to:
            raise UserError(f"{found.what}: the split '{cut}' has no rows")
        rows = rows.select(range(place.from_, place.to))
    return Splits(rows, None, Origins(tuple(part.name for part in found.parts)), skipped)


def regrouped(
    rows: Rows, identity: str, regroup: Callable[[Rows], Iterator[tuple[Row, int]]] | None, root: str | None
) -> Rows:
    """The rows and their origins that `regroup(rows)` gives, at least one, from the cache; the rows if it is None.
    `identity` differs between functions that give others."""
    if regroup is None:
        return rows
    key = rows_key(rows.table._fingerprint, identity, rows.columns)
    pairs = regroup(rows)
    parts = iter(lambda: list(islice(pairs, _GROUPED_ROWS)), [])
    batches = (Batch([origin for _, origin in part], [row for row, _ in part], None) for part in parts)
    return _stored(root, key, batches, identity)[0]


def _stored(root: str | None, key: str, batches: Iterator[Batch], what: str) -> tuple[Rows, dict[str, Any]]:
    """(rows from the cache below `root`, notes on lines that could not be read). What is not there yet is read from
    `batches`, whose `numbers` are origins, and written. `what` is for an error if there is none."""

    def make(folder: Path) -> Dataset:
        columns: Row = {}
        path, count, bad, first = folder / "rows.arrow", 0, 0, ""
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
            for batch in batches:
                raise_if_stop_requested("prepared the data")
                texts = [json.dumps(row, ensure_ascii=False) for row in batch.rows]
                for row in batch.rows:
                    columns.update(dict.fromkeys(row))
                writer.write_table(pa.table([texts, list(batch.numbers)], schema=_SCHEMA))
                count, bad, first = count + len(texts), bad + batch.unreadable, first or batch.problem
        if not count:
            reason = f"every row is bad; the first: {first}" if bad else "the data set is empty"
            raise UserError(f"{what}: {reason}")
        notes = {"columns": list(columns), "skipped": bad, "first": first}
        (folder / NOTES_FILE).write_text(json.dumps(notes), encoding="utf-8")
        return Dataset.from_file(str(path))

    table = cached_dataset(root, key, make)
    notes = notes_of(table)
    return Rows(table, tuple(notes["columns"])), notes


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of several parts, one part after another, with the columns of all."""
    columns = dict.fromkeys(name for part in parts for name in part.columns)
    return Rows(datasets.concatenate_datasets([part.table for part in parts]), tuple(columns))
