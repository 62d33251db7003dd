"""Preallocated KV cache. Rows are right-padded: the slot of a token is its number in the row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values of `rows` sequences, per layer `(rows, kv_heads, capacity, head_dim)`, written in place. The
    first write to a layer allocates it, with the heads, dtype and device of the keys and values written. Memory is
    zeroed: a masked slot still gets a weight of 0, and 0 x NaN would be NaN."""

    def __init__(self, rows: int, capacity: int):
        self.rows = rows
        self.capacity = capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all layers that are allocated."""
        return sum(cached.nbytes for cached in (*self.keys.values(), *self.values.values()))

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The whole cache of a layer, for keys and values like these."""
        if layer not in self.keys:
            for cached, like in ((self.keys, keys), (self.values, values)):
                cached[layer] = like.new_zeros(self.rows, like.shape[1], self.capacity, like.shape[3])
        return self.keys[layer], self.values[layer]

    def write_prefill(self, layer: int, rows: Tensor, source: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write tokens 0 .. L-1 of `rows` (m,) int64. `source` (m,) int64 is the row of `keys` and `values` (n,
        kv_heads, L, head_dim) that each of them gets."""
        length = keys.shape[2]
        for cached, new in zip(self.layer(layer, keys, values), (keys, values), strict=True):
            cached[rows, :, :length] = new[source]

    def slot_mapping(self, slots: Tensor, heads: int) -> Tensor:
        """Flat indices of slot `slots[r]` of each head of row r, (n * heads,) int64, row after row."""
        return torch.arange(len(slots) * heads, device=slots.device) * self.capacity + slots.repeat_interleave(heads)

    def write_decode(self, layer: int, slot_mapping: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write one token, `keys` and `values` (n, kv_heads, 1, head_dim), of each of the first n rows. `slot_mapping`:
        (n * kv_heads,) int64, from the method of that name."""
        for cached, new in zip(self.layer(layer, keys, values), (keys, values), strict=True):
            cached.view(-1, cached.shape[3]).index_copy_(0, slot_mapping, new.reshape(len(slot_mapping), -1))

    def move_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole rows over others."""
        cached = [*self.keys.values(), *self.values.values()]
        if cached:
            rows = torch.tensor([list(sources), list(targets)], device=cached[0].device)
            for tensor in cached:
                tensor[rows[1]] = tensor[rows[0]]


def repack(parts: Sequence[tuple[KVCache, int]], capacity: int) -> KVCache:
    """Move the first n rows of each `(cache, n)`, one after another, into a new cache of another capacity. The old
    caches are emptied layer by layer, so that only one layer is in memory twice."""
    packed = KVCache(sum(count for _, count in parts), capacity)
    for name in ("keys", "values"):
        for layer in list(getattr(parts[0][0], name)):
            olds = [(getattr(cache, name).pop(layer), count) for cache, count in parts]
            like = olds[0][0]
            new = like.new_zeros(packed.rows, like.shape[1], capacity, like.shape[3])
            first = 0
            for old, count in olds:
                length = min(old.shape[2], capacity)
                new[first : first + count, :, :length] = old[:count, :, :length]
                first += count
            getattr(packed, name)[layer] = new
    return packed


def copy_shared_prefix(
    cache: KVCache, prefix: KVCache, prefix_rows: Sequence[int], prefix_lengths: Sequence[int]
) -> KVCache:
    """Copy shared prefixes into a new cache: each of the n first rows of `cache` follows its prefix. `prefix` has one
    row per prompt; each row reads `prefix_lengths` tokens of row `prefix_rows`."""
    whole = KVCache(len(prefix_rows), max(prefix_lengths) + cache.capacity)
    for name in ("keys", "values"):
        for layer, shared in getattr(prefix, name).items():
            new = shared.new_zeros(whole.rows, shared.shape[1], whole.capacity, shared.shape[3])
            own = getattr(cache, name).get(layer)  # None before the first decode step
            for row, (source, length) in enumerate(zip(prefix_rows, prefix_lengths, strict=True)):
                new[row, :, :length] = shared[source, :, :length]
                if own is not None:
                    new[row, :, length : length + cache.capacity] = own[row]
            getattr(whole, name)[layer] = new
    return whole
