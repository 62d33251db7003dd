"""Open data sets (files, folders, hub names), choose their splits, and read their rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
from datasets import Dataset, DatasetDict

from dschat_ppo.common.logging import logger
from dschat_ppo.data.deepspeed_chat_sets import hub_name
from dschat_ppo.data.folders import TRAIN, find_split, is_eval, split_files
from dschat_ppo.data.hub import hub_dataset, hub_stream
from dschat_ppo.data.parts import FilePart, HubPart, Part, TablePart
from dschat_ppo.data.rows import Origins, Rows, Skipped, joined_rows, stored_rows
from dschat_ppo.data.sources import SUPPORTED, DataSource, is_hub_name
from dschat_ppo.errors import UserError, nearest_path, reading

_SHOWN = 8  # files in the log


@dataclass(frozen=True)
class Splits:
    """The rows of one data set, for training and for evaluation (or None), and the lines of its files that are skipped
    because they cannot be read."""

    train: Rows
    eval: Rows | None
    origins: Origins
    skipped: Skipped = Skipped()


@dataclass(frozen=True)
class OpenSet:
    """A data set whose splits are known and not read yet."""

    source: DataSource
    splits: Mapping[str, Sequence[Part]]

    @property
    def what(self) -> str:
        """The data set with its flag, for messages."""
        return f"{self.source.flag} {self.source.location}"

    @property
    def parts(self) -> list[Part]:
        """All parts, in the order of their numbers: files by their paths. A file may be in several splits."""
        parts = list({part.name: part for split in self.splits.values() for part in split}.values())
        return sorted(parts, key=lambda part: part.name) if isinstance(parts[0], FilePart) else parts

    def numbered(self, names: Sequence[str]) -> list[tuple[int, Part]]:
        """The parts of these splits, with their numbers."""
        wanted = {part.name for name in names for part in self.splits[name]}
        return [(number, part) for number, part in enumerate(self.parts) if part.name in wanted]

    @property
    def origins(self) -> Origins:
        """The names of its parts."""
        return Origins(tuple(part.name for part in self.parts))

    def chosen(self) -> tuple[list[tuple[str, str]], list[str]]:
        """(the splits for training, each with its slice such as "train[:10%]" or "", those for evaluation)."""
        source, names = self.source, list(self.splits)
        for_eval = [name for name in names if is_eval(name)]
        if source.split is None:
            found = [name for name in names if not is_eval(name)]
            found = [TRAIN] if TRAIN in found else found
            if len(found) != 1:
                if found:
                    holds = f"has the training splits {', '.join(found)}"
                elif is_hub_name(source.location):
                    holds = f"has no 'train' split with rows (it has {', '.join(names)})"
                else:
                    holds = f"the folder holds only evaluation files ({', '.join(names)})"
                raise UserError(f"{self.what}: {holds}; choose one, as in {self.example((found or names)[0])}")
            cuts = [(found[0], "")]
        else:
            cuts = self.cuts(source.split)
            first = cuts[0][0]
            used = [name for name, _ in cuts]
            for_eval = [name for name in for_eval if name not in used and first.startswith(TRAIN)]
            for_eval = [name for name in for_eval if name.endswith(first.removeprefix(TRAIN))]
        return cuts, for_eval[:1] if is_hub_name(source.location) else for_eval

    def cuts(self, wanted: str) -> list[tuple[str, str]]:
        """The splits that `wanted` names, with slices, such as `train[:10%]+test`."""
        names = list(self.splits)
        if (whole := find_split(names, wanted)) is not None:
            return [(whole, "")]
        found = []
        for part in map(str.strip, wanted.split("+")):
            word, bracket, _ = part.partition("[")
            name = find_split(names, word.strip())
            if name is None:
                raise UserError(f"{self.what}: has no split '{word.strip()}'; it has {', '.join(names)}")
            found.append((name, part if bracket else ""))
        return found

    def example(self, split: str) -> str:
        """How to name a split of this data set."""
        source = self.source
        return f"{source.location}{f':{source.config}' if source.config else ''}[{split}]"


def open_set(source: DataSource, cache_dir: str | None, streaming: bool = False) -> OpenSet:
    """Find the parts of a data set; reads no row of a file. With `streaming` a hub data set is not downloaded."""
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
        shown = source.location + (f":{source.config}" if source.config else "")
        if streaming:
            revision, streams = hub_stream(name, config, source.flag)
            return OpenSet(source, {
                split: [HubPart(f"{shown} ({split})", source.flag, rows, f"{shown} {split} {revision}")]
                for split, rows in streams.items()
            })  # fmt: skip
        found = hub_dataset(name, config, cache_dir, source.flag)
        if not isinstance(found, Path):
            return _tables(source, found, shown, what)
        path = found
    saved_in = path / config if config else path
    if (saved_in / "state.json").is_file() or (saved_in / "dataset_dict.json").is_file():
        with reading(f"{what}: cannot be read as a folder of save_to_disk"):
            saved = datasets.load_from_disk(str(saved_in))
        splits = DatasetDict({TRAIN: saved}) if isinstance(saved, Dataset) else saved
        return _tables(source, splits, str(saved_in), what)
    if path.is_dir():
        files = split_files(path, config, what)
    elif not os.path.lexists(path):
        raise UserError(f"{what}: no such file or folder{nearest_path(path)}")
    elif source.config is not None:
        raise UserError(f"{what}: a file has no configuration '{source.config}'; supported files: {SUPPORTED}")
    else:
        files = {TRAIN: [path]}
    return OpenSet(source, {split: [FilePart(file, source.flag) for file in paths] for split, paths in files.items()})


def _tables(source: DataSource, found: DatasetDict, shown: str, what: str) -> OpenSet:
    """A data set whose splits are tables; those without rows do not count."""
    splits = {str(split): rows for split, rows in found.items() if len(rows)}
    if not splits:
        raise UserError(f"{what}: has no split with rows")
    return OpenSet(source, {
        split: [TablePart(f"{shown} ({split})", source.flag, rows)] for split, rows in splits.items()
    })  # fmt: skip


def load_splits(source: DataSource, cache_dir: str | None, bad_rows: str = "error") -> Splits:
    """Read a data set, converted once and then memory-mapped from the cache.

    Args:
        source: a file, a folder or a hub name. The training split is the one it names, or else the only one that is not
            for evaluation. A hub data set has at most one evaluation split; otherwise all of them are read.
        cache_dir: folder of the cache; None for that of `datasets`.
        bad_rows: `--bad_rows`; unless "error", lines of files that cannot be read are in `Splits.skipped`.
    """
    found = open_set(source, cache_dir)
    cuts, for_eval = found.chosen()
    train, skipped = _read_cuts(found, cuts, cache_dir, bad_rows)
    evaluation = None
    if for_eval:
        _log_files(found, for_eval)
        evaluation, more = _read(found, for_eval, cache_dir, bad_rows)
        skipped += more
    return Splits(train, evaluation, found.origins, skipped)


def load_all(source: DataSource, cache_dir: str | None, bad_rows: str = "error") -> Splits:
    """Read as `train` a data set that is used whole, for evaluation: all files of a folder, whatever they are named. A
    hub data set with several splits must name one."""
    found = open_set(source, cache_dir)
    names = list(found.splits)
    if source.split is not None:
        rows, skipped = _read_cuts(found, found.cuts(source.split), cache_dir, bad_rows)
    elif is_hub_name(source.location) and len(names) > 1:
        example = found.example(names[-1])
        raise UserError(f"{found.what}: has the splits {', '.join(names)}; choose one, as in {example}")
    else:
        if len(names) > 1:
            logger().info(f"data: {source.label}: all its splits are used for evaluation: {', '.join(names)}")
        return splits_named(found, names, cache_dir, bad_rows)
    return Splits(rows, None, found.origins, skipped)


def splits_named(found: OpenSet, names: Sequence[str], cache_dir: str | None, bad_rows: str) -> Splits:
    """The rows of whole splits, as `train`."""
    rows, skipped = _read(found, names, cache_dir, bad_rows)
    return Splits(rows, None, found.origins, skipped)


def _read_cuts(
    found: OpenSet, cuts: Sequence[tuple[str, str]], cache_dir: str | None, bad_rows: str
) -> tuple[Rows, Skipped]:
    """The rows of splits, or of slices of them, one after another."""
    tables, skipped = [], Skipped()
    for name, cut in cuts:
        rows, more = _read(found, [name], cache_dir, bad_rows)
        if cut:
            with reading(f"{found.what}: the split '{cut}'"):
                word = cut.partition("[")[0].strip()
                (place,) = datasets.ReadInstruction.from_spec(cut).to_absolute({word: len(rows)})
            numbers = range(place.from_, place.to)
            if not numbers:
                raise UserError(f"{found.what}: the split '{cut}' has no rows")
            rows = rows.select(numbers)
        tables.append(rows)
        skipped += more
    return joined_rows(tables), skipped


def _read(found: OpenSet, names: Sequence[str], cache_dir: str | None, bad_rows: str) -> tuple[Rows, Skipped]:
    """The rows of whole splits, in the order of their parts."""
    wanted = found.numbered(names)
    tables, skipped = [], Skipped()
    for number, part in wanted:
        if isinstance(part, FilePart):
            part.check()
        rows, more = stored_rows(part, number, bad_rows != "error", cache_dir)
        tables.append(rows)
        skipped += more
    _check_columns(found.what, [part for _, part in wanted], tables)
    return joined_rows(tables), skipped


def _check_columns(what: str, parts: Sequence[Part], tables: Sequence[Rows]) -> None:
    """Refuse files of different kinds with different columns: one of them is not the data."""
    kinds = {part.kind: (part, rows) for part, rows in zip(parts, tables, strict=True) if isinstance(part, FilePart)}
    if len({frozenset(rows.columns) for _, rows in kinds.values()}) > 1:
        shown = "; ".join(f"{part.path.name} has {', '.join(rows.columns)}" for part, rows in kinds.values())
        raise UserError(f"{what}: holds files of different kinds and columns ({shown}); name one of the files")


def _log_files(found: OpenSet, names: Sequence[str]) -> None:
    """Log the files of splits for evaluation, which their names make so."""
    location = found.source.location
    paths = [part.path for name in names for part in found.splits[name] if isinstance(part, FilePart)]
    if paths:
        is_local = os.path.isdir(location)  # not an earlier download of a hub data set
        shown = [os.path.relpath(path, location) if is_local else path.name for path in paths[:_SHOWN]]
        more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
        logger().info(f"data: {found.source.label}: files for evaluation: {', '.join(shown)}{more}")
