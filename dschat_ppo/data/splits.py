"""Read data sets (files, folders, hub names), choose their splits, and divide their rows over the three steps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy
from datasets import Dataset

from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.data.deepspeed_chat_sets import hub_name
from dschat_ppo.data.files import SUPPORTED, read_files
from dschat_ppo.data.folders import TRAIN, Files, find_split, is_eval, split_files
from dschat_ppo.data.hub import hub_dataset
from dschat_ppo.data.row_readers import FILE_SHIFT, ORIGIN, Skipped
from dschat_ppo.data.sources import DataSource, is_hub_name
from dschat_ppo.errors import UserError, nearest_path, reading

__all__ = ["ORIGIN", "Origins", "Splits", "load_all", "load_splits"]
_SHOWN = 8  # files in the log


@dataclass(frozen=True)
class Origins:
    """Names the rows of one data set for messages, by its files or its splits on the hub, in the order of their
    numbers. Small and picklable, for the processes of `Dataset.map`."""

    names: tuple[str, ...]

    def describe(self, origin: int) -> str:
        """The row with this value in the column `ORIGIN`, such as "data.jsonl, row 7"."""
        return f"{shown_path(self.names[origin >> FILE_SHIFT])}, row {origin & ((1 << FILE_SHIFT) - 1)}"


@dataclass(frozen=True)
class Splits:
    """The rows of one data set, for training and for evaluation (or None), and the lines of its files that are skipped
    because they cannot be read. Each row has an int64 column `ORIGIN` that survives shuffling, splitting and selecting;
    `origins.describe` turns its value into "FILE, row N"."""

    train: Dataset
    eval: Dataset | None
    origins: Origins
    skipped: Skipped = Skipped()


@dataclass(frozen=True)
class _Opened:
    """A data set whose splits are known: files that are not read yet, or tables of the hub."""

    source: DataSource
    cache_dir: str | None
    skip: bool
    splits: Mapping[str, list[Path] | Dataset]
    origins: Origins

    @property
    def what(self) -> str:
        return f"{self.source.flag} {self.source.location}"

    def files_of(self, name: str) -> list[Path]:
        """The files of a split; none of a split on the hub."""
        found = self.splits[name]
        return found if isinstance(found, list) else []

    def read(self, names: Sequence[str]) -> tuple[Dataset, Skipped]:
        """The rows of these splits, one after the other."""
        wanted = [self.splits[name] for name in names]
        paths = sorted(path for name in names for path in self.files_of(name))
        if not paths:
            return datasets.concatenate_datasets([part for part in wanted if isinstance(part, Dataset)]), Skipped()
        numbers = [self.origins.names.index(str(path)) for path in paths]
        return read_files(paths, numbers, self.what, self.cache_dir, self.skip)


def load_splits(source: DataSource, cache_dir: str | None, bad_rows: str = "error") -> Splits:
    """Read one data set.

    Training rows are those of the split that the source names, or of its training files, or of its split "train".
    Evaluation rows are those of its other splits with a name such as "validation" or "test" (of a hub data set, of the
    first one); if the source names a split such as "train_sft", only "test_sft" and its like. Unless `bad_rows` is
    "error", lines that cannot be read are counted in `Splits.skipped`.
    """
    opened = _open(source, cache_dir, bad_rows != "error")
    names = list(opened.splits)
    if source.split is None:
        chosen = [name for name in names if not is_eval(name)]
        if TRAIN in chosen:
            chosen = [TRAIN]
        if len(chosen) != 1:
            if chosen:
                holds = f"has the training splits {', '.join(chosen)}"
            elif is_hub_name(source.location):
                holds = f"has no 'train' split with rows (it has {', '.join(names)})"
            else:
                holds = f"the folder holds only evaluation files ({', '.join(names)})"
            raise UserError(f"{opened.what}: {holds}; choose one, as in {_example(source, (chosen or names)[0])}")
        train, skipped = opened.read(chosen)
        for_eval = [name for name in names if is_eval(name)]
    else:
        train, skipped, chosen = _read_chosen(opened, source.split)
        for_eval = [name for name in names if is_eval(name) and name not in chosen]
        suffix = chosen[0].removeprefix(TRAIN)
        if not chosen[0].startswith(TRAIN):
            for_eval = []
        elif suffix:
            for_eval = [name for name in for_eval if name.endswith(suffix)]
    if is_hub_name(source.location):
        for_eval = for_eval[:1]
    if not for_eval:
        return Splits(train, None, opened.origins, skipped)
    files = [path for name in for_eval for path in opened.files_of(name)]
    if files:
        is_local = os.path.isdir(source.location)  # not an earlier download of a hub data set
        names = [os.path.relpath(path, source.location) if is_local else path.name for path in files[:_SHOWN]]
        more_files = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
        logger().info(f"data: {source.label}: files for evaluation: {', '.join(names)}{more_files}")
    evaluation, more = opened.read(for_eval)
    return Splits(train, evaluation, opened.origins, Skipped(skipped.count + more.count, skipped.first or more.first))


def load_all(source: DataSource, cache_dir: str | None, bad_rows: str = "error") -> Splits:
    """Read as `train` a data set that is used whole, for evaluation: all files of a folder, whatever they are named. A
    hub data set with several splits must name one."""
    opened = _open(source, cache_dir, bad_rows != "error")
    names = list(opened.splits)
    if source.split is not None:
        rows, skipped, _ = _read_chosen(opened, source.split)
    elif is_hub_name(source.location) and len(names) > 1:
        raise UserError(
            f"{opened.what}: has the splits {', '.join(names)}; choose one, as in {_example(source, names[-1])}"
        )
    else:
        if len(names) > 1:
            logger().info(f"data: {source.label}: all its splits are used for evaluation: {', '.join(names)}")
        rows, skipped = opened.read(names)
    return Splits(rows, None, opened.origins, skipped)


def _open(source: DataSource, cache_dir: str | None, skip: bool) -> _Opened:
    what = f"{source.flag} {source.location}"
    if cache_dir is not None:
        cache_dir = os.path.expanduser(cache_dir)
        try:
            os.makedirs(cache_dir, exist_ok=True)
        except OSError as problem:
            raise UserError(f"--data_output_path {cache_dir}: cannot be written ({problem.strerror})") from None
    path, config = Path(source.location), source.config
    if is_hub_name(source.location):
        name, config = hub_name(source.location, source.config)
        found = hub_dataset(name, config, cache_dir, source.flag)
        if not isinstance(found, Path):
            return _open_hub(source, found, cache_dir, what)
        path = found
    if path.is_dir():
        files: Files = split_files(path, config, what)
    elif not os.path.lexists(path):
        raise UserError(f"{what}: no such file or folder{nearest_path(path)}")
    elif source.config is not None:
        raise UserError(f"{what}: a file has no configuration '{source.config}'; supported files: {SUPPORTED}")
    else:
        files = {TRAIN: [path]}
    names = tuple(str(path) for path in sorted({path for paths in files.values() for path in paths}))
    return _Opened(source, cache_dir, skip, files, Origins(names))


def _open_hub(source: DataSource, found: Mapping[Any, Dataset], cache_dir: str | None, what: str) -> _Opened:
    name = source.location + (f":{source.config}" if source.config else "")
    splits = {str(split): rows for split, rows in found.items() if len(rows)}
    if not splits:
        raise UserError(f"{what}: has no split with rows")
    origins = Origins(tuple(f"{name} ({split})" for split in splits))
    for number, (split, rows) in enumerate(splits.items()):
        if ORIGIN in rows.column_names:
            raise UserError(f"{what} ({split}): the column name '{ORIGIN}' is reserved; rename the column")
        column = numpy.arange(1, len(rows) + 1, dtype=numpy.int64) | (number << FILE_SHIFT)
        splits[split] = rows.add_column(ORIGIN, column)
    return _Opened(source, cache_dir, False, splits, origins)


def _read_chosen(opened: _Opened, wanted: str) -> tuple[Dataset, Skipped, list[str]]:
    """The rows of a split, or of parts of splits such as `train[:10%]+test`; the skipped lines; the splits' names."""
    names = list(opened.splits)
    if find_split(names, wanted) is not None:
        instructions = [(wanted, "")]
    else:
        instructions = [(part.partition("[")[0].strip(), part) for part in wanted.split("+")]
    tables, skipped, chosen = [], Skipped(), []
    for word, part in instructions:
        name = find_split(names, word)
        if name is None:
            raise UserError(f"{opened.what}: has no split '{word}'; it has {', '.join(names)}")
        rows, more = opened.read([name])
        if "[" in part:
            with reading(f"{opened.what}: the split '{part.strip()}'"):
                (place,) = datasets.ReadInstruction.from_spec(part.strip()).to_absolute({word: len(rows)})
            numbers = range(place.from_, place.to)  # `datasets` refuses an empty range behind the last row
            rows = rows.select(numbers if numbers else [])
        if not len(rows):
            raise UserError(f"{opened.what}: the split '{part.strip()}' has no rows")
        tables.append(rows)
        chosen.append(name)
        skipped = Skipped(skipped.count + more.count, skipped.first or more.first)
    return datasets.concatenate_datasets(tables), skipped, chosen


def _example(source: DataSource, split: str) -> str:
    return f"{source.location}{f':{source.config}' if source.config else ''}[{split}]"
