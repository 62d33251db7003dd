"""Raw rows of data sets, read once and then memory-mapped from the cache: JSON text in one column of a table, parsed
when it is used, so that its values are those of the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import datasets
import pyarrow as pa
from datasets import Dataset

from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.data.cache import NOTES_FILE, cached_dataset, notes_of, rows_key
from dschat_ppo.data.parts import Batch, FilePart, Row, read_part
from dschat_ppo.data.sources import DataSource, OpenSet, is_hub_name, open_set
from dschat_ppo.errors import UserError, reading
from dschat_ppo.runtime.stop_requests import raise_if_stop_requested

ROW, ORIGIN = "_row", "_origin"
_SCHEMA = pa.schema({ROW: pa.string(), ORIGIN: pa.string()})


@dataclass(frozen=True)
class Rows:
    """Rows of a data set. `rows[i]` has all `columns`; those that the file does not give it are None.

    Attributes:
        table: the JSON text `ROW` and the `ORIGIN`, "FILE, row N", of each row.
        columns: all keys of the rows, in the order in which they appear.
        unreadable, problem: how many lines of the files were left out, and the place and cause of the first, or "".
    """

    table: Dataset
    columns: tuple[str, ...]
    unreadable: int = 0
    problem: str = ""

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Row:
        return parsed(self.table[index][ROW], self.columns)

    def __iter__(self) -> Iterator[Row]:
        return (parsed(each[ROW], self.columns) for each in self.table)

    def origin(self, index: int) -> str:
        """ "FILE, row N" of a row, for messages."""
        return shown_path(self.table[index][ORIGIN])

    def select(self, numbers: Sequence[int]) -> Rows:
        """The rows with these numbers."""
        return Rows(self.table.select(numbers), self.columns, self.unreadable, self.problem)


def parsed(text: str, columns: Sequence[str]) -> Row:
    """The row of a value of the column `ROW`, with all columns of its data set."""
    return dict.fromkeys(columns) | json.loads(text)


class Splits(NamedTuple):
    """The rows of one data set, for training and for evaluation (or None)."""

    train: Rows
    eval: Rows | None


def load_splits(source: DataSource, cache_dir: str | None, bad_rows: str = "error", whole: bool = False) -> Splits:
    """Read a data set.

    Args:
        source: a file, a folder or a hub name.
        cache_dir: folder of the cache; None for that of `datasets`.
        bad_rows: `--bad_rows`; unless "error", lines of files that cannot be read are left out and counted.
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
        return Splits(rows_of_splits(found, names, cache_dir, bad_rows), None)
    cuts, for_eval = (found.cuts(str(source.split)), []) if whole else found.chosen()
    train = joined_rows([rows_of_splits(found, [name], cache_dir, bad_rows, cut) for name, cut in cuts])
    if not for_eval:
        return Splits(train, None)
    files = ", ".join(part.path.name for part in found.parts(for_eval) if isinstance(part, FilePart))
    if files:  # they make them so
        logger().info(f"data: {source.spec}: files for evaluation: {shorten(files, 300)}")
    return Splits(train, rows_of_splits(found, for_eval, cache_dir, bad_rows))


def rows_of_splits(found: OpenSet, names: Sequence[str], cache_dir: str | None, bad_rows: str, cut: str = "") -> Rows:
    """The rows of splits, in the order of their parts; of one split perhaps a slice such as "train[:10%]"."""
    skip, tables, by_kind = bad_rows != "error", list[Rows](), dict[str, tuple[str, tuple[str, ...]]]()
    for part in found.parts(names):
        key = rows_key(part.key, part.name, skip)
        tables.append(_stored(cache_dir, key, read_part(part, skip), f"{part.flag} {part.name}"))
        if isinstance(part, FilePart):
            by_kind[str(part.kind)] = part.path.name, tables[-1].columns
    if len({frozenset(columns) for _, columns in by_kind.values()}) > 1:  # some are not the data, such as notes.txt
        shown = "; ".join(
            f"{kind}: {name} has {shorten(', '.join(columns), 200)}" for kind, (name, columns) in by_kind.items()
        )
        way = "name one of the files, or move the others away"
        raise UserError(f"{found.what}: holds files of different kinds with different columns ({shown}); {way}")
    rows = joined_rows(tables)
    if not cut:
        return rows
    with reading(f"{found.what}: the split '{cut}'"):
        word = cut.partition("[")[0].strip()
        (place,) = datasets.ReadInstruction.from_spec(cut).to_absolute({word: len(rows)})
    if place.from_ >= place.to:
        raise UserError(f"{found.what}: the split '{cut}' has no rows")
    return rows.select(range(place.from_, place.to))


def _stored(root: str | None, key: str, batches: Iterator[Batch], what: str) -> Rows:
    """Rows from the cache below `root`. What is not there yet is read from `batches` and written. `what` is for an
    error if there is none."""

    def make(folder: Path) -> Dataset:
        columns: Row = {}
        path, count, bad, problem = folder / "rows.arrow", 0, 0, ""
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
            for batch in batches:
                raise_if_stop_requested("prepared the data")
                texts = [json.dumps(row, ensure_ascii=False) for row in batch.rows]
                for row in batch.rows:
                    columns.update(dict.fromkeys(row))
                writer.write_table(pa.table([texts, batch.origins], schema=_SCHEMA))
                count, bad, problem = count + len(texts), bad + batch.unreadable, problem or batch.problem
        if not count:
            reason = f"every row is bad; the first: {problem}" if bad else "the data set is empty"
            raise UserError(f"{what}: {reason}")
        notes = json.dumps([list(columns), bad, problem])
        (folder / NOTES_FILE).write_text(notes, encoding="utf-8")
        return Dataset.from_file(str(path))

    table = cached_dataset(root, key, make)
    columns, bad, problem = notes_of(table)
    return Rows(table, tuple(columns), bad, problem)


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of several parts, one part after another, with the columns of all."""
    columns = dict.fromkeys(name for part in parts for name in part.columns)
    problems = [part.problem for part in parts if part.problem]
    table = datasets.concatenate_datasets([part.table for part in parts])
    return Rows(table, tuple(columns), sum(part.unreadable for part in parts), problems[0] if problems else "")
