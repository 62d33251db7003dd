"""Which rows each rank sees at each optimizer step. The order does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from datasets import Dataset

from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data.streaming import StreamedRows

PADDING_ROW = -1  # index of a row that fills up the last batch and has no loss


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """A permutation of all row indices, fixed by seed and epoch."""
    return list(torch.randperm(num_rows, generator=shared_generator(seed, epoch)).tolist())


def chunk_rows_of(rows: Dataset | StreamedRows) -> int | None:
    """Rows of a chunk of a stream, which are shuffled among themselves; None if all rows are shuffled together."""
    return rows.chunk_rows if isinstance(rows, StreamedRows) else None


def chunk_order(num_rows: int, chunk_rows: int, seed: int, epoch: int, chunk: int) -> list[int]:
    """A permutation of the row indices of one chunk of a stream, fixed by seed, epoch and number of the chunk."""
    first = chunk * chunk_rows
    count = min(chunk_rows, num_rows - first)
    return [first + index for index in torch.randperm(count, generator=shared_generator(seed, epoch, chunk)).tolist()]


class ChunkedOrder(Sequence[int]):
    """All row indices of a stream: chunk after chunk, each in its `chunk_order`, computed when it is needed."""

    def __init__(self, num_rows: int, chunk_rows: int, seed: int, epoch: int):
        self._num_rows = num_rows
        self._chunk_rows = chunk_rows
        self._path = (seed, epoch)
        self._last: tuple[int, list[int]] = (-1, [])  # the chunk in use, and its order

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            return [self._at(number) for number in range(*place.indices(self._num_rows))]
        if not -self._num_rows <= place < self._num_rows:
            raise IndexError(place)
        return self._at(place % self._num_rows)

    def _at(self, place: int) -> int:
        chunk, inside = divmod(place, self._chunk_rows)
        if self._last[0] != chunk:
            self._last = (chunk, chunk_order(self._num_rows, self._chunk_rows, *self._path, chunk))
        return self._last[1][inside]


def order_of(rows: Dataset | StreamedRows, seed: int, epoch: int) -> Sequence[int]:
    """The order of all row indices in one epoch: a permutation, or for a stream one inside each chunk."""
    chunk_rows = chunk_rows_of(rows)
    if chunk_rows is None:
        return epoch_order(len(rows), seed, epoch)
    return ChunkedOrder(len(rows), chunk_rows, seed, epoch)


def optimizer_steps(
    order: Sequence[int], micro_batch: int, accumulation: int, world_size: int, rank: int
) -> Iterator[list[list[int]]]:
    """Yield this rank's micro-batches of each optimizer step, once through `order`.

    A step takes the next `micro_batch * accumulation * world_size` rows, so the rows of a step do not depend on how
    they are split over ranks and micro-batches. The last step may be short: it has the same number of micro-batches,
    but smaller ones, padded with `PADDING_ROW`, so that all ranks run equally many micro-batches of equal size.
    """
    micro_batches = accumulation * world_size  # of all ranks
    for start in range(0, len(order), micro_batch * micro_batches):
        step = list(order[start : start + micro_batch * micro_batches])
        size = -(-len(step) // micro_batches)
        step += [PADDING_ROW] * (size * micro_batches - len(step))
        mine = step[rank * accumulation * size : (rank + 1) * accumulation * size]
        yield [mine[i : i + size] for i in range(0, len(mine), size)]


class IndexStream:
    """An endless sequence of row indices, the same on every rank, reshuffled every epoch. For chunks see
    `chunk_rows_of`."""

    def __init__(self, num_rows: int, seed: int, chunk_rows: int | None = None):
        self._num_rows = num_rows
        self._seed = seed
        self._chunk_rows = chunk_rows
        self._epoch = self._chunk = 0  # of the rows that are added to `_pending` next
        self._pending: list[int] = []
        self.taken = 0

    def take(self, count: int) -> list[int]:
        """The next `count` row indices; a request may run over the end of an epoch into the next one."""
        while len(self._pending) < count:
            if self._chunk_rows is None:
                self._pending += epoch_order(self._num_rows, self._seed, self._epoch)
                self._epoch += 1
                continue
            self._pending += chunk_order(self._num_rows, self._chunk_rows, self._seed, self._epoch, self._chunk)
            self._chunk += 1
            if self._chunk * self._chunk_rows >= self._num_rows:
                self._epoch, self._chunk = self._epoch + 1, 0
        rows, self._pending = self._pending[:count], self._pending[count:]
        self.taken += count
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Position in the sequence, for `load_state_dict`."""
        return {"epoch": self._epoch, "chunk": self._chunk, "pending": list(self._pending), "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position, over the same rows with the same seed. If the data set has become smaller
        (`--resume_force`), indices beyond its end are dropped."""
        self._epoch, self.taken = state["epoch"], state["taken"]
        self._chunk = state.get("chunk", 0)  # older checkpoints have none: their rows were no stream
        self._pending = [row for row in state["pending"] if row < self._num_rows]
