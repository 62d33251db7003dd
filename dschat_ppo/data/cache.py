"""Cache of prepared data that survives a power loss.

`datasets` renames a file before its content is on the disk. After a power loss such a file can be
empty, truncated (then it reads as a shorter table) or full of zeros. An entry of this cache is
therefore written and synced in a temporary folder, and then renamed: a folder with its final name
is complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import datasets
import tokenizers
import transformers
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.atomic_files import (
    PARTIAL,
    empty_folder,
    locked,
    make_folder,
    remove_folder,
    replace_folder,
    way_out,
)
from dschat_ppo.errors import UserError, reading

_ENDS = 2**16  # bytes at either end of a data file in its key


def cached(root: str | None, key: str, write: Callable[[Path], object]) -> Dataset:
    """The rows of the entry `key` of the cache below `root` (None: that of `datasets`),
    memory-mapped; `key` is their fingerprint. If there is no such entry, `write` writes
    `rows_00000.arrow` and so on to an empty folder. `StopRequested` on a stop request while another
    process makes the entry."""
    folder = Path(root or datasets.config.HF_DATASETS_CACHE).expanduser() / "dschat_ppo" / key
    unfinished = folder.with_name(f"{key}{PARTIAL}")
    try:
        if not folder.is_dir():
            make_folder(folder.parent)
            waits = f"data: another process prepares {folder}; waiting for it"
            with locked(folder.with_name(f"{key}.lock"), waits, "waited for prepared data"):
                # otherwise another process has made the entry in the meantime
                if not folder.is_dir():
                    try:
                        write(empty_folder(unfinished))
                        replace_folder(folder, unfinished)
                    finally:
                        remove_folder(unfinished)  # what a failure leaves may have filled the disk
    except OSError as problem:
        where = str(folder.parent)
        if root:
            where = f"--data_output_path {root}"
        raise UserError(
            f"{where}: prepared data cannot be written there ({problem.strerror or problem});"
            f" {way_out(problem.errno)}, or name another folder with --data_output_path"
        ) from None
    with reading(f"{folder}: prepared data cannot be read; remove this folder"):
        # by name: `Dataset.map` writes the files of rows made from these into this folder too
        files = sorted(folder.glob("rows_*.arrow"))
        rows = datasets.concatenate_datasets([Dataset.from_file(str(file)) for file in files])
    rows._fingerprint = key
    return rows


def rows_key(*made_from: object) -> str:
    """Key of rows as they are read: what they are made from and how, and the code that does it."""
    return _digest(datasets.__version__, _code(), *made_from)


def file_key(path: Path) -> str:
    """Key of a data file in its place: path, the time of its last change (also where a tool that
    copies files keeps the modification time), and its content as `content_key` sees it."""
    return _digest(str(path.resolve()), path.stat().st_ctime_ns, content_key([path]))


def content_key(paths: Sequence[Path]) -> str:
    """What identifies data files wherever they lie, without reading them whole at each start:
    names, sizes and ends."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()


def token_key(content: str, tokenizer: PreTrainedTokenizerBase, *settings: object) -> str:
    """Key of token rows: what identifies the data rows, tokenizer, chat template, settings, and the
    code that makes them."""
    if tokenizer.is_fast:
        vocabulary = tokenizer.backend_tokenizer.to_str()
    else:
        vocabulary = sorted(tokenizer.get_vocab().items())
    made_by = (_code(), transformers.__version__, tokenizers.__version__)
    special = tokenizer.special_tokens_map
    return _digest(content, vocabulary, tokenizer.chat_template, special, *made_by, *settings)


@cache
def _code() -> str:
    """Digest of the sources of this package: other code may read the same rows differently."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return _digest(*[path.read_text(encoding="utf-8") for path in files])


def _digest(*values: object) -> str:
    """A hash of the texts of values."""
    return hashlib.sha256("\x00".join(map(str, values)).encode()).hexdigest()[:32]
