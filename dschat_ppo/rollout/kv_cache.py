"""Preallocated keys and values. Slot = token number, rows are padded on the right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
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

    def lines(self, slots: Tensor, heads: int) -> Tensor:
        """Where `put_token` writes: slot `slots[r]` of each head of row r, (n * heads,) int64, row after row."""
        return torch.arange(len(slots) * heads, device=slots.device) * self.capacity + slots.repeat_interleave(heads)

    def put_token(self, layer: int, lines: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write one token of each of the first n rows.

        Args:
            layer: layer number.
            lines: as `lines` gives them for the slots of the rows.
            keys, values: (n, kv_heads, 1, head_dim).
        """
        for held, new in zip(self._layer(layer, keys, values), (keys, values), strict=True):
            held.view(-1, held.shape[3]).index_copy_(0, lines, new.reshape(len(lines), -1))

    def move_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole rows over others."""
        held = [*self.keys.values(), *self.values.values()]
        if held:
            places = torch.tensor([list(sources), list(targets)], device=held[0].device)
            for tensor in held:
                tensor[places[1]] = tensor[places[0]]


def repack(parts: Sequence[tuple[KVCache, int]], capacity: int) -> KVCache:
    """A new store of the first n rows of each `(store, n)`, one after another, with another capacity.

    The old stores are emptied layer by layer, so that memory holds one layer twice and not all of them.
    """
    packed = KVCache(sum(count for _, count in parts), capacity)
    for name in ("keys", "values"):
        for layer in list(getattr(parts[0][0], name)):
            olds = [(getattr(store, name).pop(layer), count) for store, count in parts]
            like = olds[0][0]
            new = like.new_zeros(packed.rows, like.shape[1], capacity, like.shape[3])
            first = 0
            for old, count in olds:
                length = min(old.shape[2], capacity)
                new[first : first + count, :, :length] = old[:count, :, :length]
                first += count
            getattr(packed, name)[layer] = new
    return packed


def unshared(store: KVCache, prefix: KVCache, prompt: Sequence[int], shared: Sequence[int]) -> KVCache:
    """A new store in which each of n rows holds its part of the prefix itself, and its own tokens after it.

    Args:
        store: own tokens, in its first n rows.
        prefix: one row per prompt.
        prompt: row of `prefix` for each row.
        shared: how many tokens of it each row takes.
    """
    whole = KVCache(len(prompt), max(shared) + store.capacity)
    for name in ("keys", "values"):
        for layer, held in getattr(prefix, name).items():
            new = held.new_zeros(whole.rows, held.shape[1], whole.capacity, held.shape[3])
            own = getattr(store, name).get(layer)  # None before the first own token
            for row, (source, length) in enumerate(zip(prompt, shared, strict=True)):
                new[row, :, :length] = held[source, :, :length]
                if own is not None:
                    new[row, :, length : length + store.capacity] = own[row]
            getattr(whole, name)[layer] = new
    return whole
