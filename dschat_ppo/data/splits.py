"""Read data sets (files, folders, hub names) through `datasets`, and split their rows over the three steps."""

from __future__ import annotations

import glob
import json
import os
from dataclasses import dataclass
from pathlib import Path

import datasets
import pandas
from datasets import Dataset, Features, Value

from dschat_ppo.data.cache import cached_dataset, file_key, hub_dataset
from dschat_ppo.data.conversion import EMPTY, conversion_error, load_table
from dschat_ppo.data.sources import DataSource
from dschat_ppo.errors import UserError, in_one_line, reading

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
EVAL_NAMES = ("eval", "validation", "valid", "val", "dev", "test")

ORIGIN = "_origin"  # column with the file and number of a row, for messages; it survives shuffling and splitting


@dataclass(frozen=True)
class Splits:
    """Training rows of one data set, and its evaluation rows or None.

    Each row has an `ORIGIN` column such as `data.jsonl, row 7` (rows count from 1).
    """

    train: Dataset
    eval: Dataset | None


def load_splits(source: DataSource, cache_dir: str | None) -> Splits:
    """Read one data set.

    Args:
        source: a file, a folder of files (those named `eval*`, `validation*`, `test*`, ... are for evaluation), or a
            hub name.
        cache_dir: cache folder for prepared files; None for that of `datasets`.

    Raises:
        UserError: the data set does not exist, is empty, cannot be read, or has another format.
    """
    spec, flag, config_name = source.location, source.flag, source.config
    path = Path(os.path.expanduser(spec))
    if cache_dir is not None:
        cache_dir = os.path.expanduser(cache_dir)
        try:
            os.makedirs(cache_dir, exist_ok=True)
        except OSError as problem:
            raise UserError(f"--data_output_path {cache_dir}: cannot be written ({problem.strerror})") from None
    if path.is_file():
        return Splits(_read_files([path], flag, cache_dir), None)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in BUILDERS)
        if not files:
            raise UserError(f"{flag} {spec}: the folder holds no {', '.join(BUILDERS)} file")
        for_eval = [file for file in files if file.stem.lower().startswith(EVAL_NAMES)]
        for_train = [file for file in files if file not in for_eval]
        if not for_train:
            raise UserError(f"{flag} {spec}: the folder holds only evaluation files ({for_eval[0].name}, ...)")
        evaluation = _read_files(for_eval, flag, cache_dir) if for_eval else None
        return Splits(_read_files(for_train, flag, cache_dir), evaluation)
    if spec.startswith((".", "/", "~")) or path.suffix in BUILDERS or spec.count("/") > 1:
        raise UserError(f"{flag} {spec}: no such file or folder")
    with reading(f"{flag} {spec}: neither a local file or folder nor a readable hub data set"):
        found = hub_dataset(spec, config_name, cache_dir)
    splits = {str(name): _with_origin(rows, f"{spec} ({name})", flag) for name, rows in found.items() if len(rows)}
    if "train" not in splits:
        raise UserError(f"{flag} {spec}: has no 'train' split with rows (it has {', '.join(splits) or 'no rows'})")
    evaluation = next((splits[name] for name in splits if name.lower().startswith(EVAL_NAMES)), None)
    return Splits(splits["train"], evaluation)


def _read_files(paths: list[Path], flag: str, cache_dir: str | None) -> Dataset:
    tables = [_read_file(path, flag, cache_dir) for path in paths]
    try:
        return datasets.concatenate_datasets(tables)
    except ValueError as problem:
        raise UserError(f"{flag} {paths[0].parent}: its files differ in a column: {in_one_line(problem)}") from None


def _read_file(path: Path, flag: str, cache_dir: str | None) -> Dataset:
    builder = BUILDERS.get(path.suffix)
    if builder is None:
        raise UserError(f"{flag} {path}: '{path.suffix}' files are not supported; use one of {', '.join(BUILDERS)}")
    if not path.is_file():
        raise UserError(f"{flag} {path}: is not a regular file")
    if path.stat().st_size == 0:
        raise UserError(f"{flag} {path}: the file is empty")
    if builder != "parquet":  # `datasets` notices invalid UTF-8 only when the bad row is used
        with reading(f"{flag} {path}: cannot be read as UTF-8 text, convert it"), path.open(encoding="utf-8") as lines:
            for _ in lines:
                pass
    settings = {}
    if builder == "csv":  # every column is text: an answer may be "4", "N/A" or empty
        settings = {"features": _text_columns(path, flag), "keep_default_na": False}

    def make(folder: Path) -> Dataset:
        where = {"data_files": glob.escape(str(path)), "cache_dir": str(folder), "keep_in_memory": False, **settings}
        error = conversion_error(builder, where)
        if error is not None and error != EMPTY and builder == "json":
            error = _first_bad_line(path) or error
        if error is not None:
            raise UserError(f"{flag} {path}: {error}")
        with reading(f"{flag} {path}: cannot be read as a table"):
            return load_table(builder, where)

    return _with_origin(cached_dataset(cache_dir, file_key(path, builder, settings), make), str(path), flag)


def _text_columns(path: Path, flag: str) -> Features:
    """The columns of a CSV file, all of type text.

    Raises:
        UserError: the file is no CSV file, or row 1 has more fields than the header. pandas, which reads the file,
            would take the first field as a row name and shift the others to the left.
    """
    with reading(f"{flag} {path}: cannot be read as a table"):
        first = pandas.read_csv(path, nrows=1)  # also names unnamed columns and skips the byte order mark of Excel
    if not isinstance(first.index, pandas.RangeIndex):
        raise UserError(
            f"{flag} {path}: cannot be read as a table: row 1 has more fields than there are columns; put text that "
            "contains a comma in double quotes"
        )
    return Features({name: Value("string") for name in first.columns})


def _with_origin(rows: Dataset, name: str, flag: str) -> Dataset:
    if ORIGIN in rows.column_names:
        raise UserError(f"{flag} {name}: the column name '{ORIGIN}' is reserved; rename the column")
    return rows.add_column(ORIGIN, [f"{name}, row {number}" for number in range(1, len(rows) + 1)])


def _first_bad_line(path: Path) -> str:
    """Number and fault of the first line of a JSONL file that does not fit the lines before it; '' if none is found."""
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
