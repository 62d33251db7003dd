"""The scheduler of continuous batching: which sequences are running, in batches of one KV cache each, and which prompts
to prefill next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache, KVPool, SharedPrefix, copy_shared_prefix, repack

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
            counts = np.bincount(self.prefix_rows, minlength=self.prefix.rows)  # sequences of each prompt
            order = np.argsort(self.prefix_rows, kind="stable")
            column = np.empty_like(order)  # number of each sequence among those of its prompt
            column[order] = np.arange(len(order)) - (np.cumsum(counts) - counts)[self.prefix_rows[order]]
            grid = np.zeros((self.prefix.rows, counts.max()), dtype=np.int64)
            grid[self.prefix_rows, column] = np.arange(len(self))
            arrays = self.prefix_lengths, grid, self.prefix_rows * grid.shape[1] + column
            self._shared = SharedPrefix(self.prefix, *(torch.from_numpy(part).to(slots.device) for part in arrays))
        return DecodeMetadata(first, len(self), self.cache, slots, self.cache.capacity, self._shared)


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


MAX_BATCHES = 4  # each batch costs some small operations per layer
SMALL_BATCH = 16  # fewer rows do not justify a batch
MIN_LENGTH_RATIO = 0.75  # shortest prompt of a new batch, relative to its longest
MAX_PREFILL_TOKENS = 8192  # of one forward pass


@dataclass(frozen=True)
class Prefill:
    """One forward pass over prompts, the first `tokens` tokens of each; its row i is that of `sequences[i]`.
    `write_prefill` of `cache` writes what `source` numbers to `rows`: rows of a `KVCache`, slots of a `KVPool`."""

    cache: KVCache | KVPool
    sequences: np.ndarray
    rows: np.ndarray
    source: np.ndarray
    tokens: int


def prefill_passes(lengths: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Divide prompts of `lengths` (n,) into forward passes of at most `MAX_PREFILL_TOKENS`, longest prompts first.
    Yields the prompts of a pass and its length: all but the last token, which the first decode step feeds, but at least
    one."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        tokens = max(int(lengths[order[start]]) - 1, 1)
        part = order[start : start + max(1, MAX_PREFILL_TOKENS // tokens)]
        yield part, tokens
        start += len(part)


class Scheduler:
    """Starts waiting sequences in waves, whenever enough rows are free. Arguments as in `PoolScheduler`."""

    def __init__(
        self, prompt_lengths: np.ndarray, prompts: np.ndarray, rows: int, samples: int = 1, share_from: int = 0
    ):
        self.prompt_lengths = prompt_lengths
        self.prompts = prompts
        self.rows = rows
        self.samples = samples
        self.share_from = share_from
        self.waiting = np.lexsort((np.arange(len(prompts)), prompts, -prompt_lengths))
        self.batches: list[DecodeBatch] = []

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return sum(len(batch) for batch in self.batches)

    def has_unfinished(self) -> bool:
        """Whether any sequence is running or waiting."""
        return bool(self.batches) or len(self.waiting) > 0

    def admit(self) -> list[Prefill]:
        """Start waiting sequences if enough rows are free; returns the forward passes that fill their caches."""
        free = self.rows - self.num_running
        worthwhile = min(max(4, self.rows // 8, self.samples), self.rows, len(self.waiting))
        if not len(self.waiting) or free < worthwhile:
            return []
        if free >= self.samples:
            free -= free % self.samples
        wave, self.waiting = self.waiting[:free], self.waiting[free:]
        ends, start = list[int](), 0  # divide the wave, longest prompt first, into parts of similar lengths, none small
        for end in range(SMALL_BATCH, len(wave) - SMALL_BATCH + 1):
            shortest = MIN_LENGTH_RATIO * self.prompt_lengths[wave[start]]
            if end - start >= SMALL_BATCH and self.prompt_lengths[wave[end]] < shortest:
                ends.append(start := end)
        prefills = list[Prefill]()
        for sequences in np.split(wave, ends):  # a decode batch each
            _, leaders, source = np.unique(self.prompts[sequences], return_index=True, return_inverse=True)
            lengths = np.maximum(self.prompt_lengths[sequences] - 1, 1)  # the first decode step feeds the last token
            longest, positions = int(lengths.max()), self.prompt_lengths[sequences] - 1
            if 0 < self.share_from <= lengths.min() and len(leaders) < len(sequences):  # one prefix for several
                prefix, cache = KVCache(len(leaders), longest), KVCache(len(sequences), rounded_up(1))
                self.batches.append(DecodeBatch(cache, sequences.copy(), positions, lengths, source, prefix=prefix))
                filled, source = prefix, np.arange(len(leaders))
            else:
                filled, zeros = KVCache(len(sequences), rounded_up(longest + 1)), np.zeros_like(lengths)
                self.batches.append(DecodeBatch(filled, sequences.copy(), positions, zeros, zeros.copy()))
            for part, tokens in prefill_passes(self.prompt_lengths[sequences[leaders]]):
                row_of = np.full(len(leaders), -1)  # row r of `filled` gets the prompt of leader `source[r]`
                row_of[part] = np.arange(len(part))
                rows = np.flatnonzero(row_of[source] >= 0)
                prefills.append(Prefill(filled, sequences[leaders][part], rows, row_of[source[rows]], tokens))
        return prefills

    def reserve_slots(self) -> None:
        """Merge small batches and grow caches, so that the next step can write."""
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
                batch.cache = repack([(batch.cache, len(batch))], rounded_up(needed))

    def advance(self, finished: np.ndarray, tokens: int = 1) -> None:
        """Record `tokens` new tokens of every running sequence; drop the `finished` ones, (n,) bool of all batches."""
        first = 0
        for batch in self.batches:
            done = finished[first : first + len(batch)]
            first += len(batch)
            batch.positions += tokens
            if done.any():
                batch.remove(done)
        self.batches = [batch for batch in self.batches if len(batch)]

    def preempt(self, rows: int) -> list[int]:
        """Return all running sequences to the front of the queue and allow only `rows` rows; returns the sequences."""
        running = np.array([], dtype=np.int64)
        if self.batches:
            running = np.concatenate([batch.sequences for batch in self.batches])
        self.batches = []
        self.waiting = np.concatenate([running, self.waiting])
        self.rows = rows
        return running.tolist()
