"""Rows that are kept from one run to the next: as they were written, or made again.

`datasets` gives a file its name before its content is on the disk. After a loss of power such a file can be empty, cut
or full of zeros under a name that counts, and one that is cut between two batches reads as a shorter table. So each
entry here is written and synced beside its place, then renamed into it, with the size and the SHA-256 of each file; one
that is not as it was written is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import datasets
from datasets import Dataset
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.atomic_files import (
    PARTIAL,
    checksum,
    empty_folder,
    make_folder,
    remove_folder,
    replace_folder,
    sync_folder,
    write_file,
)
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.stop_requests import end_if_asked

POLL_SECONDS = 0.5
_FILES = "files.json"  # written last: name -> size and SHA-256 of each file, in the order of the rows


def cached_dataset(root: str | None, key: str, make: Callable[[Path], Dataset]) -> Dataset:
    """The rows of an entry of the cache.

    Args:
        root: folder of the cache; None for that of `datasets`.
        key: names the rows by all that they depend on.
        make: is given a folder, and returns the rows, of which there are some, in Arrow files that it wrote below it.

    Returns:
        The rows, mapped from their files, with `key` as their fingerprint.

    Raises:
        UserError: the cache cannot be written.
        StopRequested: the run is to stop while another process makes the entry.
    """
    folder = Path(root or datasets.config.HF_DATASETS_CACHE).expanduser() / "dschat_ppo" / key
    names = _whole_files(folder)
    if names is None:
        with _alone(folder):
            names = _whole_files(folder) or _make(folder, make)  # another process may have made it meanwhile
    rows = datasets.concatenate_datasets([Dataset.from_file(str(folder / name)) for name in names])
    rows._fingerprint = key
    return rows


def hub_dataset(spec: str, config_name: str | None, root: str | None) -> datasets.DatasetDict:
    """The splits of a hub data set, from the files that `datasets` makes of it in its cache.

    Files that cannot be read, or hold fewer rows than there should be, are made again from what was downloaded.

    Args:
        spec: name on the hub.
        config_name: its configuration, or None.
        root: folder of the cache; None for that of `datasets`.
    """
    load = partial(datasets.load_dataset, spec, config_name, cache_dir=root)
    try:
        found = load()
        is_whole = all(
            len(rows) == rows.info.splits[name].num_examples for name, rows in found.items() if rows.info.splits
        )
    except ValueError:  # of pyarrow and of JSON; where something else is wrong it is raised once more
        is_whole = False
    if not is_whole:
        found = load(download_mode=datasets.DownloadMode.REUSE_CACHE_IF_EXISTS)
    for rows in found.values():
        for file in rows.cache_files:
            sync_folder(Path(file["filename"]).parent)
    return found


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of an entry, so that no other process makes it. The kernel releases it when its holder ends."""
    lock, said = FileLock(f"{folder}.lock"), False
    while not lock.is_locked:
        try:
            make_folder(folder.parent)
            lock.acquire(timeout=POLL_SECONDS)
        except Timeout:
            if not said:
                logger().info(f"data: another process prepares {folder}; waiting for it")
            said = True
            end_if_asked("waited for prepared data")
        except OSError as problem:
            raise UserError(
                f"{folder.parent}: cannot be written ({problem.strerror}), and prepared data are kept there; name "
                "another folder with --data_output_path"
            ) from None
    try:
        yield
    finally:
        lock.release()


def _make(folder: Path, make: Callable[[Path], Dataset]) -> list[str]:
    if folder.exists():
        logger().warning(f"data: {folder} is damaged, so it is made again")
    unfinished = empty_folder(folder.with_name(f"{folder.name}{PARTIAL}"))
    made = make(empty_folder(unfinished / "work"))
    names = []
    for number, file in enumerate(made.cache_files):
        names.append(f"rows_{number:05d}.arrow")
        os.replace(file["filename"], unfinished / names[-1])
    remove_folder(unfinished / "work")
    content = {
        name: {"bytes": (unfinished / name).stat().st_size, "sha256": checksum(unfinished / name)} for name in names
    }
    write_file(unfinished / _FILES, json.dumps(content, indent=1).encode())
    replace_folder(folder, unfinished)
    return names


def _whole_files(folder: Path) -> list[str] | None:
    """Names of the files of an entry, in the order of their rows; None: there is none, or it is damaged."""
    try:
        content = json.loads((folder / _FILES).read_bytes())
        sizes_differ = any((folder / name).stat().st_size != entry["bytes"] for name, entry in content.items())
        if sizes_differ or any(checksum(folder / name) != entry["sha256"] for name, entry in content.items()):
            return None
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ):  # of a file that is gone, or is not what we wrote
        return None
    return list(content)


def file_key(path: Path, *settings: object) -> str:
    """Key of a data file as a table: path, size, time of the last change, and how it is read."""
    found = path.stat()
    return _digest(str(path.resolve()), found.st_size, found.st_mtime_ns, datasets.__version__, *settings)


def token_key(rows: Dataset, tokenizer: PreTrainedTokenizerBase, *settings: object) -> str:
    """Key of rows as tokens: the rows, tokenizer, template and settings."""
    words = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(tokenizer)
    return _digest(rows._fingerprint, words, tokenizer.chat_template, tokenizer.special_tokens_map, *settings)


def _digest(*parts: object) -> str:
    return hashlib.sha256("\x00".join(map(str, parts)).encode()).hexdigest()[:32]
