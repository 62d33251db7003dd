"""`starts.jsonl`: when a run started and resumed, and with which versions of libraries."""

from __future__ import annotations

import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import dschat_ppo
from dschat_ppo.monitor.json_lines import JsonLines

STARTS = "starts.jsonl"
_LIBRARIES = ("torch", "deepspeed", "transformers", "accelerate", "datasets", "tokenizers", "peft", "bitsandbytes")


def record_start(folder: Path, step: int, world_size: int) -> None:
    """Add a line to `starts.jsonl`, durably, on rank 0.

    Args:
        folder: output folder.
        step: the first step that this start runs.
        world_size: number of ranks.

    Raises:
        StorageError: the file cannot be written.
    """
    versions = {"dschat_ppo": dschat_ppo.__version__, "python": platform.python_version(), **installed_versions()}
    line = {"step": step, "time": round(time.time(), 3), "world_size": world_size, "versions": versions}
    lines = JsonLines(folder / STARTS)
    lines.append([line])
    lines.saved_offset()  # syncs it to the disk


def installed_versions() -> dict[str, str]:
    """Library -> version, of those among `_LIBRARIES` that are installed; imports none of them."""
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:  # an extra
            continue
    return found
