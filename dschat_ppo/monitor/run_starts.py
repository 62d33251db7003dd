"""`starts.jsonl`: when a run started and resumed, and with which versions of libraries."""

from __future__ import annotations

import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import dschat_ppo
from dschat_ppo.errors import StorageError

STARTS = "starts.jsonl"
_LIBRARIES = ("torch", "deepspeed", "transformers", "accelerate", "datasets", "tokenizers", "peft", "bitsandbytes")


def record_start(folder: Path, step: int, world_size: int) -> None:
    """Add a line to `starts.jsonl`; call it on rank 0.

    Args:
        folder: output folder.
        step: the first step that this start runs.
        world_size: number of ranks.

    Raises:
        StorageError: the file cannot be written.
    """
    versions = {"dschat_ppo": dschat_ppo.__version__, "python": platform.python_version(), **installed_versions()}
    line = {"step": step, "time": round(time.time(), 3), "world_size": world_size, "versions": versions}
    try:
        with (folder / STARTS).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")
    except OSError as problem:
        raise StorageError(
            f"{folder / STARTS}: cannot be written ({problem.strerror}); free space, then run the same command again"
        ) from problem


def installed_versions() -> dict[str, str]:
    """Library -> version, of those among `_LIBRARIES` that are installed; imports none of them."""
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:  # an extra
            continue
    return found
