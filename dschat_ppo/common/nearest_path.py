"""Suggest an existing file or folder for a path that does not exist."""

from __future__ import annotations

import difflib
import os
from pathlib import Path


def nearest_path(path: str | Path) -> str:
    """`; did you mean PATH?`, with the existing path whose names are most similar; "" if none is similar."""
    found = _similar(Path(path))
    return f"; did you mean {found}?" if found is not None else ""


def _similar(path: Path) -> Path | None:
    """The existing path that is nearest to `path`, which may exist."""
    if path.parent == path:
        return None
    parent = path.parent if path.parent.is_dir() else _similar(path.parent)
    if parent is None:
        return None
    try:
        names = os.listdir(parent)
    except OSError:  # it is a file, or not readable
        return None
    near = difflib.get_close_matches(path.name, names, n=1)
    return parent / near[0] if near else None
