"""Data sets as flags name them, `LOCATION[:CONFIG][[SPLIT]][:WEIGHT|@ROWS]`, and where they are:
files, folders, names on the hub. Tells their splits and the shards of these; reads no row of a
file.

    openai/gsm8k:main[train]     a configuration and a split of a hub data set
    data.jsonl:0.3               a file with its weight in a mixture
    folder@5000                  5,000 rows of a folder
    org/name:cfg[train[:10%]]:0.5

What exists on disk exactly as it is written is that file or folder, whatever characters its name
holds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from textwrap import shorten
from typing import Any

import datasets
from datasets import Dataset, IterableDataset
from datasets.exceptions import DatasetGenerationError
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from huggingface_hub import metadata_load

from dschat_ppo.common.atomic_files import sync_folder
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.data.shards import (
    COMPRESSED,
    KINDS,
    SUPPORTED,
    FileShard,
    Shard,
    SplitShard,
    file_kind,
)
from dschat_ppo.errors import UserError, nearest_path, reading

# data set of DeepSpeed-Chat -> (hub name, configuration), where the hub has another name or needs a
# configuration
HUB_NAMES: dict[str, tuple[str, str | None]] = {
    "mkqa-Chinese": ("mkqa", None),
    "mkqa-Japanese": ("mkqa", None),
    "Hello-SimpleAI/HC3-Chinese": ("Hello-SimpleAI/HC3-Chinese", "all"),
}
TRAIN = "train"
EVAL_NAMES = ("eval", "validation", "valid", "val", "dev", "test")
_ENDING = (
    re.compile(  # of a name; the configuration is lazy, because a number by itself is a weight
        r"""(?: :   (?P<config> [^/:@\[\]] [^:@\[\]]* ))??
        (?: \[  (?P<split> (?: [^\[\]] | \[ [^\[\]]* \] )+ ) \] )?  # it may hold slices in brackets
        (?: :   (?P<weight> [-+]?
                (?: (?: [0-9]+ \.? [0-9]* | \. [0-9]+ ) (?: e [-+]? [0-9]+ )? | inf | nan ) )
          | @   (?P<rows> [^:@\[\]]+ ) )?""",
        re.IGNORECASE | re.VERBOSE,
    )
)
_STRAY = re.compile(  # files that are no data, hidden ones, and all in hidden folders
    r"(^|/)(\.|__MACOSX/|(dataset_infos?|dataset_dict|state|package|croissant)\.json$"
    r"|(readme|licen[cs]e|copying|notice|changelog|citation|requirements)\b[^/]*$)",
    re.IGNORECASE,
)


# What a flag says


@dataclass(frozen=True)
class DataSource:
    """One data set that a flag names."""

    # as written on the command line, for messages; a path in the working directory is relative
    spec: str
    flag: str
    location: str  # a file, a folder or a hub name; `~` is expanded
    config: str | None
    split: str | None  # its training split, perhaps with a slice such as `train[:10%]`
    name: str  # short, unique among the sources of a run; for metrics
    weight: float | None  # its share of a mixture in units of the other weights, above 0
    samples: int | None  # number of its rows in a mixture, above 0; None for all


def parse_sources(specs: Sequence[str], flag: str, taken: Collection[str] = ()) -> list[DataSource]:
    """The data sets that `flag` names. Their names differ from those of other flags, `taken`. The
    longest start of each that exists on disk is its location, otherwise what stands before the
    first mark."""
    sources = list[DataSource]()
    names = set(taken)
    for spec in specs:
        text = os.path.expanduser(spec)
        marks = [mark.start() for mark in re.finditer(r"[:@\[\]]|$", text)]
        end_of_location = marks[0]
        for mark in marks:
            if os.path.lexists(text[:mark]):
                end_of_location = mark
        location = text[:end_of_location]
        ending = _ENDING.fullmatch(text, end_of_location)
        if location == "local/jsonfile":
            raise UserError(
                f"{flag} {spec}: DeepSpeed-Chat reads data/train.json and data/eval.json under this"
                " name; give the files themselves: data/train.json with --data_format"
                " local/jsonfile, and --eval_data_path data/eval.json"
            )
        if not location or ending is None:
            raise UserError(
                f"{flag} '{spec}': no such file or folder, and no name of a data set of the hub;"
                " expected LOCATION[:CONFIG][[SPLIT]][:WEIGHT|@ROWS]"
            )
        config, split, weight, rows = ending.groups()
        if weight and not 0 < float(weight) < math.inf:
            raise UserError(f"{flag} {spec}: the weight '{weight}' must be a finite number above 0")
        if rows and not (rows.isdecimal() and int(rows)):
            raise UserError(
                f"{flag} {spec}: the number of rows '{rows}' must be a whole number above 0"
            )
        name = _unused_name(_short_name(location), names)
        names.add(name)
        sources.append(
            DataSource(
                shown_path(spec),
                flag,
                location,
                config,
                split,
                name,
                weight=float(weight) if weight else None,
                samples=int(rows) if rows else None,
            )
        )
    _refuse_mixed_weights(flag, sources)
    return sources


def _refuse_mixed_weights(flag: str, sources: Sequence[DataSource]) -> None:
    """Refuse weights of some data sets where others have neither a weight nor a number of rows."""
    weighted = list[str]()
    bare = list[str]()
    for source in sources:
        if source.weight is not None:
            weighted.append(source.spec)
        elif source.samples is None:
            bare.append(source.spec)
    if weighted and bare:
        raise UserError(
            f"{flag}: '{weighted[0]}' has a weight and '{bare[0]}' has none; give each data set a"
            " weight (:WEIGHT) or a number of rows (@ROWS), or none of them a weight"
        )


def parse_unweighted(specs: Sequence[str], flag: str) -> list[DataSource]:
    """The data sets that `flag` names, which are used side by side and not mixed by weights."""
    for spec in specs:
        [source] = parse_sources([spec], flag)
        if source.weight is not None:
            raise UserError(
                f"{flag} {source.spec}: the weight has no effect, because these data sets are not"
                " mixed; omit it"
            )
    return parse_sources(specs, flag)


def is_hub_name(location: str) -> bool:
    """Whether `location` is a hub name rather than a path; a path need not exist."""
    is_path = (
        os.path.lexists(location) or location.startswith((".", "/", "~")) or location.count("/") > 1
    )
    return not is_path and file_kind(location) is None


def _short_name(location: str) -> str:
    """The last part of a location without the endings of data files, fit for the name of a
    metric."""
    name = os.path.basename(os.path.abspath(location))
    for ending in (*COMPRESSED, *KINDS):
        if name.lower().endswith(ending):
            name = name[: -len(ending)]
    return re.sub(r"[^\w.-]+", "_", name).strip("_.") or "data"


def _unused_name(name: str, taken: Collection[str]) -> str:
    """The name, or if that is taken, the name with the first number from 2 on that makes it new."""
    if name not in taken:
        return name
    for suffix in count(2):
        if f"{name}_{suffix}" not in taken:
            break
    return f"{name}_{suffix}"


# What is there


# splits that are read together, and of one perhaps a slice such as "train[:10%]", or ""
Group = tuple[list[str], str]


@dataclass(frozen=True)
class OpenSet:
    """A data set whose splits are known and not read yet, with the shards of each. A file may be in
    several splits."""

    source: DataSource
    splits: Mapping[str, Sequence[Shard]]

    @property
    def what(self) -> str:
        """The data set with its flag, for messages."""
        return f"{self.source.flag} {self.source.location}"

    def shards(self, names: Sequence[str]) -> list[Shard]:
        """The shards of these splits once each, files in the order of their paths. Refuses files
        that hold no data."""
        unique = dict[Shard, None]()
        for name in names:
            unique |= dict.fromkeys(self.splits[name])
        for shard in unique:
            if isinstance(shard, FileShard):
                shard.check()
        return sorted(unique, key=lambda shard: shard.name if isinstance(shard, FileShard) else "")

    def chosen(self, only_evaluates: bool = False) -> tuple[list[Group], list[str]]:
        """(the splits for training, those for evaluation). The hub gives at most one for
        evaluation. With `only_evaluates` the split that the source names or else all are
        read as those for training; a hub data set with several must name one."""
        names = list(self.splits)
        named = self.source.split
        for_eval = [name for name in names if is_eval(name)]
        if named is not None:
            cuts = self.cuts(named)
            used = [names_of_cut[0] for names_of_cut, _ in cuts]
            ending = used[0].removeprefix(TRAIN)  # rows of `test_sft` evaluate `train_sft`
            for_eval = [name for name in for_eval if name not in used and name.endswith(ending)]
        else:
            splits = [name for name in names if not is_eval(name)]
            if TRAIN in names:
                splits = [TRAIN]
            if only_evaluates:
                splits = names
            if len(splits) != 1 and not (only_evaluates and not is_hub_name(self.source.location)):
                config = f":{self.source.config}" if self.source.config else ""
                choice = names[-1] if only_evaluates else (splits or names)[0]
                example = f"{self.source.location}{config}[{choice}]"
                raise UserError(
                    f"{self.what}: has the splits {', '.join(names)}; choose one, as in {example}"
                )
            cuts = [(splits, "")]
            if len(splits) > 1:
                logger().info(
                    f"data: {self.source.spec}: all its splits are used for evaluation:"
                    f" {', '.join(names)}"
                )
        if only_evaluates:
            return cuts, []
        if is_hub_name(self.source.location):
            for_eval = for_eval[:1]
        files = set[Path]()
        for name in for_eval:
            files |= {shard.path for shard in self.splits[name] if isinstance(shard, FileShard)}
        if files:  # their names make them so
            paths = ", ".join(path.name for path in sorted(files))
            logger().info(f"data: {self.source.spec}: files for evaluation: {shorten(paths, 300)}")
        return cuts, for_eval

    def cuts(self, split_spec: str) -> list[Group]:
        """The splits that a source names, with slices, such as `train[:10%]+test`."""
        groups = list[Group]()
        for term in map(str.strip, split_spec.split("+")):
            name, bracket, _ = term.partition("[")
            if name.strip() not in self.splits:
                raise UserError(
                    f"{self.what}: has no split '{name.strip()}'; it has {', '.join(self.splits)}"
                )
            groups.append(([name.strip()], term if bracket else ""))
        return groups


def is_eval(split: str) -> bool:
    """Whether rows of a split are for evaluation."""
    return split.lower().startswith(EVAL_NAMES)


def open_set(source: DataSource, cache_dir: str | None, download: bool = True) -> OpenSet:
    """Find the shards of a data set. Without `download` a hub data set is read row by row."""
    what = f"{source.flag} {source.location}"
    path = Path(source.location)
    config = source.config
    cache_dir = cache_dir and os.path.expanduser(cache_dir)
    # a builder such as `json` would read all such files of the working directory
    if is_hub_name(source.location) and source.location not in _PACKAGED_DATASETS_MODULES:
        return _hub_set(source, cache_dir, download)
    if not os.path.lexists(path):
        raise UserError(f"{what}: no such file or folder{nearest_path(path)}")
    if not path.is_dir():
        if config is not None:
            raise UserError(
                f"{what}: a file has no configuration '{config}'; supported files: {SUPPORTED}"
            )
        return OpenSet(source, {TRAIN: [FileShard(path, source.flag)]})
    folder = path / (config or "")
    has_splits = (folder / "dataset_dict.json").is_file()
    is_table = all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))
    if has_splits or is_table:
        with reading(f"{what}: cannot be read as a folder of save_to_disk"):
            saved = datasets.load_from_disk(str(folder))
        if isinstance(saved, Dataset):
            saved = {TRAIN: saved}
        return _splits(source, saved, str(folder), "")
    splits = dict[str, list[Shard]]()
    for split, files in split_files(path, config, what, cache_dir).items():
        splits[split] = [FileShard(file, source.flag) for file in files]
    return OpenSet(source, splits)


def _splits(
    source: DataSource,
    rows_of_splits: Mapping[Any, Dataset | IterableDataset],
    name: str,
    revision: str,
) -> OpenSet:
    """A data set that `datasets` gives; tables without rows do not count."""
    splits = dict[str, list[Shard]]()
    for split, rows in rows_of_splits.items():
        if not isinstance(rows, Dataset) or len(rows):
            splits[str(split)] = [SplitShard(f"{name} ({split})", source.flag, rows, revision)]
    if not splits:
        raise UserError(f"{source.flag} {source.location}: has no split with rows")
    return OpenSet(source, splits)


def _hub_set(source: DataSource, cache_dir: str | None, download: bool) -> OpenSet:
    """A data set of the hub, through the cache of `datasets` in a folder (None: its own), or read
    from the hub row by row."""
    name, usual_config = HUB_NAMES.get(source.location, (source.location, None))
    config = source.config or usual_config
    revision = ""
    wrong = (
        f"no such file or folder{nearest_path(name)}, nor a data set of the hub that can be read"
    )
    way = (
        "NAME:CONFIG names a configuration; without network, give the folder that `hf download`"
        " prints"
    )
    with reading(f"{source.flag} {source.location}: {wrong} ({way})"):
        try:
            if download:
                splits = datasets.load_dataset(name, config, cache_dir=cache_dir)
            else:
                builder = datasets.load_dataset_builder(name, config)
                splits = builder.as_streaming_dataset()
                revision = str(builder.hash)
        except DatasetGenerationError as problem:  # its own text names no cause
            raise problem.__cause__ or problem from None
    if download:
        for rows in splits.values():
            for file in rows.cache_files:
                sync_folder(Path(file["filename"]).parent)
    config_suffix = f":{source.config}" if source.config else ""
    return _splits(source, splits, f"{source.location}{config_suffix}", revision)


# Folders


def split_files(
    folder: Path, config: str | None, what: str, cache_dir: str | None = None
) -> dict[str, list[Path]]:
    """The files of each split of a folder, sorted by path: by the README.md of a clone of a hub
    data set, if it lists configurations, or else by their names, see `_split_of`. Subfolders count
    only if the folder itself has no training file. `config` is a configuration in README.md or a
    subfolder, or None. `what` is for messages."""
    readme = folder / "README.md"
    if readme.is_file():
        with reading(f"{what}: the configurations of its README.md (FOLDER:CONFIG names one)"):
            if (metadata_load(readme) or {}).get("configs"):
                # a relative path such as `json` would name a builder of `datasets`
                full_path = str(folder.resolve())
                builder = datasets.load_dataset_builder(full_path, config, cache_dir=cache_dir)
                data_files: Any = builder.config.data_files
                return {str(split): sorted(map(Path, paths)) for split, paths in data_files.items()}
    if config is not None:
        folder = folder / config
        if not folder.is_dir():
            raise UserError(
                f"{what}: has no configuration or subfolder '{config}'{nearest_path(folder)}"
            )
    split_of_file = dict[Path, str]()
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        if file_kind(path) and not path.is_dir() and not _STRAY.search(str(inner)):
            split_of_file[path] = _split_of(inner)
    if not split_of_file:
        raise UserError(f"{what}: the folder holds no data file; supported are {SUPPORTED}")
    direct = {path: split for path, split in split_of_file.items() if path.parent == folder}
    if not all(map(is_eval, direct.values())):
        split_of_file = direct
    files = dict[str, list[Path]]()
    for path, split in split_of_file.items():
        files.setdefault(split, []).append(path)
    return files


def _split_of(path: Path) -> str:
    """The split of a file: NAME of `NAME-00000-of-00002`; the one of `EVAL_NAMES` with which its
    name or that of a folder around it starts; or else that for training."""
    stem = path.name.split(".")[0]
    shard = re.match(r"(.+?)-\d{5}-of-\d{5}", stem)
    if shard:
        return shard[1]
    for name in (stem, *reversed(path.parts[:-1])):
        for word in EVAL_NAMES:
            if name.lower().startswith(word):
                return word
    return TRAIN
