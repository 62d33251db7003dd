"""Find a data set: a file, a folder, or a name on the hub. Tells its splits and their parts; reads no row of a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import yaml
from datasets import Dataset, DatasetDict
from datasets.data_files import sanitize_patterns
from datasets.naming import camelcase_to_snakecase
from huggingface_hub import constants

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
_SYNONYMS = {
    "training": TRAIN, "valid": "validation", "val": "validation", "dev": "validation", "eval": "test",
    "evaluation": "test", "testing": "test",
}  # fmt: skip
_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}")
_STRAY = re.compile(
    r"(dataset_infos?|dataset_dict|state|package|package-lock|tsconfig|croissant)\.json"
    r"|(readme|licen[cs]e|copying|notice|changelog|citation|requirements)\b.*",
    re.IGNORECASE,
)
_HEAD = re.compile(r"\s*---[ \t]*\n(.*?)\n---[ \t]*(\n|$)", re.DOTALL)  # of README.md
_OF_MODELS = ("adapter_config.json", "tokenizer_config.json", "model.safetensors", "model.safetensors.index.json")
_ANSWER_SECONDS = 5.0  # for the hub to answer before it counts as unreachable
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
            first, used = cuts[0][0], [name for name, _ in cuts]
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
        return f"{self.source.location}{f':{self.source.config}' if self.source.config else ''}[{split}]"


def open_set(source: DataSource, cache_dir: str | None, streaming: bool = False) -> OpenSet:
    """Find the parts of a data set. With `streaming` a hub data set is not downloaded."""
    what = f"{source.flag} {source.location}"
    if cache_dir is not None:
        cache_dir = os.path.expanduser(cache_dir)
        try:
            os.makedirs(cache_dir, exist_ok=True)
        except OSError as problem:
            raise UserError(f"--data_output_path {cache_dir}: cannot be written ({problem.strerror})") from None
    path, config = Path(source.location), source.config
    if is_hub_name(source.location):
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
            return _tables(source, found, shown, what)
        path = found
    folder = path / config if config else path
    if (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("state.json", "dataset_info.json")
    ):
        with reading(f"{what}: cannot be read as a folder of save_to_disk"):
            saved = datasets.load_from_disk(str(folder))
        return _tables(source, DatasetDict({TRAIN: saved}) if isinstance(saved, Dataset) else saved, str(folder), what)
    if path.is_dir():
        files = split_files(path, config, what)
    elif not os.path.lexists(path):
        raise UserError(f"{what}: no such file or folder{nearest_path(path)}")
    elif config is not None:
        raise UserError(f"{what}: a file has no configuration '{config}'; supported files: {SUPPORTED}")
    else:
        files = {TRAIN: [path]}
    paths = sorted({path for found_files in files.values() for path in found_files}, key=str)
    numbers = {path: number for number, path in enumerate(paths)}
    return OpenSet(
        source,
        [FilePart(path, source.flag) for path in paths],
        {split: [numbers[path] for path in found_files] for split, found_files in files.items()},
    )


def _tables(source: DataSource, found: DatasetDict, shown: str, what: str) -> OpenSet:
    """A data set whose splits are tables; those without rows do not count."""
    splits = {str(split): rows for split, rows in found.items() if len(rows)}
    if not splits:
        raise UserError(f"{what}: has no split with rows")
    parts = [TablePart(f"{shown} ({split})", source.flag, rows) for split, rows in splits.items()]
    return OpenSet(source, parts, {split: [number] for number, split in enumerate(splits)})


def is_eval(split: str) -> bool:
    """Whether rows of a split are for evaluation."""
    return split.lower().startswith(EVAL_NAMES)


def find_split(splits: list[str], wanted: str) -> str | None:
    """The split that `wanted` names, exactly or by another word for it ("val" for "validation"); None if none does."""
    if wanted in splits:
        return wanted
    meaning = _SYNONYMS.get(wanted.lower(), wanted.lower())
    return next((name for name in splits if _SYNONYMS.get(name.lower(), name.lower()) == meaning), None)


# Folders


def split_files(folder: Path, config: str | None, what: str) -> Files:
    """The files of each split of a folder, sorted by path.

    The README.md of a clone of a hub data set says it, if it lists configurations. In any other folder, a file named
    `NAME-00000-of-00002` is of the split NAME; a file whose name, or whose folder's name, starts with one of
    `EVAL_NAMES` is of that split; all others are training files. Subfolders count only if the folder itself has no
    training file.

    `config` is a configuration in README.md or a subfolder; None if there is only one. `what` is for messages.
    """
    if marks := [name for name in _OF_MODELS if (folder / name).is_file()]:
        raise UserError(
            f"{what}: the folder holds a model ({marks[0]}), not data; name the files or folder of the data"
        )
    if listed := _configs(folder, what):
        return _configured_files(folder, listed, config, what)
    if config is not None:
        if not (folder / config).is_dir() or config in (".", ".."):
            names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and _is_seen(entry.name))
            shown = ", ".join(names) or "none"
            raise UserError(f"{what}: has no configuration or subfolder '{config}' (subfolders: {shown})")
        folder = folder / config
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
    elif len(groups := sorted({_group(path, folder) for path in found})) > 1:
        raise UserError(
            f"{what}: holds data in several folders ({', '.join(groups[:8])}); name one of them as the configuration, "
            f"as in {folder}:{next(group for group in groups if group != '.')}"
        )
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


def _group(path: Path, folder: Path) -> str:
    """The folders that a file lies in, above the first one that is named like a split; "data" alone does not count."""
    parts = path.relative_to(folder).parts[:-1]
    names_split = [part.lower() in (TRAIN, "training") or is_eval(part) for part in parts]
    parts = parts[: names_split.index(True)] if True in names_split else parts
    return str(Path(*parts)) if parts != ("data",) else "."


def _configs(folder: Path, what: str) -> dict[str, dict[str, Any]]:
    """The configurations with data files in the head of README.md."""
    path = folder / "README.md"
    head = _HEAD.match(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    if head is None:
        return {}
    with reading(f"{what}: the head of its README.md is not YAML"):
        settings = yaml.safe_load(head[1])
    listed = settings.get("configs") if isinstance(settings, dict) else None
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    return {str(entry.get("config_name", "default")): entry for entry in entries if "data_files" in entry}


def _configured_files(folder: Path, listed: dict[str, dict[str, Any]], config: str | None, what: str) -> Files:
    names = ", ".join(listed)
    if config is None:
        chosen = [name for name, entry in listed.items() if entry.get("default") is True or name == "default"]
        chosen = chosen or (list(listed) if len(listed) == 1 else [])
        if not chosen:
            raise UserError(f"{what}: has the configurations {names}; name one, as in {folder}:{next(iter(listed))}")
        config = chosen[0]
    if config not in listed:
        raise UserError(f"{what}: has no configuration '{config}'; it has {names}")
    base = folder / str(listed[config].get("data_dir") or ".")
    files: Files = {}
    with reading(f"{what}: the data_files of '{config}' in its README.md"):
        for split, patterns in sanitize_patterns(listed[config]["data_files"]).items():
            found = [path for pattern in patterns for path in sorted(base.glob(pattern)) if path.is_file()]
            files[str(split)] = list(dict.fromkeys(path for path in found if kind_of(path)))
    missing = [split for split, paths in files.items() if not paths]
    if not files or missing:
        lack = f"the split {missing[0]}" if missing else "any split"
        raise UserError(f"{what}: its README.md names files of {lack} that are not there; download the whole data set")
    return files


# The hub


def hub_dataset(
    spec: str, config_name: str | None, root: str | None, flag: str = "--data_path"
) -> datasets.DatasetDict | Path:
    """The splits of a hub data set, through the cache of `datasets`; or, if the hub cannot be reached, the folder with
    its files that `hf download` has made.

    Without network, and with `HF_HUB_OFFLINE`, only the cache is used. If the cached files cannot be read, or hold
    fewer rows than the data set declares, they are made again from the downloaded files. `root` is the folder of the
    cache; None for that of `datasets`. Data sets that are scripts are refused.
    """
    unreachable = _why_unreachable(spec)
    cached = _cached_configs(spec, root)
    if unreachable and config_name is None and len(cached) > 1:  # `datasets` would take the latest one
        raise UserError(
            f"{flag} {spec}: the configurations {', '.join(cached)} were downloaded, and the hub cannot be reached "
            f"({unreachable}); name one, as in {spec}:{cached[0]}"
        )
    with _offline(unreachable != ""):
        try:
            with reading(f"{flag} {spec}"):
                splits = _load_intact(partial(datasets.load_dataset, spec, config_name, cache_dir=root))
        except UserError as problem:
            if unreachable and not cached and (folder := _downloaded_folder(spec)) is not None:
                logger().info(f"data: {spec}: the hub cannot be reached; an earlier download is used: {folder}")
                return folder
            cause = problem.__cause__ or problem
            explained = _explain(cause, spec, config_name, unreachable)
            raise UserError(f"{flag} {spec}: {explained}{nearest_path(spec)}") from cause
    if unreachable:
        names = ", ".join(sorted({str(rows.info.config_name) for rows in splits.values()}))
        logger().info(f"data: {spec}: the hub cannot be reached; an earlier download is used (configuration {names})")
    for rows in splits.values():
        for file in rows.cache_files:
            sync_folder(Path(file["filename"]).parent)
    return splits


def hub_stream(
    spec: str, config_name: str | None, flag: str = "--data_path"
) -> tuple[str, dict[str, datasets.IterableDataset]]:
    """(what identifies the revision of a hub data set, its splits, to be read from the hub row by row)."""
    unreachable = _why_unreachable(spec)
    if unreachable:
        raise UserError(
            f"{flag} {spec}: is no local file or folder, and the hub, from which --streaming would read it, cannot be "
            f"reached ({unreachable}); give a local folder, or if it was downloaded before, omit --streaming"
        )
    try:
        with reading(f"{flag} {spec}"):
            builder = datasets.load_dataset_builder(spec, config_name)
            splits = builder.as_streaming_dataset()
    except UserError as problem:
        cause = problem.__cause__ or problem
        raise UserError(f"{flag} {spec}: {_explain(cause, spec, config_name, unreachable)}") from cause
    return str(builder.hash), {str(name): rows for name, rows in splits.items()}


def _load_intact(load: partial[datasets.DatasetDict]) -> datasets.DatasetDict:
    try:
        splits = load()
        is_intact = all(
            len(rows) == rows.info.splits[name].num_examples for name, rows in splits.items() if rows.info.splits
        )
    except ValueError:  # pyarrow and JSON errors; any other cause is raised again by the second attempt
        is_intact = False
    return splits if is_intact else load(download_mode=datasets.DownloadMode.REUSE_CACHE_IF_EXISTS)


def _why_unreachable(spec: str) -> str:
    """Why the hub does not answer, or "". `datasets` alone would try for half a minute to find out."""
    if datasets.config.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        with reading("no answer"):  # the errors of its HTTP library are not part of its interface
            huggingface_hub.HfApi().dataset_info(spec, timeout=_ANSWER_SECONDS)
    except UserError as problem:
        answers = (huggingface_hub.errors.HfHubHTTPError, ValueError)  # what is wrong with the name, `datasets` says
        return "" if isinstance(problem.__cause__, answers) else in_one_line(problem)
    return ""


def _cached_configs(spec: str, root: str | None) -> list[str]:
    """Configurations of a data set in the cache of `datasets`."""
    *owner, name = spec.split("/")
    place = Path(root or datasets.config.HF_DATASETS_CACHE) / "___".join([*owner, camelcase_to_snakecase(name)])
    return sorted({path.parent.parent.name for path in place.glob("*/*/*") if path.is_dir()})


def _downloaded_folder(spec: str) -> Path | None:
    """The files of a data set in the cache of the hub, as `hf download` leaves them; None if they are not there."""
    try:
        return Path(huggingface_hub.snapshot_download(spec, repo_type="dataset", local_files_only=True))
    except (huggingface_hub.errors.LocalEntryNotFoundError, huggingface_hub.errors.HFValidationError):
        return None


@contextmanager
def _offline(wanted: bool) -> Iterator[None]:
    """Let `datasets` use its cache alone. It offers this only as a setting of the process."""
    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if wanted:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _explain(problem: BaseException, spec: str, config_name: str | None, unreachable: str) -> str:
    """What is wrong and what to do, in one line."""
    if isinstance(problem, datasets.exceptions.DatasetGenerationError):  # its own text names no cause
        problem = problem.__cause__ or problem
    text = in_one_line(problem)
    if "scripts are no longer supported" in text or "trust_remote_code" in text:
        return (
            "is a loading script, which would run code of others; download the files of its revision "
            "refs/convert/parquet and give the local folder"
        )
    if "Available configs in the cache" in text and unreachable:
        return f"its configuration '{config_name}' was not downloaded, and the hub cannot be reached ({text})"
    if "onfig name is missing" in text or "BuilderConfig" in text:
        chosen = f"has no configuration '{config_name}'" if config_name else "has several configurations"
        return f"{chosen}; name one, as in {spec}:NAME ({text})"
    if unreachable:
        return (
            f"is no local file or folder, was not downloaded before, and the hub cannot be reached ({unreachable}); "
            "download it on a machine with network and give the local folder"
        )
    return f"neither a local file or folder nor a readable hub data set: {text}"
