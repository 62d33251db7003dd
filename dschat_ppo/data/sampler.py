"""Which rows each rank sees at each optimizer step. The order does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dschat_ppo.common.seeding import shared_generator

PADDING_ROW = -1  # index of a row that fills up the last batch and has no loss


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """A permutation of all row indices, fixed by seed and epoch."""
    return list(torch.randperm(num_rows, generator=shared_generator(seed, epoch)).tolist())


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
    """An endless stream of row indices, reshuffled every epoch. The same on every rank.

    Args:
        num_rows: rows of the data set.
        seed: seed of the shuffles.
    """

    def __init__(self, num_rows: int, seed: int):
        self._num_rows = num_rows
        self._seed = seed
        self._epoch = 0
        self._pending: list[int] = []
        self.taken = 0

    def take(self, count: int) -> list[int]:
        """The next `count` row indices; a request may run over the end of an epoch into the next one."""
        while len(self._pending) < count:
            self._pending += epoch_order(self._num_rows, self._seed, self._epoch)
            self._epoch += 1
        rows, self._pending = self._pending[:count], self._pending[count:]
        self.taken += count
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream, for `load_state_dict`."""
        return {"epoch": self._epoch, "pending": list(self._pending), "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position, over the same rows with the same seed.

        If the data set has become smaller (`--resume_force`), indices beyond its end are dropped.
        """
        self._epoch, self.taken = state["epoch"], state["taken"]
        self._pending = [row for row in state["pending"] if row < self._num_rows]
