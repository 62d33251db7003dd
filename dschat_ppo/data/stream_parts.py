"""Parts of a stream: files, and splits on the hub, read batch by batch from any place. Rows equal those of the same
data set without `--streaming`: the readers of `row_readers` and `json_rows` read them."""

from __future__ import annotations

import bisect
import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetInfo, IterableDataset
from datasets.table import InMemoryTable

from dschat_ppo.common.paths import is_pipe_or_device
from dschat_ppo.data.bad_lines import BadLines
from dschat_ppo.data.deepspeed_chat_sets import hub_name
from dschat_ppo.data.files import SUPPORTED, kind_of
from dschat_ppo.data.folders import TRAIN, Files, find_split, is_eval, split_files
from dschat_ppo.data.hub import hub_stream
from dschat_ppo.data.json_rows import JsonColumns, is_json_lines, json_batches, line_batches
from dschat_ppo.data.raw_stream import PartBatch, Row, StreamPart
from dschat_ppo.data.row_readers import Kind, read_tables, unpack, written_to
from dschat_ppo.data.sources import COMPRESSED, DataSource, is_hub_name
from dschat_ppo.errors import UserError, reading

_BATCH_ROWS = 1000
_BATCH_BYTES = 2**19  # of JSON Lines
_ENDS = 2**16  # bytes at either end of a file that identify it, with its size


@dataclass(frozen=True)
class FilePart:
    """A data file. `skip` leaves out lines that cannot be read; `scratch` is a folder to unpack a compressed file."""

    path: Path
    flag: str
    skip: bool
    scratch: Path

    @property
    def name(self) -> str:
        """Its path, for messages."""
        return str(self.path)

    def batches(self, place: Any) -> Iterator[PartBatch]:
        """The rows from `place` on. JSON Lines and Parquet are opened there; other files are read from their start.
        Errors do not name the file."""
        kind = kind_of(self.path)
        if kind is None:
            raise UserError(f"'{self.path.suffix}' files are not supported; use one of {SUPPORTED}")
        if self.path.suffix.lower() not in COMPRESSED:
            yield from _batches(kind, self.path, place, BadLines(self.skip))
            return
        with tempfile.TemporaryFile(dir=self.scratch) as unpacked:  # without a name it cannot outlive the process
            path = Path(f"/dev/fd/{unpacked.fileno()}")
            with written_to(self.scratch):
                unpack(self.path, path)
            yield from _batches(kind, path, place, BadLines(self.skip))


@dataclass(frozen=True)
class HubPart:
    """A split of a data set on the hub."""

    name: str
    flag: str
    rows: IterableDataset

    def batches(self, place: Any) -> Iterator[PartBatch]:
        """The rows from `place` on. Files before it are not read."""
        number = 0
        if place is not None:
            self.rows.load_state_dict(place["state"])
            number = place["number"]
        for columns in self.rows.iter(batch_size=_BATCH_ROWS):
            rows = _rows_of(columns)
            numbers = range(number + 1, number + len(rows) + 1)
            number += len(rows)
            yield PartBatch(numbers, rows, {"state": self.rows.state_dict(), "number": number})


def _batches(kind: Kind, path: Path, place: Any, bad: BadLines) -> Iterator[PartBatch]:
    for numbers, rows, after in _json(path, place, bad) if kind == "json" else _tables(kind, path, place, bad):
        yield PartBatch(numbers, rows, after, bad.count, bad.first)
        _forget(bad)


def _forget(bad: BadLines) -> None:
    """Count from here on: the lines so far belong to batches that are used already."""
    bad.count, bad.first = 0, ""


def _json(path: Path, place: Any, bad: BadLines) -> Iterator[tuple[Any, list[Row], Any]]:
    known = JsonColumns()  # refuses values that do not fit those of the rows before
    place = place or {"bytes": 0, "row": 0, "kinds": {}, "columns": []}
    known.kinds.update(place["kinds"])
    known.types.update(dict.fromkeys(place["columns"], pa.null()))
    if is_json_lines(path):
        batches = line_batches(path, bad, (place["bytes"], place["row"]), _BATCH_BYTES)
    else:
        batches = ((numbers, rows, (0, numbers[-1])) for numbers, rows in json_batches(path, bad) if numbers)
    first = place["row"] + 1
    for numbers, rows, (offset, last) in batches:
        if last < first:
            _forget(bad)
            continue
        fitting = set(known.add((numbers, rows), bad)[0])
        kept = [(number, row) for number, row in zip(numbers, rows, strict=True) if number in fitting]
        filled = [{name: row.get(name) for name in known.types} for _, row in kept]
        after = {"bytes": offset, "row": last, "kinds": dict(known.kinds), "columns": list(known.types)}
        yield [number for number, _ in kept], filled, after


