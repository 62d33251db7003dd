"""Which rows each rank sees at each step. The order is the same for every number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dschat_ppo.common.seeding import shared_generator

PADDING_ROW = -1


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """A permutation of all rows, of this seed and epoch."""
    return list(torch.randperm(num_rows, generator=shared_generator(seed, epoch)).tolist())


def optimizer_steps(
    order: Sequence[int], micro_batch: int, accumulation: int, world_size: int, rank: int
) -> Iterator[list[list[int]]]:
    """This rank's micro-batches of each optimizer step, through `order` once.

    A step takes the next `micro_batch * accumulation * world_size` rows, so every rank and every micro-batch split
    sees the same rows in the same step. A short last step makes as many micro-batches, only smaller ones, and is filled
    up with `PADDING_ROW` where it does not divide: all ranks make the same number of micro-batches of the same size.
    """
    lots = accumulation * world_size
    for start in range(0, len(order), micro_batch * lots):
        step = list(order[start : start + micro_batch * lots])
        size = -(-len(step) // lots)
        step += [PADDING_ROW] * (size * lots - len(step))
        mine = step[rank * accumulation * size : (rank + 1) * accumulation * size]
        yield [mine[i : i + size] for i in range(0, len(mine), size)]


class IndexStream:
    """Row numbers, epoch after epoch, as many at a time as are asked for. The same on every rank.

    Args:
        num_rows: rows of the data set.
        seed: of the order; each epoch has an order of its own.
    """

    def __init__(self, num_rows: int, seed: int):
        self._num_rows = num_rows
        self._seed = seed
        self._epoch = 0
        self._pending: list[int] = []
        self.taken = 0

    def take(self, count: int) -> list[int]:
        """The next `count` row numbers; what an epoch cannot fill goes on into the next one."""
        while len(self._pending) < count:
            self._pending += epoch_order(self._num_rows, self._seed, self._epoch)
            self._epoch += 1
        rows, self._pending = self._pending[:count], self._pending[count:]
        self.taken += count
        return rows

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes."""
        return {"epoch": self._epoch, "pending": list(self._pending), "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, over the same rows with the same seed.

        Over fewer rows (`--resume_force`) the numbers of those that are gone are left out.
        """
        self._epoch, self.taken = state["epoch"], state["taken"]
        self._pending = [row for row in state["pending"] if row < self._num_rows]
