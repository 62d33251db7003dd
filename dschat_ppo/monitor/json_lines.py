"""A file of JSON lines that grows during a run, such as `samples.jsonl`, and is cut back when the run resumes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dschat_ppo.common.atomic_files import sync_entries, sync_file
from dschat_ppo.common.dist import is_main
from dschat_ppo.errors import StorageError


class JsonLines:
    """Rank 0 appends lines to a file; the other ranks write nothing. A `StorageError` is raised on rank 0 only.

    Save `saved_offset()` in the checkpoints of the run. A run that resumes sets `offset` to it before `begin`, which
    removes the lines after it: their steps run again. A run from scratch begins at offset 0. `begin` does not create
    the file; the first `append` does, also without lines.
    """

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0  # length in bytes at the checkpoint from which the run resumes

    def begin(self) -> None:
        """Cut the file back to `offset`, if it exists and is longer; of a shorter one, remove an incomplete line."""
        if not is_main() or not self.path.exists():
            return
        with storage_errors(self.path), self.path.open("rb+") as file:
            if file.seek(0, os.SEEK_END) >= self.offset:
                file.truncate(self.offset)
            else:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append one line for each object; NaN and infinity become null."""
        if not is_main():
            return
        content = "".join(f"{json.dumps(finite_or_null(line), allow_nan=False)}\n" for line in lines).encode()
        with storage_errors(self.path):
            is_new = not self.path.exists()
            with self.path.open("ab") as file:
                file.write(content)
            if is_new:
                sync_entries(self.path.parent)

    def saved_offset(self) -> int:
        """Length of the file in bytes, after syncing it to disk; 0 without a file and on ranks other than 0."""
        if not is_main() or not self.path.exists():
            return 0
        with storage_errors(self.path), self.path.open("rb") as file:
            sync_file(file.fileno())
            return file.seek(0, os.SEEK_END)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """An `OSError` of the block, which writes `path`, becomes a `StorageError` that names it and the way out."""
    try:
        yield
    except OSError as problem:
        raise StorageError(
            f"{path}: cannot be written ({problem.strerror or problem}); free space, then run the same command again"
        ) from problem


def finite_or_null(value: Any) -> Any:
    """`value`, of dicts, lists, texts and numbers, with None for each NaN and infinity, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite_or_null(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(item) for item in value]
    return value
