"""Raw rows of data sets, read once and then memory-mapped from the cache: JSON text in one column
of a table, parsed when it is used, so that its values are those of the file. A text in place of an
object says what is wrong with a row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow as pa
from datasets import Dataset

from dschat_ppo.common.stop_requests import raise_if_stop_requested
from dschat_ppo.data.cache import cached, rows_key
from dschat_ppo.data.parts import Part, Raw, read_part
from dschat_ppo.data.sources import Group, OpenSet
from dschat_ppo.errors import UserError, reading

ROW, ORIGIN = "_row", "_origin"
_COLUMNS = "columns.json"  # next to the rows in the cache
_SCHEMA = pa.schema({ROW: pa.string(), ORIGIN: pa.string()})


@dataclass(frozen=True)
class RawRows:
    """Rows of a data set. `rows[i]` has all `columns`; those that the file does not give it are
    None."""

    table: Dataset  # the JSON text `ROW` and the `ORIGIN`, "FILE, row N", of each row
    columns: tuple[str, ...]  # all keys of the rows, in the order in which they appear

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Raw:
        value = json.loads(self.table[index][ROW])
        if isinstance(value, str):
            return value
        return dict.fromkeys(self.columns) | value

    def select(self, numbers: Sequence[int]) -> RawRows:
        """The rows with these numbers."""
        return RawRows(self.table.select(numbers), self.columns)


def read_splits(found: OpenSet, groups: Sequence[Group], cache_dir: str | None) -> RawRows:
    """The rows of groups of splits, one group after another; those of a group in the order of its
    parts. `cache_dir` is the folder of the cache, None that of `datasets`."""
    tables = list[Dataset]()
    columns = dict[str, None]()
    for names, cut in groups:
        stored = [_stored(part, cache_dir) for part in found.parts(names)]
        columns |= dict.fromkeys(name for rows in stored for name in rows.columns)
        table = datasets.concatenate_datasets([rows.table for rows in stored])
        if cut:
            with reading(f"{found.what}: the split '{cut}'"):
                (place,) = datasets.ReadInstruction.from_spec(cut).to_absolute(
                    {names[0]: len(table)}
                )
            if place.from_ >= place.to:
                raise UserError(f"{found.what}: the split '{cut}' has no rows")
            table = table.select(range(place.from_, place.to))
        tables.append(table)
    return RawRows(datasets.concatenate_datasets(tables), tuple(columns))


def _stored(part: Part, cache_dir: str | None) -> RawRows:
    """The rows of a part from the cache below `cache_dir`; they are read and written if they are
    not there yet."""

    def write(folder: Path) -> None:
        columns = dict[str, None]()
        first = ""
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
            if first:
                problem = f"every row is bad; the first: {first}"
            else:
                problem = "the data set is empty"
            raise UserError(f"{part.flag} {part.name}: {problem}")
        (folder / _COLUMNS).write_text(json.dumps(list(columns)), encoding="utf-8")

    table = cached(cache_dir, rows_key(part.key, part.name), write)
    return RawRows(
        table,
        tuple(json.loads(Path(table.cache_files[0]["filename"]).with_name(_COLUMNS).read_bytes())),
    )
