"""Give host memory back to the system while models are loaded."""

from __future__ import annotations

import ctypes
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
    works as before, because training allocates the same sizes again and again.
    """
    library = _glibc()
    if library is None:
        yield
        return
    library.mallopt(MMAP_THRESHOLD, SMALL)
    try:
        yield
    finally:
        library.mallopt(MMAP_THRESHOLD, LARGEST)
        library.mallopt(TRIM_THRESHOLD, 2 * LARGEST)
        library.malloc_trim(0)
