"""Paths as a person reads them, and what lies there: a file or folder, or a pipe that must not be read by mistake."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def short_names(folders: Sequence[Path]) -> list[str]:
    """For each folder the shortest end of its path that no other folder has, without the end that all have in common:
    "ppo" for one folder, "a" and "b" for a/ppo and b/ppo."""
    parts = [folder.resolve().parts for folder in folders]
    while len(parts) > 1 and len({own[-1] for own in parts}) == 1 and min(map(len, parts)) > 2:
        parts = [own[:-1] for own in parts]
    longest = max(map(len, parts))
    for length in range(1, longest):
        names = ["/".join(own[-length:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def shown_path(path: str | Path) -> str:
    """A path for a message: relative to the working directory if it lies in it."""
    text = str(path)
    return text.removeprefix(os.path.join(os.getcwd(), "")) or text


def is_pipe_or_device(path: Path) -> bool:
    """Whether `path`, or what it links to, is neither a file nor a folder: reading a pipe waits until somebody writes
    to it, and a device such as /dev/zero has no end."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
