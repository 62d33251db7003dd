"""Find a data set: a file, a folder, or a name on the hub. Tells its splits and their parts; reads no row of a file."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from dschat_ppo.data.parts import FilePart, HubPart, Part, TablePart
from dschat_ppo.data.sources import SUPPORTED, DataSource, is_hub_name, kind_of
from dschat_ppo.errors import UserError, in_one_line, nearest_path, reading

# data set of DeepSpeed-Chat -> (hub name, configuration), where the hub has another name or needs a configuration
HUB_NAMES: dict[str, tuple[str, str | None]] = {
    "mkqa-Chinese": ("mkqa", None),
    "mkqa-Japanese": ("mkqa", None),
    "Hello-SimpleAI/HC3-Chinese": ("Hello-SimpleAI/HC3-Chinese", "all"),
}
TRAIN = "train"
EVAL_NAMES = ("eval", "validation", "valid", "val", "dev", "test")
_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}")
_STRAY = re.compile(  # files beside the data
    r"(dataset_infos?|dataset_dict|state|package|croissant)\.json"
    r"|(readme|licen[cs]e|copying|notice|changelog|citation|requirements)\b.*",
    re.IGNORECASE,
)
Files = dict[str, list[Path]]  # split -> its files in order


@dataclass(frozen=True)
class OpenSet:
    """A data set whose splits are known and not read yet: the numbers of the parts of each. A file may be in several
    splits."""

    source: DataSource
    parts: Sequence[Part]
    splits: Mapping[str, Sequence[int]]

    @property
    def what(self) -> str:
        """The data set with its flag, for messages."""
        return f"{self.source.flag} {self.source.location}"

    def numbered(self, names: Sequence[str]) -> list[tuple[int, Part]]:
        """The parts of these splits, with their numbers, once each. Refuses files that hold no data."""
        found = [(number, self.parts[number]) for number in sorted({n for name in names for n in self.splits[name]})]
        for _, part in found:
            if isinstance(part, FilePart):
                part.check()
        return found

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
            parts = [
                HubPart(f"{shown} ({split})", source.flag, rows, f"{shown} {split} {revision}", rows.state_dict())
                for split, rows in streams.items()
            ]
            return OpenSet(source, parts, {split: [number] for number, split in enumerate(streams)})
        found = hub_dataset(name, config, cache_dir, source.flag)
        if not isinstance(found, Path):
            return _tables(source, found, shown)
        path = found
    elif not os.path.lexists(path):
        raise UserError(f"{what}: no such file or folder{nearest_path(path)}")
    if not path.is_dir():
        if config is not None:
            raise UserError(f"{what}: a file has no configuration '{config}'; supported files: {SUPPORTED}")
        return OpenSet(source, [FilePart(path, source.flag)], {TRAIN: [0]})
    folder = path / config if config else path
    if (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    ):
        with reading(f"{what}: cannot be read as a folder of save_to_disk"):
            saved = datasets.load_from_disk(str(folder))
        return _tables(source, DatasetDict({TRAIN: saved}) if isinstance(saved, Dataset) else saved, str(folder))
    files = split_files(path, config, what, cache_dir)
    paths = sorted({path for found_files in files.values() for path in found_files}, key=str)
    numbers = {path: number for number, path in enumerate(paths)}
    splits = {split: [numbers[path] for path in found_files] for split, found_files in files.items()}
    return OpenSet(source, [FilePart(path, source.flag) for path in paths], splits)


def _tables(source: DataSource, found: DatasetDict, shown: str) -> OpenSet:
    """A data set whose splits are tables; those without rows do not count."""
    splits = {str(split): rows for split, rows in found.items() if len(rows)}
    if not splits:
        raise UserError(f"{source.flag} {source.location}: has no split with rows")
    parts = [TablePart(f"{shown} ({split})", source.flag, rows) for split, rows in splits.items()]
    return OpenSet(source, parts, {split: [number] for number, split in enumerate(splits)})


def is_eval(split: str) -> bool:
    """Whether rows of a split are for evaluation."""
    return split.lower().startswith(EVAL_NAMES)


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
        text, hint = in_one_line(cause), ""
        if isinstance(cause, PermissionError) or getattr(cause, "errno", None) in (errno.EROFS, errno.ENOSPC):
            told = f"{flag} {spec}: cannot be stored ({text}); --data_output_path names another folder"
            raise UserError(told) from cause
        if isinstance(cause, ConnectionError):
            hint = "; download it on a machine with network and give the local folder"
        elif "config" in text.lower():
            hint = f"; a configuration is named as in {spec}:CONFIG"
        what = f"{flag} {spec}: neither a local file or folder nor a hub data set that can be read"
        raise UserError(f"{what}: {text}{hint}{nearest_path(spec)}") from cause
