"""The garbage collector of Python, and objects that live as long as the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_objects() -> Iterator[None]:
    """For a block that imports modules: they live until the process ends, so the garbage collector skips them.

    Inside the block it does not run: searching the modules again and again takes a quarter of the time of their import.
    Afterwards it leaves out all objects that exist at the end of the block, half a million: DeepSpeed runs it several
    times for each engine.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
