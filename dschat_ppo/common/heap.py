"""Give host memory back to the system while models are loaded."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# Parameters of glibc's `mallopt`, and their values in bytes.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
SMALL = 2**20
LARGEST = 2**25  # glibc's own limit, which it reaches by itself once tensors of this size were freed


@cache
def _glibc() -> Any:
    """The C library, or None if it is not glibc."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Return the memory of freed tensors to the system at once in this block, and what is left of it at the end.

    glibc keeps freed blocks of up to 32 MiB for later use. While a model is partitioned, every rank allocates and frees
    each whole tensor once; with several ranks the kept blocks add up to the size of the model. Afterwards the heap
    works as before, because training allocates the same sizes again and again: by glibc's environment variables, or as
    after its own adjustment to large tensors.
    """
    library = _glibc()
    if library is None:
        yield
        return
    library.mallopt(MMAP_THRESHOLD, SMALL)
    try:
        yield
    finally:
        mmap_threshold = _of_user("MALLOC_MMAP_THRESHOLD_", LARGEST)
        library.mallopt(MMAP_THRESHOLD, mmap_threshold)
        library.mallopt(TRIM_THRESHOLD, _of_user("MALLOC_TRIM_THRESHOLD_", 2 * mmap_threshold))
        library.malloc_trim(0)


def _of_user(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default
