"""Reading data sets: files, folders and hub names through `datasets`, and the division among the three steps."""

from __future__ import annotations

import glob
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pandas
import torch
from datasets import Dataset, Features, Value

from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data.cache import cached_dataset, file_key, hub_dataset
from dschat_ppo.data.conversion import EMPTY, conversion_error, load_table
from dschat_ppo.errors import UserError, in_one_line, reading

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
EVAL_NAMES = ("eval", "validation", "valid", "val", "dev", "test")

ORIGIN = "_origin"  # column of where a row stands, kept through shuffling and splitting, for messages


@dataclass(frozen=True)
class Source:
    """One data set as read: training rows, and evaluation rows if it brings any.

    Each row has an `ORIGIN` column such as `data.jsonl, row 7` (rows counted from 1).
    """

    train: Dataset
    eval: Dataset | None


def load_splits(spec: str, flag: str, cache_dir: str | None, config_name: str | None = None) -> Source:
    """Read one data set.

    Args:
        spec: a file, a folder of files (those named `eval*`, `validation*`, `test*`, ... are for evaluation), or a
            hub name.
        flag: the flag that named it, for messages.
        cache_dir: where `datasets` keeps prepared files; None for its default.
        config_name: configuration of a hub data set; None for its default.

    Raises:
        UserError: nothing there, a format that is not read, an unreadable or empty file.
    """
    path = Path(os.path.expanduser(spec))
    if cache_dir is not None:
        cache_dir = os.path.expanduser(cache_dir)
        try:
            os.makedirs(cache_dir, exist_ok=True)
        except OSError as problem:
            raise UserError(f"--data_output_path {cache_dir}: cannot be written ({problem.strerror})") from None
    if path.is_file():
        return Source(_read_files([path], flag, cache_dir), None)
    if path.is_dir():
        return _load_folder(spec, path, flag, cache_dir)
    if spec.startswith((".", "/", "~")) or path.suffix in BUILDERS or spec.count("/") > 1:
        raise UserError(f"{flag} {spec}: no such file or folder")
    return _load_hub(spec, flag, cache_dir, config_name)


def _load_folder(spec: str, folder: Path, flag: str, cache_dir: str | None) -> Source:
    files = sorted(path for path in folder.iterdir() if path.suffix in BUILDERS)
    if not files:
        raise UserError(f"{flag} {spec}: the folder holds no {', '.join(BUILDERS)} file")
    for_eval = [path for path in files if path.stem.lower().startswith(EVAL_NAMES)]
    for_train = [path for path in files if path not in for_eval]
    if not for_train:
        raise UserError(f"{flag} {spec}: the folder holds evaluation files only ({for_eval[0].name}, ...)")
    evaluation = _read_files(for_eval, flag, cache_dir) if for_eval else None
    return Source(_read_files(for_train, flag, cache_dir), evaluation)


def _read_files(paths: list[Path], flag: str, cache_dir: str | None) -> Dataset:
    tables = [_read_file(path, flag, cache_dir) for path in paths]
    try:
        return datasets.concatenate_datasets(tables)
    except ValueError as problem:
        raise UserError(f"{flag} {paths[0].parent}: its files differ in a column: {in_one_line(problem)}") from None


def _read_file(path: Path, flag: str, cache_dir: str | None) -> Dataset:
    builder = BUILDERS.get(path.suffix)
    if builder is None:
        raise UserError(f"{flag} {path}: '{path.suffix}' files are not read; use one of {', '.join(BUILDERS)}")
    if not path.is_file():
        raise UserError(f"{flag} {path}: is not a regular file")
    if path.stat().st_size == 0:
        raise UserError(f"{flag} {path}: the file is empty")
    if builder != "parquet":
        _check_text(path, flag)
    settings = _all_text(path, flag) if builder == "csv" else {}

    def make(folder: Path) -> Dataset:
        where = {"data_files": glob.escape(str(path)), "cache_dir": str(folder), "keep_in_memory": False, **settings}
        fault = conversion_error(builder, where)
        if fault is not None and fault != EMPTY and builder == "json":
            fault = _first_odd_line(path) or fault
        if fault is not None:
            raise UserError(f"{flag} {path}: {fault}")
        with reading(f"{flag} {path}: cannot be read as a table"):
            return load_table(builder, where)

    return _with_origin(cached_dataset(cache_dir, file_key(path, builder, settings), make), str(path), flag)


