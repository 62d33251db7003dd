"""Whether rollouts of this process must have the bits of training passes: a mode of the process, as
PyTorch's deterministic algorithms are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_requirements: list[str] = []  # who requires it


def require_exact_rollouts(reason: str) -> None:
    """From now on, rollouts compute what training passes compute, bit for bit, on a CPU. `reason`:
    the flag that asks for it."""
    _requirements.append(reason)


def exact_rollouts() -> bool:
    """Whether rollouts have to have the bits of training passes."""
    return bool(_requirements)


@contextmanager
def exact_rollouts_required(reason: str) -> Iterator[None]:
    """In the block, `require_exact_rollouts`."""
    require_exact_rollouts(reason)
    try:
        yield
    finally:
        _requirements.pop()
