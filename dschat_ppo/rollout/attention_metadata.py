"""Metadata of attention: where the rows of a forward pass write and read keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.kv_pool import KVPool


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
