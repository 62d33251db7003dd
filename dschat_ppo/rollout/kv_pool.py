"""KV cache of decode steps at fixed addresses: each sequence takes the slots of a common pool that it needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SPARE = 0  # the slot that idle rows of a step read and write


class KVPool:
    """Keys and values of many sequences, per layer `(kv_heads, capacity, head_dim)`, written in place. A sequence has a
    segment of consecutive slots, the same in every layer and head; the scheduler knows which. The first write to a
    layer allocates it, with the heads, dtype and device of the keys and values written, and zeroed."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.version = 0  # changes when tensors get another address

    def release(self) -> None:
        """Free all memory; the capacity is that of an empty pool."""
        self.keys, self.values = {}, {}
        self.capacity, self.version = SPARE + 1, self.version + 1

    @property
    def nbytes(self) -> int:
        """Bytes of all layers that are allocated."""
        return sum(cached.nbytes for cached in (*self.keys.values(), *self.values.values()))

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The whole pool of a layer, for keys and values like these."""
        if layer not in self.keys:
            for cached, like in ((self.keys, keys), (self.values, values)):
                cached[layer] = like.new_zeros(like.shape[1], self.capacity, like.shape[3])
        return self.keys[layer], self.values[layer]

    def write_prefill(self, layer: int, targets: Tensor, source: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write tokens of prompts to the slots `targets` (T,) int64. `source` (T,) int64 is the token that each of them
        gets; token t of row i of `keys` (n, kv_heads, L, head_dim) has number i * L + t."""
        for cached, new in zip(self.layer(layer, keys, values), (keys, values), strict=True):
            cached.index_copy_(1, targets, new.transpose(0, 1).flatten(1, 2)[:, source])

    def slot_mapping(self, slots: Tensor, heads: int) -> Tensor:
        """Flat indices of slot `slots[r]` in each head, (n * heads,) int64, row after row."""
        return (slots.unsqueeze(1) + torch.arange(heads, device=slots.device) * self.capacity).flatten()

    def write_decode(self, layer: int, slot_mapping: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write one token of each of n rows; arguments as in `KVCache.write_decode`."""
        for cached, new in zip(self.layer(layer, keys, values), (keys, values), strict=True):
            cached.view(-1, cached.shape[2]).index_copy_(0, slot_mapping, new.reshape(len(slot_mapping), -1))

    def repack(self, sources: np.ndarray, targets: np.ndarray, capacity: int) -> None:
        """Copy slots `sources` to `targets`, both (T,) int64, and change the capacity. All sources are read before a
        target is written. With the same capacity all tensors stay where they are; with another one, slots that are not
        targets are 0. At most one layer is in memory twice."""
        for cached in (self.keys, self.values):
            for layer, old in list(cached.items()):
                read, written = (torch.from_numpy(slots).to(old.device) for slots in (sources, targets))
                moved = old[:, read]
                if capacity != self.capacity:
                    cached[layer] = old.new_zeros(old.shape[0], capacity, old.shape[2])
                cached[layer].index_copy_(1, written, moved)
        if capacity != self.capacity:
            self.capacity, self.version = capacity, self.version + 1


class FreeSlots:
    """The unused slots `first .. capacity - 1` of a pool, as runs of consecutive slots."""

    def __init__(self, first: int, capacity: int):
        self._runs = [(first, capacity - first)] if capacity > first else []  # (start, size), by start

    def take(self, sizes: Sequence[int]) -> list[int] | None:
        """The starts of segments of `sizes`, each in the first run that has room; None: some does not fit anywhere."""
        runs, starts = list(self._runs), []
        for size in sizes:
            number = next((number for number, (_, room) in enumerate(runs) if room >= size), None)
            if number is None:
                return None
            start, room = runs[number]
            starts.append(start)
            runs[number : number + 1] = [(start + size, room - size)] if room > size else []
        self._runs = runs
        return starts

    def give_back(self, start: int, size: int) -> None:
        """`size` slots from `start` on are unused again."""
        runs: list[tuple[int, int]] = []
        for begin, length in sorted([*self._runs, (start, size)]):
            if runs and sum(runs[-1]) == begin:
                runs[-1] = runs[-1][0], runs[-1][1] + length
            else:
                runs.append((begin, length))
        self._runs = runs
