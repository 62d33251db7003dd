"""The scheduler of continuous batching: which sequences are running, and which prompts to prefill next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dschat_ppo.rollout.decode_batch import DecodeBatch, merged, rounded_up
from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.kv_pool import KVPool

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
        prefills = list[Prefill]()
        for sequences in self._by_length(wave):  # a decode batch each
            _, leaders, source = np.unique(self.prompts[sequences], return_index=True, return_inverse=True)
            lengths = np.maximum(self.prompt_lengths[sequences] - 1, 1)  # the first decode step feeds the last token
            longest, positions = int(lengths.max()), self.prompt_lengths[sequences] - 1
            if 0 < self.share_from <= lengths.min() and len(leaders) < len(sequences):  # one prefix for several
                prefix, cache = KVCache(len(leaders), longest), KVCache(len(sequences), rounded_up(1))
                batch = DecodeBatch(cache, sequences.copy(), positions, lengths, source, prefix=prefix)
                prefills += self._prefills(prefix, sequences[leaders], np.arange(len(leaders)))
            else:
                cache, zeros = KVCache(len(sequences), rounded_up(longest + 1)), np.zeros_like(lengths)
                batch = DecodeBatch(cache, sequences.copy(), positions, zeros, zeros.copy())
                prefills += self._prefills(cache, sequences[leaders], source)
            self.batches.append(batch)
        return prefills

    def _by_length(self, wave: np.ndarray) -> Iterator[np.ndarray]:
        """Split a wave (longest prompt first) into parts of similar prompt lengths, none of them small."""
        start = 0
        for end in range(1, len(wave) + 1):
            lengths, left = self.prompt_lengths[wave[start:end]], len(wave) - end
            if end == len(wave):
                yield wave[start:]
            elif end - start >= SMALL_BATCH <= left and self.prompt_lengths[wave[end]] < MIN_LENGTH_RATIO * lengths[0]:
                yield wave[start:end]
                start = end

    def _prefills(self, cache: KVCache, leaders: np.ndarray, source: np.ndarray) -> Iterator[Prefill]:
        """Forward passes over the prompts of `leaders`; row r of `cache` gets that of `leaders[source[r]]`."""
        for part, tokens in prefill_passes(self.prompt_lengths[leaders]):
            row_of = np.full(len(leaders), -1)
            row_of[part] = np.arange(len(part))
            rows = np.flatnonzero(row_of[source] >= 0)
            yield Prefill(cache, leaders[part], rows, row_of[source[rows]], tokens)

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
            batch.reserve_slots()

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
