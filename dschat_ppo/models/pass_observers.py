"""What forward passes show besides the states that they are made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

# (B, T) mask -> how often each of the N tokens that this rank's model ran is in it, bool or int64
LayOut = Callable[[Tensor], Tensor]


class PassObserver(Protocol):
    """Reads the output of each forward pass of a `PolicyModel` or `ScalarModel`."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the model, with which its output holds what is read."""

    def observe(self, output: Any, read: Tensor, lay_out: LayOut) -> None:
        """Read the output of one pass.

        Args:
            output: what the model of transformers returns.
            read: (B, T) bool, the tokens whose states the pass is made for.
            lay_out: a mask of the rows, as that of the tokens that ran: of padded, packed or
                divided rows.
        """


# the last one observes; None: nothing does
_OBSERVERS: list[PassObserver | None] = [None]


@contextmanager
def observed(observer: PassObserver | None) -> Iterator[None]:
    """Let `observer` read the forward passes in this block; None: nothing reads them, as those of a
    model that does not train."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.pop()


def observer_arguments() -> dict[str, Any]:
    """Arguments that the observer asks the model for."""
    observer = _OBSERVERS[-1]
    if observer is None:
        return {}
    return observer.arguments


def show_pass(output: Any, read: Tensor, lay_out: LayOut = torch.flatten) -> None:
    """Show the output of a forward pass with `observer_arguments` to the observer, if there is
    one; arguments as `PassObserver.observe`."""
    observer = _OBSERVERS[-1]
    if observer is not None:
        observer.observe(output, read, lay_out)
