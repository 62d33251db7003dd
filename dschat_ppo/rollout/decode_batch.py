"""Decode batches: running sequences that share one KV cache, and the inputs of a decode step over several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dschat_ppo.rollout.attention_metadata import DecodeMetadata, SharedPrefix
from dschat_ppo.rollout.kv_cache import KVCache, copy_shared_prefix, repack

PER_ROW = ("sequences", "positions", "prefix_lengths", "prefix_rows")
GROWTH = 32  # slots by which a cache grows: less means more copies, more means attention over more empty slots


def rounded_up(length: int) -> int:
    """`length`, rounded up to a multiple of `GROWTH`."""
    return -(-length // GROWTH) * GROWTH


@dataclass(eq=False)
class DecodeBatch:
    """Running sequences in rows 0 .. n-1 of `cache`. The arrays are numpy int64 (n,), one entry per row.

    `sequences` are the rows in `SequenceBuffers`; `positions` those of the tokens that the next step feeds. Sequences
    of one prompt may share its keys: `prefix` then holds one row per prompt, `prefix_rows` the row that each sequence
    reads, and `prefix_lengths` the number of its tokens that are only there. Without a prefix both are 0.
    """

    cache: KVCache
    sequences: np.ndarray
    positions: np.ndarray
    prefix_lengths: np.ndarray
    prefix_rows: np.ndarray
    prefix: KVCache | None = None
    _shared: SharedPrefix | None = None  # of the current rows, made by the first step that needs it

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def slots(self) -> np.ndarray:
        """The slot of `cache` to which the next token of each row is written, (n,) int64."""
        return self.positions - self.prefix_lengths

    def reserve_slots(self) -> None:
        """Grow the cache if the next token of a row does not fit."""
        needed = int(self.slots.max()) + 1
        if needed > self.cache.capacity:
            self.cache = repack([(self.cache, len(self))], rounded_up(needed))

    def unshare(self) -> None:
        """Copy the shared prefix to each row, so that the batch can be merged with others."""
        if self.prefix is not None:
            self.cache = copy_shared_prefix(
                self.cache, self.prefix, self.prefix_rows.tolist(), self.prefix_lengths.tolist()
            )
            self.prefix, self._shared = None, None
            self.prefix_lengths, self.prefix_rows = np.zeros_like(self.prefix_lengths), np.zeros_like(self.prefix_rows)

    def remove(self, finished: np.ndarray) -> None:
        """Drop the rows where `finished` (n,) is True; the last unfinished rows move into the holes."""
        left = int((~finished).sum())
        holes = np.flatnonzero(finished[:left])
        movers = left + np.flatnonzero(~finished[left:])
        if len(holes):
            self.cache.move_rows(movers.tolist(), holes.tolist())
        for name in PER_ROW:
            values = getattr(self, name)
            values[holes] = values[movers]
            setattr(self, name, values[:left].copy())
        self._shared = None

    def extend(self, sequences: np.ndarray, positions: np.ndarray) -> None:
        """Add rows after the last one, without a shared prefix."""
        zeros = np.zeros_like(sequences)
        for name, new in zip(PER_ROW, (sequences, positions, zeros, zeros), strict=True):
            setattr(self, name, np.concatenate([getattr(self, name), new]))

    def metadata(self, first: int, slots: Tensor) -> DecodeMetadata:
        """Attention metadata of this batch in a decode step whose rows begin at `first`; `slots` on the device."""
        if self.prefix is not None and self._shared is None:
            self._shared = self._shared_prefix(self.prefix, slots.device)
        return DecodeMetadata(first, len(self), self.cache, slots, self.cache.capacity, self._shared)

    def _shared_prefix(self, prefix: KVCache, device: torch.device) -> SharedPrefix:
        counts = np.bincount(self.prefix_rows, minlength=prefix.rows)  # sequences of each prompt
        order = np.argsort(self.prefix_rows, kind="stable")
        column = np.empty_like(order)  # number of each sequence among those of its prompt
        column[order] = np.arange(len(order)) - (np.cumsum(counts) - counts)[self.prefix_rows[order]]
        grid = np.zeros((prefix.rows, counts.max()), dtype=np.int64)
        grid[self.prefix_rows, column] = np.arange(len(self))
        cells = self.prefix_rows * grid.shape[1] + column
        return SharedPrefix(prefix, *(torch.from_numpy(a).to(device) for a in (self.prefix_lengths, grid, cells)))


def merged(first: DecodeBatch, second: DecodeBatch) -> DecodeBatch:
    """One batch with the rows of two batches that have no shared prefix."""
    capacity = max(rounded_up(int(batch.slots.max()) + 1) for batch in (first, second))
    cache = repack([(first.cache, len(first)), (second.cache, len(second))], capacity)
    sequences, positions, lengths, rows = (
        np.concatenate([getattr(first, name), getattr(second, name)]) for name in PER_ROW
    )
    return DecodeBatch(cache, sequences, positions, lengths, rows)


@dataclass(frozen=True)
class DecodeInputs:
    """Inputs of a decode step, on the model's device, all (n,) int64: one entry for each running sequence. `sequences`
    are the rows in `SequenceBuffers`; `positions` those of the tokens that are fed; `slots` where their keys and values
    go in the KV cache of their batch."""

    sequences: Tensor
    positions: Tensor
    slots: Tensor

    @classmethod
    def of(cls, batches: Sequence[DecodeBatch], device: torch.device) -> DecodeInputs:
        """The rows of all batches, in order."""
        names = ("sequences", "positions", "slots")
        arrays = np.stack([np.concatenate([getattr(batch, name) for batch in batches]) for name in names])
        return cls(*torch.from_numpy(arrays).to(device))

    def first(self, count: int) -> DecodeInputs:
        """Views of the first `count` entries."""
        return DecodeInputs(self.sequences[:count], self.positions[:count], self.slots[:count])
