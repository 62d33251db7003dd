"""The running sequences of continuous batching, in batches of one KV cache each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache, Prefill, SharedPrefix

PER_ROW = ("sequences", "positions", "prefix_lengths", "prefix_rows")
GROWTH = 32  # slots by which a cache grows: less means more copies, more means attention over more empty slots
MAX_BATCHES = 4  # each batch costs some small operations per layer
SMALL_BATCH = 16  # fewer rows do not justify a batch
MIN_LENGTH_RATIO = 0.75  # shortest prompt of a new batch, relative to its longest


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

    def shared_prefix(self, device: torch.device) -> SharedPrefix | None:
        """Which rows read which prompt of the prefix; None without one."""
        if self.prefix is not None and self._shared is None:
            counts = np.bincount(self.prefix_rows, minlength=self.prefix.rows)  # sequences of each prompt
            order = np.argsort(self.prefix_rows, kind="stable")
            column = np.empty_like(order)  # number of each sequence among those of its prompt
            column[order] = np.arange(len(order)) - (np.cumsum(counts) - counts)[self.prefix_rows[order]]
            grid = np.zeros((self.prefix.rows, counts.max()), dtype=np.int64)
            grid[self.prefix_rows, column] = np.arange(len(self))
            arrays = self.prefix_lengths, grid, self.prefix_rows * grid.shape[1] + column
            self._shared = SharedPrefix(self.prefix, *(torch.from_numpy(part).to(device) for part in arrays))
        return self._shared

    def unshare(self) -> None:
        """Copy the shared prefix to each row, so that the batch can be merged with others."""
        if self.prefix is None:
            return
        whole = KVCache(len(self), int(self.prefix_lengths.max()) + self.cache.capacity)
        for name in ("keys", "values"):
            for layer, shared in getattr(self.prefix, name).items():
                new = shared.new_zeros(whole.rows, shared.shape[1], whole.capacity, shared.shape[3])
                own = getattr(self.cache, name).get(layer)  # None before the first decode step
                for row, (source, length) in enumerate(zip(self.prefix_rows, self.prefix_lengths, strict=True)):
                    new[row, :, :length] = shared[source, :, :length]
                    if own is not None:
                        new[row, :, length : length + self.cache.capacity] = own[row]
                getattr(whole, name)[layer] = new
        self.cache, self.prefix, self._shared = whole, None, None
        self.prefix_lengths, self.prefix_rows = np.zeros_like(self.prefix_lengths), np.zeros_like(self.prefix_rows)


def merged(first: DecodeBatch, second: DecodeBatch) -> DecodeBatch:
    """One batch with the rows of two batches that have no shared prefix. Their caches are emptied layer by layer, so
    that only one layer is in memory twice."""
    capacity = max(rounded_up(int(batch.slots.max()) + 1) for batch in (first, second))
    cache = KVCache(len(first) + len(second), capacity)
    for name in ("keys", "values"):
        for layer in list(getattr(first.cache, name)):
            above, below = (
                getattr(batch.cache, name).pop(layer)[: len(batch), :, :capacity] for batch in (first, second)
            )
            new = above.new_zeros(cache.rows, above.shape[1], capacity, above.shape[3])
            new[: len(first), :, : above.shape[2]] = above
            new[len(first) :, :, : below.shape[2]] = below
            getattr(cache, name)[layer] = new
    sequences, positions, lengths, rows = (
        np.concatenate([getattr(first, name), getattr(second, name)]) for name in PER_ROW
    )
    return DecodeBatch(cache, sequences, positions, lengths, rows)


class RunningBatches:
    """The running sequences, in batches. `prompt_lengths` and `prompts` (A,) int64 are prompt length and prompt number
    of each sequence. Sequences of one prompt that start together read its keys from one copy if all prompts of the
    batch have more than `share_from` tokens; 0: never."""

    def __init__(self, prompt_lengths: np.ndarray, prompts: np.ndarray, share_from: int):
        self.prompt_lengths = prompt_lengths
        self.prompts = prompts
        self.share_from = share_from
        self.batches: list[DecodeBatch] = []

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.batches)

    @property
    def sequences(self) -> np.ndarray:
        """The running sequences, (n,) int64, batch after batch."""
        return np.concatenate([np.array([], dtype=np.int64), *(batch.sequences for batch in self.batches)])

    @property
    def positions(self) -> np.ndarray:
        """The positions of the tokens that the next step feeds, (n,) int64."""
        return np.concatenate([np.array([], dtype=np.int64), *(batch.positions for batch in self.batches)])

    def room_for(self, waiting: np.ndarray, worthwhile: int) -> int:
        """How many of these sequences can start: all, because caches grow as long as there is memory."""
        return len(waiting)

    def start(self, wave: np.ndarray) -> list[Prefill]:
        """Start the sequences of `wave`, longest prompts first, in batches of similar lengths, none of them small.
        Returns what their caches get."""
        ends, begin = list[int](), 0
        for end in range(SMALL_BATCH, len(wave) - SMALL_BATCH + 1):
            shortest = MIN_LENGTH_RATIO * self.prompt_lengths[wave[begin]]
            if end - begin >= SMALL_BATCH and self.prompt_lengths[wave[end]] < shortest:
                ends.append(begin := end)
        prefills = list[Prefill]()
        for sequences in np.split(wave, ends):
            _, leaders, source = np.unique(self.prompts[sequences], return_index=True, return_inverse=True)
            lengths = np.maximum(self.prompt_lengths[sequences] - 1, 1)  # the first decode step feeds the last token
            longest, positions = int(lengths.max()), self.prompt_lengths[sequences] - 1
            if 0 < self.share_from <= lengths.min() and len(leaders) < len(sequences):  # one prefix for several
                filled, cache = KVCache(len(leaders), longest), KVCache(len(sequences), rounded_up(1))
                self.batches.append(DecodeBatch(cache, sequences.copy(), positions, lengths, source, prefix=filled))
                prompts = sequences[leaders]
            else:
                filled, zeros = KVCache(len(sequences), rounded_up(longest + 1)), np.zeros_like(lengths)
                self.batches.append(DecodeBatch(filled, sequences.copy(), positions, zeros, zeros.copy()))
                prompts = sequences[leaders][source]
            prefills.append(Prefill(filled, prompts, np.arange(len(prompts)), np.zeros_like(prompts)))
        return prefills

    def next_step(self, device: torch.device) -> tuple[Tensor, Tensor, list[DecodeMetadata]]:
        """Merge small batches and grow caches, so that the next step can write. Returns its inputs on `device`: the
        sequences and the positions of the tokens that are fed, (n,) int64 each, and the metadata of each batch."""
        for batch in self.batches:
            if len(batch) <= SMALL_BATCH // 2 and len(self.batches) > 1:
                batch.unshare()
        plain = sorted((batch for batch in self.batches if batch.prefix is None), key=len)
        while len(plain) > 1 and (len(plain) > MAX_BATCHES or len(plain[0]) + len(plain[1]) <= SMALL_BATCH):
            new = merged(plain[0], plain[1])
            self.batches = [batch for batch in self.batches if batch not in plain[:2]] + [new]
            plain = sorted([*plain[2:], new], key=len)
        for batch in self.batches:
            needed = int(batch.slots.max()) + 1
            if needed > batch.cache.capacity:
                batch.cache.grow(len(batch), rounded_up(needed))
        arrays = np.stack([self.sequences, self.positions, np.concatenate([batch.slots for batch in self.batches])])
        sequences, positions, slots = torch.from_numpy(arrays).to(device)
        metadata, first = list[DecodeMetadata](), 0
        for batch in self.batches:
            rows = slots[first : first + len(batch)]
            metadata.append(DecodeMetadata(first, batch.cache, rows, batch.shared_prefix(device)))
            first += len(batch)
        return sequences, positions, metadata

    def advance(self, finished: np.ndarray, tokens: int) -> None:
        """Record `tokens` new tokens of every running sequence, and drop those where `finished` (n,) is True. The last
        unfinished rows of a batch move into the holes."""
        first = 0
        for batch in self.batches:
            done = finished[first : first + len(batch)]
            first += len(batch)
            batch.positions += tokens
            if not done.any():
                continue
            left = int((~done).sum())
            holes, movers = np.flatnonzero(done[:left]), left + np.flatnonzero(~done[left:])
            if len(holes):
                batch.cache.move_rows(movers.tolist(), holes.tolist())
            for name in PER_ROW:
                values = getattr(batch, name)
                values[holes] = values[movers]
                setattr(batch, name, values[:left].copy())
            batch._shared = None
        self.batches = [batch for batch in self.batches if len(batch)]

    def clear(self) -> None:
        """Forget all running sequences."""
        self.batches = []
