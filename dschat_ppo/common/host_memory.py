"""Host memory that this process may use: that of the machine, or less in a container or a job (cgroups, Linux)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil


class _Files(NamedTuple):
    """Names in a cgroup's folder: of its limit, of what it uses, and of the line of `memory.stat` about pages of files
    that the kernel drops when memory is short."""

    limit: str
    used: str
    droppable: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")
_MOUNTS = "sys/fs/cgroup"


def host_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory: the machine's, or the lowest limit of the cgroups that this process is in.

    Args:
        root: where `proc` and `sys` are.
    """
    limits = [_number(folder / files.limit) for folder, files in _groups(root)]
    return min([psutil.virtual_memory().total, *(limit for limit in limits if limit is not None)])


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that can be allocated now: what the machine has free, or the least that a cgroup of this
    process leaves. Arguments as `host_memory`."""
    found = [psutil.virtual_memory().available]
    for folder, files in _groups(root):
        limit, used = _number(folder / files.limit), _number(folder / files.used)
        if limit is not None and used is not None:
            found.append(max(0, limit - used + _droppable(folder, files)))
    return min(found)


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of this process's cgroups and of those that contain them; a limit holds for all inside.

    A container may see its own cgroup as the root of the hierarchy while `/proc/self/cgroup` names the path outside, so
    each folder of the path that exists counts, and the root.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            tops, files = ["", "unified"], _V2  # with version 1 mounted too, the hierarchy of version 2 has a folder
        elif "memory" in controllers.split(","):
            tops, files = [controllers, "memory"], _V1
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for top in dict.fromkeys(tops):
            for part in (inside, *inside.parents) if ".." not in inside.parts else (PurePosixPath(),):
                yield root / _MOUNTS / top / part, files


def _number(file: Path) -> int | None:
    """The number in a file; None without it, or where it says that there is no limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _droppable(folder: Path, files: _Files) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split(maxsplit=1) for line in lines)
    return int(sizes.get(files.droppable, 0))
