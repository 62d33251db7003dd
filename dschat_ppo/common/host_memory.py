"""Host memory: how much this process may use, what goes back to the system while models load, and
objects that stay."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

# Parameters of glibc's `mallopt`, and their values in bytes.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
SMALL = 2**20
# glibc's own limit, which it reaches by itself once tensors of this size were freed
LARGEST = 2**25


def host_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory: the machine's, or the lowest limit of the cgroups that this process is
    in (a container, a job). `root` is where `proc` and `sys` are."""
    limits = [_integer_in(folder / "memory.max") for folder in _cgroups(root)]
    return min([_memory_of_machine().total, *(limit for limit in limits if limit is not None)])


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that can be allocated now: what the machine has free, or the least that
    a cgroup leaves."""
    available = [_memory_of_machine().available]
    for folder in _cgroups(root):
        limit = _integer_in(folder / "memory.max")
        used = _integer_in(folder / "memory.current")
        # the kernel drops inactive pages of files when memory is short
        if limit is not None and used is not None:
            lines = _text(folder / "memory.stat").splitlines()
            stat = dict(line.split(maxsplit=1) for line in lines)
            available.append(max(0, limit - used + int(stat.get("inactive_file", 0))))
    return min(available)


def _memory_of_machine() -> Any:
    """Host memory as psutil reads it."""
    import psutil  # not at the top, so that --help does not wait for it

    return psutil.virtual_memory()


def _cgroups(root: Path) -> Iterator[Path]:
    """The folders of this process's cgroup (version 2) and of those that contain it. A container
    may see its own cgroup as the root while `/proc/self/cgroup` names the path outside, so each
    folder of the path counts, and the root."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        hierarchy, _, path = line.split(":", 2)
        if hierarchy != "0":  # of version 1
            continue
        cgroup = PurePosixPath(path.lstrip("/"))
        folders = [cgroup, *cgroup.parents]
        if ".." in cgroup.parts:
            folders = [PurePosixPath()]
        for folder in folders:
            yield root / "sys/fs/cgroup" / folder


def _text(file: Path) -> str:
    """The content of a file of the kernel; "" where there is none."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _integer_in(file: Path) -> int | None:
    """The integer that a file of the kernel holds; None for "max", or where there is no file."""
    text = _text(file)
    if text.isdecimal():
        return int(text)
    return None


@cache
def _glibc() -> Any:
    """The C library, or None if it is not glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        return library
    return None


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Return the memory of freed tensors to the system at once in this block, and what is left of
    it at the end.

    glibc keeps freed blocks of up to 32 MiB for later use. While a model is partitioned, every rank
    allocates and frees each whole tensor once; with several ranks the kept blocks add up to the
    size of the model. Afterwards the heap works as after glibc's own adjustment to large tensors,
    because training allocates the same sizes again and again. Where the user sets glibc's own
    variables, they decide alone.
    """
    library = _glibc()
    if library is None or {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} & set(os.environ):
        yield
        return
    library.mallopt(MMAP_THRESHOLD, SMALL)
    try:
        yield
    finally:
        library.mallopt(MMAP_THRESHOLD, LARGEST)
        library.mallopt(TRIM_THRESHOLD, 2 * LARGEST)
        library.malloc_trim(0)


@contextmanager
def lasting_objects() -> Iterator[None]:
    """For a block that imports modules: the garbage collector does not run in it, which would take
    a quarter of the time of the imports, and afterwards leaves out all objects that exist at its
    end, half a million: DeepSpeed runs it several times for each engine."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
