"""Data files to `datasets` tables: each is converted once, in a child process, and then read from the cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import datasets
from datasets import Dataset, Json

from dschat_ppo.common.logging import logger
from dschat_ppo.data.cache import cached_dataset, file_key
from dschat_ppo.data.conversion import conversion_error
from dschat_ppo.data.row_readers import KINDS, Kind, Skipped, read_skipped, unpack, write_table, written_to
from dschat_ppo.data.sources import COMPRESSED, SUFFIXES
from dschat_ppo.errors import UserError, in_one_line, reading

_FORMAT = "2"  # increase it when the same file gives other rows: older cache entries are then not used
_LFS = b"version https://git-lfs.github.com/"
SUPPORTED = f"{', '.join(SUFFIXES)} (also with {' or '.join(COMPRESSED)})"


def kind_of(path: Path) -> Kind | None:
    """How a file is read, by its name; None if it is not a data file."""
    name = path.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return KINDS.get(Path(name).suffix)


def read_files(
    paths: Sequence[Path], numbers: Sequence[int], what: str, cache_dir: str | None, skip: bool
) -> tuple[Dataset, Skipped]:
    """Read files as one table, in this order. The files must have the same columns.

    Args:
        numbers: of the files in `ORIGIN`.
        what: flag and data set, for messages.
        skip: leave out lines that cannot be read; otherwise they are an error.
    """
    flag = what.partition(" ")[0]
    tables = [_read_file(path, n, flag, cache_dir, skip) for n, path in zip(numbers, paths, strict=True)]
    mixed = frozenset(name for rows in tables for name in rows.features if _mixed(tables, name))
    if mixed:
        tables = [
            _read_file(path, n, flag, cache_dir, skip, mixed) if kind_of(path) == "json" else rows
            for n, path, rows in zip(numbers, paths, tables, strict=True)
        ]
    kinds = {kind_of(path): (path, rows) for path, rows in zip(paths, tables, strict=True)}
    if len({frozenset(rows.column_names) for _, rows in kinds.values()}) > 1:
        shown = "; ".join(f"{path.name} has {_columns(rows)}" for path, rows in kinds.values())
        raise UserError(f"{what}: holds files of different kinds and columns ({shown}); name one of the files")
    try:
        table = datasets.concatenate_datasets(tables)
    except ValueError as problem:
        raise UserError(f"{what}: its files differ in a column: {in_one_line(problem)}") from None
    skipped = [read_skipped(Path(rows.cache_files[0]["filename"])) for rows in tables]
    places = [f"{path}, {part.first}" for path, part in zip(paths, skipped, strict=True) if part.count]
    return table, Skipped(sum(part.count for part in skipped), places[0] if places else "")


def _mixed(tables: Sequence[Dataset], name: str) -> bool:
    """Whether files store a column in different ways although it may hold the same values: as JSON text in some, or as
    objects with different keys."""
    kinds = [rows.features[name] for rows in tables if name in rows.features]
    if all(kind == kinds[0] for kind in kinds):
        return False
    return any(isinstance(kind, Json) for kind in kinds) or all(not isinstance(kind, datasets.Value) for kind in kinds)


def _columns(rows: Dataset) -> str:
    return ", ".join(name for name in rows.column_names if not name.startswith("_"))


def _read_file(
    path: Path, number: int, flag: str, cache_dir: str | None, skip: bool, as_json: frozenset[str] = frozenset()
) -> Dataset:
    kind = kind_of(path)
    if kind is None:
        raise UserError(f"{flag} {path}: '{path.suffix}' files are not supported; use one of {SUPPORTED}")
    if not path.is_file():
        raise UserError(f"{flag} {path}: is not a regular file")
    if path.stat().st_size == 0:
        raise UserError(f"{flag} {path}: the file is empty")
    with reading(f"{flag} {path}: cannot be read"), path.open("rb") as file:
        start = file.read(len(_LFS))
    if start == _LFS:
        raise UserError(f"{flag} {path}: is a Git LFS pointer, not the data; run `git lfs pull` in its repository")

    def convert(folder: Path) -> None:
        source = path
        with written_to(folder):
            if path.suffix.lower() in COMPRESSED:
                source = folder / "unpacked"
                unpack(path, source)
            write_table(kind, source, folder / "rows.arrow", number, skip, as_json)

    def make(folder: Path) -> Dataset:
        if path.suffix.lower() in COMPRESSED:
            logger().info(f"data: unpacking {path}")
        error = conversion_error(partial(convert, folder))
        if error is not None:
            raise UserError(f"{flag} {path}: {error}")
        return Dataset.from_file(str(folder / "rows.arrow"))

    key = file_key(path, kind, number, skip, sorted(as_json), _FORMAT)
    return cached_dataset(cache_dir, key, make)
