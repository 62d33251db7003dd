"""Data sets as flags name them, `LOCATION[:CONFIG][[SPLIT]][:WEIGHT|@ROWS]`, and where they are: files, folders, names
on the hub. Tells their splits and the parts of these; reads no row of a file.

    openai/gsm8k:main[train]     a configuration and a split of a hub data set
    data.jsonl:0.3               a file with its weight in a mixture
    folder@5000                  5,000 rows of a folder
    org/name:cfg[train[:10%]]:0.5

What exists on disk exactly as it is written is that file or folder, whatever characters its name holds.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, IterableDataset
from datasets.exceptions import DatasetGenerationError
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from huggingface_hub import metadata_load, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from dschat_ppo.common.atomic_files import sync_folder
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.data.parts import COMPRESSED, KINDS, SUPPORTED, FilePart, Part, SetPart, kind_of
from dschat_ppo.errors import UserError, in_one_line, nearest_path, reading

# data set of DeepSpeed-Chat -> (hub name, configuration), where the hub has another name or needs a configuration
HUB_NAMES: dict[str, tuple[str, str | None]] = {
    "mkqa-Chinese": ("mkqa", None),
    "mkqa-Japanese": ("mkqa", None),
    "Hello-SimpleAI/HC3-Chinese": ("Hello-SimpleAI/HC3-Chinese", "all"),
}
TRAIN = "train"
EVAL_NAMES = ("eval", "validation", "valid", "val", "dev", "test")
_MIXING = re.compile(r"([:@])([-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|inf|nan))$", re.IGNORECASE)
_SPLIT = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])+)\]$")  # it may hold slices in brackets
_CONFIG = re.compile(r":([^:]+)$")
_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}")
_STRAY = re.compile(  # files beside the data
    r"(dataset_infos?|dataset_dict|state|package|croissant)\.json"
    r"|(readme|licen[cs]e|copying|notice|changelog|citation|requirements)\b.*",
    re.IGNORECASE,
)
Files = dict[str, list[Path]]  # split -> its files in order


# What a flag says


@dataclass(frozen=True)
class DataSource:
    """One data set that a flag names.

    Attributes:
        spec: as written on the command line, for messages; a path in the working directory is relative.
        location: a file, a folder or a hub name; `~` is expanded.
        split: its training split, perhaps with a slice such as `train[:10%]`, or None.
        name: short, unique among the sources of a run; for metrics.
        weight: its share of a mixture in units of the other weights, above 0; None if the flag gives none.
        samples: number of its rows in a mixture, above 0; None for all.
    """

    spec: str
    flag: str
    location: str
    config: str | None
    split: str | None
    name: str
    weight: float | None
    samples: int | None


def parse_sources(specs: Sequence[str], flag: str, taken: Collection[str] = ()) -> list[DataSource]:
    """The data sets that `flag` names. Their names differ from those of other flags, `taken`."""
    sources: list[DataSource] = []
    names = set(taken)
    for spec in specs:
        location, config, split, weight, samples = _parse(spec, flag)
        name = _short_name(location)
        names.add(name := next(word for word in chain([name], (f"{name}_{n}" for n in count(2))) if word not in names))
        sources.append(DataSource(shown_path(spec), flag, location, config, split, name, weight, samples))
    whole = [source for source in sources if source.samples is None]  # `@ROWS` needs no weight
    weighted, bare = ([source.spec for source in whole if (source.weight is None) == lacks] for lacks in (False, True))
    if weighted and bare:
        raise UserError(
            f"{flag}: '{weighted[0]}' has a weight and '{bare[0]}' has none; give each data set a weight (:WEIGHT) or "
            "a number of rows (@ROWS), or none of them a weight"
        )
    return sources


def is_hub_name(location: str) -> bool:
    """Whether `location` is a hub name rather than a path; a path need not exist."""
    return not (
        os.path.lexists(location)
        or location.startswith((".", "/", "~"))
        or location.count("/") > 1
        or kind_of(location) is not None
    )


def _parse(spec: str, flag: str) -> tuple[str, str | None, str | None, float | None, int | None]:
    """(location, config, split, weight, samples) of one data set."""
    rest, config, split, weight, samples = os.path.expanduser(spec), None, None, None, None
    if not os.path.lexists(rest) and (found := _MIXING.search(rest)):
        rest, number = rest[: found.start()], found[2]
        if found[1] == ":":
            weight = float(number)
            if not 0 < weight < math.inf:
                raise UserError(f"{flag} {spec}: the weight '{number}' must be a finite number above 0")
        else:
            samples = int(number) if number.isdigit() else 0
            if samples == 0:
                raise UserError(f"{flag} {spec}: the number of rows '{number}' must be a whole number above 0")
    if not os.path.lexists(rest) and (found := _SPLIT.search(rest)):
        rest, split = rest[: found.start()], found[1].strip()
    if not os.path.lexists(rest) and (found := _CONFIG.search(rest)):
        rest, config = rest[: found.start()], found[1].strip()
    if rest == "local/jsonfile":
        raise UserError(
            f"{flag} {spec}: DeepSpeed-Chat reads data/train.json and data/eval.json under this name; give the files "
            "themselves: data/train.json with --data_format local/jsonfile, and --eval_data_path data/eval.json"
        )
    if not os.path.lexists(rest) and ("://" in spec or not rest or re.search(r"[:@\[\]]", rest)):
        raise UserError(
            f"{flag} '{spec}': no such file or folder, and no name of a data set of the hub; expected "
            "LOCATION[:CONFIG][[SPLIT]][:WEIGHT|@ROWS]"
        )
    return rest, config, split, weight, samples


def _short_name(location: str) -> str:
    """The last part of a location without the endings of data files, fit for the name of a metric."""
    name = Path(location).name if Path(location).name not in ("", "..") else Path(location).resolve().name
    for ending in (*COMPRESSED, *KINDS):
        if name.lower().endswith(ending):
            name = name[: -len(ending)]
    return re.sub(r"[^\w.-]+", "_", name).strip("_.") or "data"


# What is there


@dataclass(frozen=True)
class OpenSet:
    """A data set whose splits are known and not read yet, with the parts of each. A file may be in several splits."""

    source: DataSource
    splits: Mapping[str, Sequence[Part]]

    @property
    def what(self) -> str:
        """The data set with its flag, for messages."""
        return f"{self.source.flag} {self.source.location}"

    def parts(self, names: Sequence[str]) -> list[Part]:
        """The parts of these splits once each, files in the order of their paths. Refuses files that hold no data."""
        found = dict.fromkeys(part for name in names for part in self.splits[name])
        for part in found:
            if isinstance(part, FilePart):
                part.check()
        return sorted(found, key=lambda part: part.name if isinstance(part, FilePart) else "")

    def chosen(self) -> tuple[list[tuple[str, str]], list[str]]:
        """(the splits for training, each with its slice such as "train[:10%]" or "", those for evaluation). The hub
        gives at most one for evaluation."""
        names = list(self.splits)
        for_eval = [name for name in names if is_eval(name)]
        if self.source.split is None:
            found = [TRAIN] if TRAIN in names else [name for name in names if not is_eval(name)]
            if len(found) != 1:
                kind = "several training splits" if found else "no training split"
                raise UserError(
                    f"{self.what}: has {kind} ({', '.join(found or names)}); choose one, as in "
                    f"{self.example((found or names)[0])}"
                )
            cuts = [(found[0], "")]
        else:
            cuts = self.cuts(self.source.split)
            used, first = [name for name, _ in cuts], cuts[0][0]
            ending = first.removeprefix(TRAIN)  # rows of `test_sft` evaluate `train_sft`
            for_eval = [name for name in for_eval if first != ending and name not in used and name.endswith(ending)]
        return cuts, for_eval[:1] if is_hub_name(self.source.location) else for_eval

    def cuts(self, wanted: str) -> list[tuple[str, str]]:
        """The splits that `wanted` names, with slices, such as `train[:10%]+test`."""
        found = []
        for part in map(str.strip, wanted.split("+")):
            name, bracket, _ = part.partition("[")
            if name.strip() not in self.splits:
                raise UserError(f"{self.what}: has no split '{name.strip()}'; it has {', '.join(self.splits)}")
            found.append((name.strip(), part if bracket else ""))
        return found

    def example(self, split: str) -> str:
        """How to name a split of this data set."""
        return f"{self.source.location}{f':{self.source.config}' if self.source.config else ''}[{split}]"


def is_eval(split: str) -> bool:
    """Whether rows of a split are for evaluation."""
    return split.lower().startswith(EVAL_NAMES)


def open_set(source: DataSource, cache_dir: str | None, streaming: bool = False) -> OpenSet:
    """Find the parts of a data set. With `streaming` a hub data set is not downloaded."""
    what = f"{source.flag} {source.location}"
    path, config = Path(source.location), source.config
    # a builder such as `json` would read all such files of the working directory
    if is_hub_name(source.location) and source.location not in _PACKAGED_DATASETS_MODULES:
        name, usual = HUB_NAMES.get(source.location, (source.location, None))
        config = source.config or usual
        shown = source.location + (f":{source.config}" if source.config else "")
        if streaming:
            revision, streams = hub_stream(name, config, source.flag)
            return _splits(source, streams, shown, revision)
        found = hub_dataset(name, config, cache_dir, source.flag)
        if not isinstance(found, Path):
            return _splits(source, found, shown)
        path = found
    elif not os.path.lexists(path):
        raise UserError(f"{what}: no such file or folder{nearest_path(path)}")
    if not path.is_dir():
        if config is not None:
            raise UserError(f"{what}: a file has no configuration '{config}'; supported files: {SUPPORTED}")
        return OpenSet(source, {TRAIN: [FilePart(path, source.flag)]})
    folder = path / config if config else path
    if (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    ):
        with reading(f"{what}: cannot be read as a folder of save_to_disk"):
            saved = datasets.load_from_disk(str(folder))
        return _splits(source, {TRAIN: saved} if isinstance(saved, Dataset) else saved, str(folder))
    files = split_files(path, config, what, cache_dir)
    return OpenSet(source, {split: [FilePart(path, source.flag) for path in found] for split, found in files.items()})


def _splits(
    source: DataSource, found: Mapping[Any, Dataset | IterableDataset], shown: str, revision: str = ""
) -> OpenSet:
    """A data set that `datasets` gives; tables without rows do not count."""
    splits: dict[str, list[Part]] = {}
    for split, rows in found.items():
        if not isinstance(rows, Dataset) or len(rows):
            splits[str(split)] = [SetPart.of(f"{shown} ({split})", source.flag, rows, revision)]
    if not splits:
        raise UserError(f"{source.flag} {source.location}: has no split with rows")
    return OpenSet(source, splits)


# Folders


def split_files(folder: Path, config: str | None, what: str, cache_dir: str | None = None) -> Files:
    """The files of each split of a folder, sorted by path.

    The README.md of a clone of a hub data set says it, if it lists configurations. In any other folder, a file named
    `NAME-00000-of-00002` is of the split NAME; a file whose name, or whose folder's name, starts with one of
    `EVAL_NAMES` is of that split; all others are training files. Subfolders count only if the folder itself has no
    training file.

    `config` is a configuration in README.md or a subfolder, or None. `what` is for messages.
    """
    readme = folder / "README.md"
    if readme.is_file():
        with reading(f"{what}: the configurations of its README.md (FOLDER:CONFIG names one)"):
            listed: Any = {}
            root = cache_dir and os.path.expanduser(cache_dir)
            with suppress(ValueError):  # it is not UTF-8, or has no list of settings
                listed = metadata_load(readme) or {}
            if listed.get("configs"):  # a relative path such as `json` would name a builder of `datasets`
                listed = datasets.load_dataset_builder(str(folder.resolve()), config, cache_dir=root).config
                return {str(split): [Path(path) for path in paths] for split, paths in listed.data_files.items()}
    if config is not None:
        folder = folder / config
        if not folder.is_dir():
            raise UserError(f"{what}: has no configuration or subfolder '{config}'{nearest_path(folder)}")
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = filter(_is_seen, folders)
        found += [
            Path(place) / name for name in names if _is_seen(name) and kind_of(name) and not _STRAY.fullmatch(name)
        ]
    if not found:
        raise UserError(f"{what}: the folder holds no data file; supported are {SUPPORTED}")
    direct = [path for path in found if path.parent == folder]
    if any(not is_eval(_split_of(path, folder)) for path in direct):
        found = direct
    files: Files = {}
    for path in sorted(found):
        files.setdefault(_split_of(path, folder), []).append(path)
    return files


def _is_seen(name: str) -> bool:
    return not name.startswith(".") and name != "__MACOSX"


def _split_of(path: Path, folder: Path) -> str:
    """The split of a file by its name, then by the folders that it lies in."""
    stem = path.name.split(".")[0]
    if shard := _SHARD.match(stem):
        return shard[1]
    for name in (stem, *reversed(path.relative_to(folder).parts[:-1])):
        if words := [word for word in EVAL_NAMES if name.lower().startswith(word)]:
            return max(words, key=len)
    return TRAIN


# The hub


def hub_dataset(spec: str, config: str | None, root: str | None, flag: str = "--data_path") -> DatasetDict | Path:
    """The splits of a hub data set, through the cache of `datasets` in the folder `root`, None for its own. If the hub
    cannot be reached, that of an earlier download, or else the folder with its files that `hf download` has made."""
    try:
        with _hub(spec, flag):
            splits = datasets.load_dataset(spec, config, cache_dir=root and os.path.expanduser(root))
    except UserError as problem:
        if isinstance(problem.__cause__, ConnectionError):
            with suppress(LocalEntryNotFoundError, HFValidationError):
                folder = Path(snapshot_download(spec, repo_type="dataset", local_files_only=True))
                logger().info(f"data: {spec}: the hub cannot be reached; an earlier download is used: {folder}")
                return folder
        raise
    for rows in splits.values():
        for file in rows.cache_files:
            sync_folder(Path(file["filename"]).parent)
    return splits


def hub_stream(spec: str, config: str | None, flag: str = "--data_path") -> tuple[str, dict[str, IterableDataset]]:
    """(what identifies the revision of a hub data set, its splits, to be read from the hub row by row)."""
    with _hub(spec, flag):
        builder = datasets.load_dataset_builder(spec, config)
        splits = builder.as_streaming_dataset()
    return str(builder.hash), {str(name): rows for name, rows in splits.items()}


@contextmanager
def _hub(spec: str, flag: str) -> Iterator[None]:
    """Tell in one line what is wrong with a hub data set, and what to do."""
    try:
        with reading(spec):
            yield
    except UserError as problem:
        cause = problem.__cause__ or problem
        if isinstance(cause, DatasetGenerationError):  # its own text names no cause
            cause = cause.__cause__ or cause
        text, what = in_one_line(cause), "neither a local file or folder nor a hub data set that can be read"
        hint = ""
        if isinstance(cause, PermissionError) or getattr(cause, "errno", None) in (errno.EROFS, errno.ENOSPC):
            what, hint = "cannot be stored", "; --data_output_path names another folder"
        elif isinstance(cause, ConnectionError):
            hint = f"; download it on a machine with network and give the local folder{nearest_path(spec)}"
        elif "config" in text.lower():
            hint = f"; a configuration is named as in {spec}:CONFIG"
        raise UserError(f"{flag} {spec}: {what}: {text}{hint or nearest_path(spec)}") from cause
