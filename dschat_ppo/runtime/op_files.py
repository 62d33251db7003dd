"""What a compilation of an operator left behind: whole, or to be compiled again.

ninja trusts names and times. After a loss of power an object or a library can be empty, cut or full of zeros and still
be newer than its source: it would be linked, and mapped, for ever.
"""

from __future__ import annotations

import json
from pathlib import Path

from dschat_ppo.common.atomic_files import checksum, remove_folder, sync_folder, write_file

WHOLE = "dschat_ppo.whole"  # name and SHA-256 of each library, written once all is on the disk


def discard_damaged(folder: Path, keep: frozenset[str]) -> bool:
    """Remove all that was compiled in a folder, unless it is as `mark_whole` saw it.

    Args:
        folder: of the operator; its lock is held.
        keep: names that stay.

    Returns:
        Whether something was removed.
    """
    libraries = _libraries(folder)
    if libraries and _marked(folder) == libraries:
        return False
    removed = [path for path in folder.iterdir() if path.name not in keep]
    for path in removed:
        if path.is_dir() and not path.is_symlink():
            remove_folder(path)
        else:
            path.unlink()
    return bool(removed)


def mark_whole(folder: Path) -> None:
    """Have all that was compiled on the disk, and say so beside it. The operator was loaded, and its lock is held.

    Raises:
        OSError: the disk refuses.
    """
    libraries = _libraries(folder)
    if _marked(folder) != libraries:
        sync_folder(folder)
        write_file(folder / WHOLE, json.dumps(libraries, indent=1).encode())


def _libraries(folder: Path) -> dict[str, str]:
    return {path.name: checksum(path) for path in sorted(folder.glob("*.so"))}


def _marked(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / WHOLE).read_bytes()))
    except (OSError, ValueError, TypeError):  # it is not there, or is not what we wrote
        return {}
