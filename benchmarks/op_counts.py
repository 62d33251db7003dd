"""Counts PyTorch's operators where they are called from."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

PACKAGE = str(Path(__file__).resolve().parent.parent / "dschat_ppo")


class Operators(TorchDispatchMode):
    """Calls `seen` with the name, such as "aten::mm", and the arguments of every operator that runs in the block.

    It sees operators of backward passes and collectives too, where they run in the thread of the block, as on a CPU.
    `took` receives the name and the CPU seconds of each of them.
    """

    def __init__(
        self, seen: Callable[[str, tuple[Any, ...]], None], took: Callable[[str, float], None] | None = None
    ):  # fmt: skip
        super().__init__()
        self.seen = seen
        self.took = took

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.seen(func._schema.name, args)
        start = time.thread_time()
        result = func(*args, **(kwargs or {}))
        if self.took is not None:
            self.took(func._schema.name, time.thread_time() - start)
        return result


def caller(*packages: str) -> str:
    """ "file.py:LINE" of the innermost frame whose file is in one of these folders; "" if there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(packages):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