def _all_text(path: Path, flag: str) -> dict[str, Any]:
    """Settings by which every column of a CSV file is text: an answer may be "4", "N/A" or nothing at all.

    Raises:
        UserError: the file is no CSV, or there are more fields than names. pandas, which reads it, would take the first
            field for the row's name and move the others to the left.
    """
    with reading(f"{flag} {path}: cannot be read as a table"):
        first = pandas.read_csv(path, nrows=1)  # it names columns without a name, and knows the mark of Excel's UTF-8
    if not isinstance(first.index, pandas.RangeIndex):
        raise UserError(
            f"{flag} {path}: cannot be read as a table: row 1 has more fields than there are columns; put text that "
            "holds a comma in double quotes"
        )
    return {"features": Features({name: Value("string") for name in first.columns}), "keep_default_na": False}


def _check_text(path: Path, flag: str) -> None:
    """The whole file must be UTF-8: `datasets` would find out only when the bad row is used."""
    with reading(f"{flag} {path}: cannot be read as UTF-8 text, convert it"), path.open(encoding="utf-8") as lines:
        for _ in lines:
            pass


def _with_origin(rows: Dataset, name: str, flag: str) -> Dataset:
    if ORIGIN in rows.column_names:
        raise UserError(f"{flag} {name}: the column name '{ORIGIN}' is reserved; rename the column")
    return rows.add_column(ORIGIN, [f"{name}, row {number}" for number in range(1, len(rows) + 1)])


def _first_odd_line(path: Path) -> str:
    """What is wrong with the first line of a JSONL file that is not like its first, or '' if none is seen."""
    kinds: dict[str, str] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as problem:
                return f"line {number} is not JSON ({in_one_line(problem)})"
            except RecursionError:
                return f"line {number} is nested too deeply"
            if not isinstance(row, dict):
                return f"line {number} is not an object with named fields"
            for key, value in row.items():
                kind = type(value).__name__
                if value is not None and kinds.setdefault(key, kind) != kind:
                    return f"line {number}: '{key}' is {kind}, but {kinds[key]} in the lines before"
    return ""


def _load_hub(spec: str, flag: str, cache_dir: str | None, config_name: str | None) -> Source:
    with reading(f"{flag} {spec}: neither a local file or folder nor a hub data set that can be read"):
        found = hub_dataset(spec, config_name, cache_dir)
    splits = {str(name): _with_origin(rows, f"{spec} ({name})", flag) for name, rows in found.items() if len(rows)}
    if "train" not in splits:
        raise UserError(f"{flag} {spec}: has no 'train' split with rows (it has {', '.join(splits) or 'no rows'})")
    evaluation = next((splits[name] for name in splits if name.lower().startswith(EVAL_NAMES)), None)
    return Source(splits["train"], evaluation)


def split_of_step(rows: Dataset, shares: tuple[float, float, float], part: int, seed: int) -> Dataset:
    """The rows of step `part` (0 SFT, 1 reward, 2 PPO): disjoint random shares that together are all rows.

    Depends on the number of rows, `shares` and `seed` alone, so the three steps cut the same way.
    """
    order = torch.randperm(len(rows), generator=shared_generator(seed)).tolist()
    bounds = [round(len(rows) * sum(shares[:i]) / sum(shares)) for i in range(4)]
    return rows.select(order[bounds[part] : bounds[part + 1]])


def hold_out(rows: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset | None]:
    """(training rows, held-out rows): a random share, at least one row, none if `fraction` is 0 or one row is all."""
    if fraction == 0 or len(rows) < 2:
        return rows, None
    count = min(len(rows) - 1, max(1, round(len(rows) * fraction)))
    order = torch.randperm(len(rows), generator=shared_generator(seed, 1)).tolist()
    return rows.select(order[count:]), rows.select(order[:count])
