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
from dschat_ppo.data.shards import KeepBytes, Raw, Shard, number_of_bytes, read_shard
from dschat_ppo.data.sources import Group, OpenSet
from dschat_ppo.errors import UserError, reading

ROW = "_row"
ORIGIN = "_origin"
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

    def select(self, indices: Sequence[int]) -> RawRows:
        """The rows with these indices."""
        return RawRows(self.table.select(indices), self.columns)


def read_splits(
    opened: OpenSet,
    groups: Sequence[Group],
    cache_dir: str | None,
    keep: KeepBytes = number_of_bytes,
) -> RawRows:
    """The rows of groups of splits, one group after another.

    Args:
        opened: the data set that has the splits.
        groups: each gives the rows of its splits in the order of the shards, or the slice of these
            rows that it asks for.
        cache_dir: folder of the cache; None: that of `datasets`.
        keep: what stands for the bytes of tables.

    Raises:
        UserError: a slice cannot be read, or has no rows.
    """
    tables = list[Dataset]()
    columns = dict[str, None]()
    for names, slice_spec in groups:
        shard_tables = list[Dataset]()
        for shard in opened.shards(names):
            rows = _stored(shard, cache_dir, keep)
            shard_tables.append(rows.table)
            columns |= dict.fromkeys(rows.columns)
        table = datasets.concatenate_datasets(shard_tables)
        if slice_spec:  # such as "train[:10%]"; its group is this one split
            with reading(f"{opened.what}: the split '{slice_spec}'"):
                instruction = datasets.ReadInstruction.from_spec(slice_spec)
                [row_range] = instruction.to_absolute({names[0]: len(table)})
            if row_range.from_ >= row_range.to:
                raise UserError(f"{opened.what}: the split '{slice_spec}' has no rows")
            table = table.select(range(row_range.from_, row_range.to))
        tables.append(table)
    return RawRows(datasets.concatenate_datasets(tables), tuple(columns))


def _stored(shard: Shard, cache_dir: str | None, keep: KeepBytes) -> RawRows:
    """The rows of a shard from the cache below `cache_dir`; they are read and written if they are
    not there yet."""

    def write(folder: Path) -> None:
        """Write the rows and their columns. `UserError` if no row is an object."""
        columns = dict[str, None]()
        first_row = ""
        path = str(folder / "rows_00000.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
            for batch in read_shard(shard, keep=keep):
                raise_if_stop_requested("prepared the data")
                for row in batch.rows:
                    if isinstance(row, dict):
                        columns.update(dict.fromkeys(row))
                texts = [json.dumps(row, ensure_ascii=False) for row in batch.rows]
                writer.write_table(pa.table([texts, batch.origins], schema=_SCHEMA))
                first_row = first_row or f"{batch.origins[0]} {batch.rows[0]}"
        if not columns:
            problem = "the data set is empty"
            if first_row:
                problem = f"every row is bad; the first: {first_row}"
            raise UserError(f"{shard.flag} {shard.name}: {problem}")
        (folder / _COLUMNS).write_text(json.dumps(list(columns)), encoding="utf-8")

    made_from = [shard.key, shard.name]
    if keep is not number_of_bytes:
        made_from.append("bytes are kept")
    table = cached(cache_dir, rows_key(*made_from), write)
    file_of_columns = Path(table.cache_files[0]["filename"]).with_name(_COLUMNS)
    return RawRows(table, tuple(json.loads(file_of_columns.read_bytes())))
