"""Output that nobody reads any more: of a closed terminal, or a pipe whose reader has ended."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence


def leave_dead_terminal(numbers: Sequence[int] = (1, 2)) -> None:
    """Let descriptors, by default stdout and stderr, lead nowhere if nobody reads them: each write would raise an
    error."""
    poll = select.poll()
    for number in numbers:
        poll.register(number, 0)
    for number, found in poll.poll(0):
        if found & (select.POLLHUP | select.POLLERR):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