def _tables(kind: Kind, path: Path, place: Any, bad: BadLines) -> Iterator[tuple[Any, list[Row], Any]]:
    after = place["row"] if place else 0
    for numbers, table, features in read_tables(kind, path, bad, JsonColumns(), after):
        known = bisect.bisect_right(numbers, after)
        if known:  # its first rows came with the skipped lines
            _forget(bad)
        for start in range(known, len(numbers), _BATCH_ROWS):
            part = numbers[start : start + _BATCH_ROWS]
            rows = Dataset(InMemoryTable(table.slice(start, len(part))), info=DatasetInfo(features=features))
            yield part, _rows_of(rows[:]), {"row": part[-1]}  # `datasets` decodes them as it does without --streaming


def _rows_of(columns: Mapping[str, list[Any]]) -> list[Row]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@dataclass(frozen=True)
class StreamedSet:
    """One data set whose training rows are streamed.

    Attributes:
        train: its parts with training rows, in order.
        content: what identifies these rows, wherever they are stored.
        place: what identifies them on this machine, with their time of modification.
        evaluation: names of its splits with evaluation rows.
        hub_parts: of a hub data set, all its splits.
    """

    train: tuple[StreamPart, ...]
    content: str
    place: str
    evaluation: tuple[str, ...]
    hub_parts: Mapping[str, StreamPart] = field(default_factory=dict)


def open_set(source: DataSource, skip: bool, scratch: Path) -> StreamedSet:
    """Find the parts of a data set. Reads no row; refuses a number of rows or a part of a split, which need all
    rows."""
    what = f"{source.flag} {source.location}"
    if source.samples is not None:
        raise UserError(
            f"{source.flag} {source.spec}: @ROWS needs all rows, so it does not go with --streaming; use a "
            "weight, as in NAME:0.5"
        )
    if is_hub_name(source.location):
        return _hub_set(source, what)
    path = Path(source.location)
    if not path.exists():
        raise UserError(f"{what}: no such file or folder")
    files: Files = split_files(path, source.config, what) if path.is_dir() else {TRAIN: [path]}
    train, evaluation = _choose(list(files), source, what)
    parts = tuple(FilePart(file, source.flag, skip, scratch) for file in sorted(files[train]))
    content, place = hashlib.sha256(), hashlib.sha256()
    for part in parts:
        if is_pipe_or_device(part.path):
            raise UserError(f"{source.flag} {part.path}: is not a regular file")
        with reading(f"{source.flag} {part.path}: cannot be read"):
            found = part.path.stat()
            content.update(f"{part.path.name}\0{found.st_size}\0".encode())
            with part.path.open("rb") as file:
                content.update(file.read(_ENDS))
                file.seek(max(0, found.st_size - _ENDS))
                content.update(file.read(_ENDS))
            place.update(f"{part.path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    return StreamedSet(parts, content.hexdigest(), place.hexdigest(), evaluation)


def _hub_set(source: DataSource, what: str) -> StreamedSet:
    revision, splits = hub_stream(*hub_name(source.location, source.config), source.flag)
    train, evaluation = _choose(list(splits), source, what)
    name = source.location + (f":{source.config}" if source.config else "")
    identity = f"{name} {train} {revision}"
    parts = {split: HubPart(f"{name} ({split})", source.flag, rows) for split, rows in splits.items()}
    return StreamedSet((parts[train],), identity, identity, evaluation, parts)


def _choose(names: list[str], source: DataSource, what: str) -> tuple[str, tuple[str, ...]]:
    """The training split, and the splits for evaluation."""
    if source.split is None:
        chosen = [name for name in names if not is_eval(name)]
        train = TRAIN if TRAIN in chosen else chosen[0] if len(chosen) == 1 else None
        if train is None:
            raise UserError(
                f"{what}: has the splits {', '.join(names)}; choose one, as in {source.location}[{names[0]}]"
            )
    else:
        train = find_split(names, source.split)
        if train is None and ("[" in source.split or "+" in source.split):
            raise UserError(f"{what}: --streaming reads whole splits, not '{source.split}'")
        if train is None:
            raise UserError(f"{what}: has no split '{source.split}'; it has {', '.join(names)}")
    suffix = train.removeprefix(TRAIN) if train.startswith(TRAIN) else None
    return train, tuple(
        name for name in names if is_eval(name) and name != train and suffix is not None and name.endswith(suffix)
    )
