"""Preallocated keys and values, and the metadata by which attention finds them.

Rows of a `KVCache` are right-padded: the slot of a token is its number in the row. In a `KVPool`, for decode steps at
fixed addresses, each sequence takes the slots of a common pool that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
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


@dataclass
class SharedPrefix:
    """Keys and values of prompts that several rows of a decode batch share. `cache` holds one row per prompt. `lengths`
    (n,) int64 is the prefix length of each row of the batch. `grid` (prompts, width) int64 lists the rows of each
    prompt (any row in unused cells); `cells` (n,) int64 is the index of each row in the flattened grid."""

    cache: KVCache
    lengths: Tensor
    grid: Tensor
    cells: Tensor


@dataclass
class PrefillMetadata:
    """A prefill: `write_prefill` of `cache` writes what `source` numbers in the forward pass to `rows`. Both are (m,)
    int64. Their meaning differs between `KVCache` and `KVPool`."""

    cache: KVCache | KVPool
    rows: Tensor
    source: Tensor


@dataclass
class DecodeMetadata:
    """Rows `first .. first + count - 1` of a decode step; their KV cache is the first `count` rows of `cache`. `slots`
    (count,) int64 is where the new token of each row goes. Attention covers the first `length` slots; a row attends to
    slots up to and including its own."""

    first: int
    count: int
    cache: KVCache
    slots: Tensor
    length: int
    prefix: SharedPrefix | None

    @property
    def newest(self) -> Tensor:
        """The number of the new token of each row among the tokens in `cache`, (count,) int64."""
        return self.slots

    def slot_mapping(self, heads: int) -> Tensor:
        """Where `write_decode` puts the new tokens, (count * heads,) int64."""
        return self.cache.slot_mapping(self.slots, heads)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` slots, (count, kv_heads, length, head_dim)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return keys[: self.count, :, : self.length], values[: self.count, :, : self.length]

    def segments(self, heads: int, window: int | None) -> tuple[Tensor, Tensor]:
        """The start and the number of the keys that each row and head attends to, (count * heads,) int64."""
        hidden, used = _last(self.slots + 1, window)
        starts = torch.arange(self.count * heads, device=used.device) * self.cache.capacity
        return starts + hidden.repeat_interleave(heads), used.repeat_interleave(heads)


@dataclass
class PooledMetadata:
    """A decode step of rows in a `KVPool`. All tensors are (count,) int64.

    The tokens of a row are `prefix_lengths` tokens from slot `prefix_starts` on, which other rows may share (0: none),
    then tokens of the row alone, from slot `starts` on; the new token is number `slots` of these. No row has more than
    `length` tokens. An idle row has 0 everywhere. `shares` is whether some row has a prefix.
    """

    cache: KVPool
    slots: Tensor
    starts: Tensor
    prefix_starts: Tensor
    prefix_lengths: Tensor
    length: int
    shares: bool
    first: int = 0
    prefix: None = None
    _places: dict[int, Tensor] = field(default_factory=dict)  # by number of heads, shared by the layers of a step

    @property
    def count(self) -> int:
        """Rows of the step."""
        return len(self.slots)

    @property
    def newest(self) -> Tensor:
        """The number of the new token of each row among all its tokens, (count,) int64."""
        return self.prefix_lengths + self.slots

    def slot_mapping(self, heads: int) -> Tensor:
        """Where `write_decode` puts the new tokens, (count * heads,) int64."""
        return self.cache.slot_mapping(self.starts + self.slots, heads)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` tokens, (count, kv_heads, length, head_dim), copied from the pool.
        Places after the new token repeat it."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        heads = len(keys)
        if heads not in self._places:
            token = torch.arange(self.length, device=self.slots.device).minimum(self.newest.unsqueeze(1))
            own = self.starts.unsqueeze(1) + token - self.prefix_lengths.unsqueeze(1)
            in_prefix = token < self.prefix_lengths.unsqueeze(1)
            slots = torch.where(in_prefix, self.prefix_starts.unsqueeze(1) + token, own)  # (count, length)
            planes = torch.arange(heads, device=slots.device).view(-1, 1) * self.cache.capacity
            self._places[heads] = (slots.unsqueeze(1) + planes).flatten()  # count, head, token
        keys, values = (part.flatten(0, 1).index_select(0, self._places[heads]) for part in (keys, values))
        shape = self.count, heads, self.length, -1
        return keys.view(shape), values.view(shape)

    def segments(self, heads: int, window: int | None) -> tuple[Tensor, Tensor]:
        """The start and the number of the keys that each row and head attends to, int64. They are (count * heads,), or
        with shared prefixes (2 * count * heads,): own tokens, then those of the prefix. A row that sees no prefix has
        its own tokens there again, because attention to no key has no result."""
        hidden, used = _last(self.slots + 1, window)
        starts = self.starts + hidden
        if self.shares:
            seen = self.prefix_lengths if window is None else (window - used).clamp_min(0).minimum(self.prefix_lengths)
            start = torch.where(seen > 0, self.prefix_starts + self.prefix_lengths - seen, starts)
            starts, used = torch.cat([starts, start]), torch.cat([used, torch.where(seen > 0, seen, used)])
        return self.cache.slot_mapping(starts, heads), used.repeat_interleave(heads)


def _last(tokens: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """How many of the first tokens are outside the window, and how many of the last ones are in it."""
    if window is None:
        return torch.zeros_like(tokens), tokens
    return (tokens - window).clamp_min(0), tokens.clamp_max(window)
