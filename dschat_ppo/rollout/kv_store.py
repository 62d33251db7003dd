"""Preallocated keys and values. Slot = token number, rows are padded on the right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KeyValueStore:
    """Keys and values of `rows` sequences, per layer `(rows, kv_heads, capacity, head_dim)`, written in place.

    A layer is allocated when it is first written, which tells its heads, dtype and device. Memory is zeroed, because a
    slot that is masked out still meets a weight of 0, and 0 x NaN would not be 0.
    """

    def __init__(self, rows: int, capacity: int):
        self.rows = rows
        self.capacity = capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def _layer(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.keys:
            for store, like in ((self.keys, keys), (self.values, values)):
                store[layer] = like.new_zeros(self.rows, like.shape[1], self.capacity, like.shape[3])
        return self.keys[layer], self.values[layer]

    def put_block(self, layer: int, rows: Tensor, source: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write tokens 0 .. L-1 of some rows.

        Args:
            layer: layer number.
            rows: (m,) int64, rows to write.
            source: (m,) int64, which row of `keys` and `values` each gets.
            keys, values: (n, kv_heads, L, head_dim).
        """
        length = keys.shape[2]
        for held, new in zip(self._layer(layer, keys, values), (keys, values), strict=True):
            held[rows, :, :length] = new[source]

    def put_token(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write one token of each of the first n rows.

        Args:
            layer: layer number.
            slots: (n,) int64, slot of each row's token.
            keys, values: (n, kv_heads, 1, head_dim).
        """
        count, heads = keys.shape[:2]
        lines = torch.arange(count * heads, device=slots.device) * self.capacity + slots.repeat_interleave(heads)
        for held, new in zip(self._layer(layer, keys, values), (keys, values), strict=True):
            held.view(-1, held.shape[3]).index_copy_(0, lines, new.reshape(count * heads, -1))

    def move_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole rows over others."""
        for held in (*self.keys.values(), *self.values.values()):
            held[list(targets)] = held[list(sources)]

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in (*self.keys.values(), *self.values.values()))


def repack(parts: Sequence[tuple[KeyValueStore, int]], capacity: int) -> KeyValueStore:
    """A new store of the first n rows of each `(store, n)`, one after another, with another capacity."""
    packed = KeyValueStore(sum(count for _, count in parts), capacity)
    for name in ("keys", "values"):
        for layer, like in getattr(parts[0][0], name).items():
            new = like.new_zeros(packed.rows, like.shape[1], capacity, like.shape[3])
            first = 0
            for store, count in parts:
                length = min(store.capacity, capacity)
                new[first : first + count, :, :length] = getattr(store, name)[layer][:count, :, :length]
                first += count
            getattr(packed, name)[layer] = new
    return packed
