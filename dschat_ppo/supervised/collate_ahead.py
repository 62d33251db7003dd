"""Collate the batches of the next optimizer step on a thread while the current one trains."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from datasets import Dataset

from dschat_ppo.supervised.objective import Batch

Item = TypeVar("Item")
Made = TypeVar("Made")
MicroBatches = list[list[int]]  # row numbers


def collated(
    collate: Callable[[Dataset, Sequence[int]], Batch], rows: Any, steps: Iterable[MicroBatches], device: torch.device
) -> Generator[tuple[MicroBatches, Callable[[], list[Batch]]], None, None]:
    """For each step: the row numbers of its micro-batches, and a function that waits for their batches.

    Rows of a stream are collated when they are needed: its reader works ahead already, and a rank that waits for it
    must be the one that watches for stop requests. Close the generator to end the thread.

    Args:
        collate: `(rows, indices)` -> a batch on the device.
        rows: a `Dataset` or `StreamedRows`.
        steps: row numbers.
        device: of the batches.
    """

    def make(micro_batches: MicroBatches) -> list[Batch]:
        return [collate(rows, indices) for indices in micro_batches]

    if isinstance(rows, Dataset):
        yield from one_ahead(steps, make, device)
    else:
        yield from ((micro_batches, partial(make, micro_batches)) for micro_batches in steps)


def one_ahead(
    items: Iterable[Item], make: Callable[[Item], Made], device: torch.device
) -> Generator[tuple[Item, Callable[[], Made]], None, None]:
    """`(item, take)` for each item in order, where `take()` waits for `make(item)` and returns it.

    A thread makes the next item while the caller uses the one before. An error of `make` is raised by the `take` of
    its item.

    Args:
        items: drawn on the caller's thread, one ahead.
        make: runs on the thread.
        device: of what it makes. A thread whose copies go to another GPU than the current one would use both.
    """
    select: Any = (torch.cuda.set_device, (device,)) if device.type == "cuda" else ()
    waiting: tuple[Item, Future[Made]] | None = None
    with ThreadPoolExecutor(1, "collate", *select) as thread:
        for item in items:
            submitted = thread.submit(make, item)
            if waiting is not None:
                yield waiting[0], waiting[1].result
            waiting = item, submitted
        if waiting is not None:
            yield waiting[0], waiting[1].result
