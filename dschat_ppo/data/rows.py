"""Raw rows of data sets, read once and then memory-mapped from the cache: JSON text in one column of a table, parsed
when it is used, so that its values are those of the file. A text in place of an object is a `BadRow`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import datasets
import pyarrow as pa
from datasets import Dataset

from dschat_ppo.common.logging import logger
from dschat_ppo.common.stop_requests import raise_if_stop_requested
from dschat_ppo.data.cache import new_entry, rows_key, rows_of_entry
from dschat_ppo.data.parts import BadRow, FilePart, Part, Row, read_part
from dschat_ppo.data.sources import DataSource, OpenSet, is_hub_name, open_set
from dschat_ppo.errors import UserError, reading

ROW, ORIGIN = "_row", "_origin"
_COLUMNS = "columns.json"  # beside the rows in the cache
_SCHEMA = pa.schema({ROW: pa.string(), ORIGIN: pa.string()})


@dataclass(frozen=True)
class Rows:
    """Rows of a data set. `rows[i]` has all `columns`; those that the file does not give it are None."""

    table: Dataset  # the JSON text `ROW` and the `ORIGIN`, "FILE, row N", of each row
    columns: tuple[str, ...]  # all keys of the rows, in the order in which they appear

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Row | BadRow:
        return parsed(self.table[index][ROW], self.columns)

    def select(self, numbers: Sequence[int]) -> Rows:
        """The rows with these numbers."""
        return Rows(self.table.select(numbers), self.columns)


def parsed(text: str, columns: Sequence[str]) -> Row | BadRow:
    """The row of a value of the column `ROW`, with all columns of its data set."""
    value = json.loads(text)
    return BadRow(value) if isinstance(value, str) else dict.fromkeys(columns) | value


class Splits(NamedTuple):
    """The rows of one data set, for training and for evaluation (or None)."""

    train: Rows
    eval: Rows | None


def load_splits(source: DataSource, cache_dir: str | None, whole: bool = False) -> Splits:
    """Read a data set. `cache_dir` is the folder of the cache, None that of `datasets`.

    With `whole`, for evaluation, the split that `source` names or else all are read as those for training; a hub data
    set with several must name one.
    """
    found = open_set(source, cache_dir)
    names = list(found.splits)
    if not whole:
        cuts, for_eval = found.chosen()
    elif source.split is not None:
        cuts, for_eval = found.cuts(source.split), []
    elif is_hub_name(source.location) and len(names) > 1:
        example = found.example(names[-1])
        raise UserError(f"{found.what}: has the splits {', '.join(names)}; choose one, as in {example}")
    else:
        if len(names) > 1:
            logger().info(f"data: {source.spec}: all its splits are used for evaluation: {', '.join(names)}")
        return Splits(rows_of_splits(found, names, cache_dir), None)
    train = joined_rows([rows_of_splits(found, [name], cache_dir, cut) for name, cut in cuts])
    if not for_eval:
        return Splits(train, None)
    files = ", ".join(part.path.name for part in found.parts(for_eval) if isinstance(part, FilePart))
    if files:  # they make them so
        logger().info(f"data: {source.spec}: files for evaluation: {shorten(files, 300)}")
    return Splits(train, rows_of_splits(found, for_eval, cache_dir))


def rows_of_splits(found: OpenSet, names: Sequence[str], cache_dir: str | None, cut: str = "") -> Rows:
    """The rows of splits, in the order of their parts; of one split perhaps a slice such as "train[:10%]"."""
    parts = found.parts(names)
    tables = [_stored(part, cache_dir) for part in parts]
    kinds = {  # some are not the data, such as notes.txt
        str(part.kind): (part.path.name, table.columns)
        for part, table in zip(parts, tables, strict=True) if isinstance(part, FilePart)
    }  # fmt: skip
    if len({frozenset(columns) for _, columns in kinds.values()}) > 1:
        shown = "; ".join(f"{kind}: {name} has {shorten(', '.join(has), 200)}" for kind, (name, has) in kinds.items())
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


def _stored(part: Part, cache_dir: str | None) -> Rows:
    """The rows of a part from the cache below `cache_dir`; they are read and written if they are not there yet."""
    key, columns, first = rows_key(part.key, part.name), dict[str, None](), ""
    with new_entry(cache_dir, key) as folder:
        if folder is not None:
            path = str(folder / "rows_00000.arrow")
            with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
                for batch in read_part(part):
                    raise_if_stop_requested("prepared the data")
                    for row in batch.rows:
                        columns.update(dict.fromkeys(row if isinstance(row, dict) else ()))
                    texts = [json.dumps(row, ensure_ascii=False) for row in batch.rows]
                    writer.write_table(pa.table([texts, batch.origins], schema=_SCHEMA))
                    first = first or f"{batch.origins[0]} {batch.rows[0]}"
            if not columns:
                problem = f"every row is bad; the first: {first}" if first else "the data set is empty"
                raise UserError(f"{part.flag} {part.name}: {problem}")
            (folder / _COLUMNS).write_text(json.dumps(list(columns)), encoding="utf-8")
    table = rows_of_entry(cache_dir, key)
    return Rows(table, tuple(json.loads(Path(table.cache_files[0]["filename"]).with_name(_COLUMNS).read_bytes())))


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of several parts, one part after another, with the columns of all."""
    columns = dict.fromkeys(name for part in parts for name in part.columns)
    return Rows(datasets.concatenate_datasets([part.table for part in parts]), tuple(columns))
