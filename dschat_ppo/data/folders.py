"""Folders of data files: which files belong to which split. Reads names and small descriptions, not the data."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from dschat_ppo.data.sources import SUPPORTED, kind_of
from dschat_ppo.errors import UserError, reading

EVAL_NAMES = ("eval", "validation", "valid", "val", "dev", "test")
TRAIN = "train"
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
_OF_MODELS = ("adapter_config.json", "tokenizer_config.json", "model.safetensors", "model.safetensors.index.json")
Files = dict[str, list[Path]]  # split -> its files in order


def split_files(folder: Path, config: str | None, what: str) -> Files:
    """The files of each split of a folder, sorted by path.

    The README.md of a clone of a hub data set says it, if it lists configurations. In any other folder, a file named
    `NAME-00000-of-00002` is of the split NAME; a file whose name, or whose folder's name, starts with "eval",
    "validation", "valid", "val", "dev" or "test" is of that split; all others are training files. Subfolders count only
    if the folder itself has no training file.

    `config` is a configuration in README.md or a subfolder; None if there is only one. `what` is for messages.
    """
    if marks := [name for name in _OF_MODELS if (folder / name).is_file()]:
        raise UserError(
            f"{what}: the folder holds a model ({marks[0]}), not data; name the files or folder of the data"
        )
    listed = _configs(folder, what)
    if listed:
        return _configured_files(folder, listed, config, what)
    if config is not None:
        if not (folder / config).is_dir() or config in (".", ".."):
            names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and _is_seen(entry.name))
            shown = ", ".join(names) or "none"
            raise UserError(f"{what}: has no configuration or subfolder '{config}' (subfolders: {shown})")
        folder = folder / config
    found = _data_files(folder)
    if not found:
        raise UserError(f"{what}: the folder holds no data file; supported are {SUPPORTED}")
    direct = {path: _split_of(path, folder) for path in found if path.parent == folder}
    if any(not is_eval(split) for split in direct.values()):
        return _by_split(direct)
    groups = sorted({str(Path(*_group(path, folder))) for path in found})
    if len(groups) > 1:
        raise UserError(
            f"{what}: holds data in several folders ({', '.join(groups[:8])}); name one of them as the configuration, "
            f"as in {folder}:{next(group for group in groups if group != '.')}"
        )
    return _by_split({path: _split_of(path, folder) for path in found})


def is_eval(split: str) -> bool:
    """Whether rows of a split are for evaluation."""
    return split.lower().startswith(EVAL_NAMES)


def find_split(splits: list[str], wanted: str) -> str | None:
    """The split that `wanted` names, exactly or by another word for it ("val" for "validation"); None if none does."""
    if wanted in splits:
        return wanted
    meaning = _SYNONYMS.get(wanted.lower(), wanted.lower())
    return next((name for name in splits if _SYNONYMS.get(name.lower(), name.lower()) == meaning), None)


def _by_split(splits: dict[Path, str]) -> Files:
    files: Files = {}
    for path, split in splits.items():
        files.setdefault(split, []).append(path)
    return files


def _is_seen(name: str) -> bool:
    return not name.startswith(".") and name != "__MACOSX"


def _data_files(folder: Path) -> list[Path]:
    """Data files below a folder, sorted by path, without hidden ones and those that only describe the data."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if _is_seen(name)]
        found += [
            Path(place) / name
            for name in names
            if _is_seen(name) and kind_of(Path(name)) is not None and not _STRAY.fullmatch(name)
        ]
    return sorted(found)


def _split_of(path: Path, folder: Path) -> str:
    """The split of a file by its name, then by the folders that it lies in."""
    stem = path.name.split(".")[0]
    shard = _SHARD.match(stem)
    if shard:
        return shard[1]
    for name in (stem, *reversed(path.relative_to(folder).parts[:-1])):
        word = next((word for word in sorted(EVAL_NAMES, key=len)[::-1] if name.lower().startswith(word)), None)
        if word is not None:
            return word
    return TRAIN


def _group(path: Path, folder: Path) -> tuple[str, ...]:
    """The folders that a file lies in, above the first one that is named like a split; "data" alone does not count."""
    parts = path.relative_to(folder).parts[:-1]
    names_split = [part.lower() in (TRAIN, "training") or is_eval(part) for part in parts]
    parts = parts[: names_split.index(True)] if True in names_split else parts
    return () if parts == ("data",) else parts


def _configs(folder: Path, what: str) -> list[dict[str, Any]]:
    """The configurations with data files in the head of README.md; [] if it has none."""
    path = folder / "README.md"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in [line.strip() for line in lines[1:]]:
        return []
    end = [line.strip() for line in lines].index("---", 1)
    with reading(f"{what}: the head of its README.md is not YAML"):
        head = yaml.safe_load("\n".join(lines[1:end]))
    listed = head.get("configs") if isinstance(head, dict) else None
    entries = listed if isinstance(listed, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and "data_files" in entry]


def _configured_files(folder: Path, listed: list[dict[str, Any]], config: str | None, what: str) -> Files:
    by_name = {str(entry.get("config_name", "default")): entry for entry in listed}
    names = ", ".join(by_name)
    if config is None:
        chosen = [name for name, entry in by_name.items() if entry.get("default") is True or name == "default"]
        chosen = chosen or (list(by_name) if len(by_name) == 1 else [])
        if not chosen:
            first = next(iter(by_name))
            raise UserError(f"{what}: has the configurations {names}; name one, as in {folder}:{first}")
        config = chosen[0]
    if config not in by_name:
        raise UserError(f"{what}: has no configuration '{config}'; it has {names}")
    entry = by_name[config]
    base = folder / str(entry.get("data_dir") or ".")
    files: Files = {}
    for split, pattern in _patterns(entry["data_files"]):
        with reading(f"{what}: the pattern '{pattern}' in its README.md"):
            found = sorted(path for path in base.glob(pattern) if path.is_file() and kind_of(path) is not None)
        files.setdefault(split, []).extend(path for path in found if path not in files.get(split, []))
    missing = [split for split, paths in files.items() if not paths]
    if not files or missing:
        lack = f"the split {missing[0]}" if missing else "any split"
        raise UserError(f"{what}: its README.md names files of {lack} that are not there; download the whole data set")
    return files


def _patterns(data_files: Any) -> list[tuple[str, str]]:
    """(split, pattern) of each entry of `data_files`, which may be a pattern, a list or split -> patterns."""
    if isinstance(data_files, str):
        return [(TRAIN, data_files)]
    if isinstance(data_files, dict):
        return [(str(split), pattern) for split, part in data_files.items() for _, pattern in _patterns(part)]
    found: list[tuple[str, str]] = []
    for entry in data_files if isinstance(data_files, list) else []:
        if isinstance(entry, dict):
            found += [(str(entry.get("split", TRAIN)), pattern) for _, pattern in _patterns(entry.get("path"))]
        else:
            found.append((TRAIN, str(entry)))
    return found
