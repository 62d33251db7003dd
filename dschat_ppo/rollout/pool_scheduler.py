"""The scheduler of decode steps at fixed addresses: which sequences are running, and their slots in a KV pool.

A sequence starts with a few more slots than its prompt needs, and moves to a segment twice as large when it is full. So
the rows that run together need memory for the tokens that they have, and not for their longest possible answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from dschat_ppo.rollout.kv_cache import SPARE, FreeSlots, KVPool
from dschat_ppo.rollout.scheduler import Prefill, prefill_passes

FIRST_TOKENS = 128  # of an answer, for which a sequence has slots when it starts
SEGMENT_STEP = 32  # sizes of segments are multiples of it
FULL = 0.75  # a pool with a larger share in use grows; one with less has slots enough in other places
GROWTH = 1.5


@dataclass(eq=False)
class PooledRows:
    """Running sequences, one entry for each, numpy int64 (n,). The rows of a prompt are next to each other.

    `sequences` are the rows in `SequenceBuffers`; `positions` those of the tokens that the next step feeds. The first
    `prefix_lengths` tokens of a row are in a segment for all rows of its prompt, from slot `prefix_starts` on; the
    others in its own segment of `sizes` slots from slot `starts` on.
    """

    sequences: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    prefix_starts: np.ndarray
    prefix_lengths: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[PooledRows]) -> PooledRows:
        """The rows of all parts, in order."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def slots(self) -> np.ndarray:
        """The number of own tokens of each row, (n,) int64: the next one goes to that slot of its segment."""
        return self.positions - self.prefix_lengths

    def select(self, chosen: np.ndarray) -> PooledRows:
        """The rows where `chosen` (n,) is True."""
        return PooledRows(*(getattr(self, field.name)[chosen] for field in fields(self)))


_NONE = np.array([], dtype=np.int64)


class PoolScheduler:
    """Starts waiting sequences whenever enough rows and slots are free.

    A wave starts only if each running sequence can then still double its segment once. If slots are used up all the
    same, the sequence with the shortest answer goes back to the queue; its seed reproduces the answer later. The one
    with the longest answer is never chosen unless it is alone, and alone it fits, so all sequences finish.

    Args:
        prompt_lengths, prompts, limits: (A,) int64, prompt length, prompt number and most response tokens of each
            sequence; sequences of one prompt are consecutive.
        rows: the largest number of running sequences.
        pool: its contents are lost. If it has the capacity that another rollout needed, it grows only once that is used
            up.
        most_slots: the largest capacity of the pool; raised to what a single sequence needs.
        poll: tokens of a decode step.
        share_from: prompts of at least this length are in the pool once, for all their sequences; 0: never.
    """

    def __init__(
        self, prompt_lengths: np.ndarray, prompts: np.ndarray, limits: np.ndarray, rows: int, pool: KVPool,
        most_slots: int, poll: int, samples: int = 1, share_from: int = 0,
    ):  # fmt: skip
        self.prompts = prompts
        self.rows = rows
        self.pool = pool
        self._proven = pool.capacity  # enough for another rollout, unless the pool is new
        self.poll = poll
        self.samples = samples
        tokens = prompt_lengths - 1  # the first decode step feeds the last token of a prompt
        shared = (tokens >= share_from) & (samples > 1 and share_from > 0)
        self.prompt_lengths = prompt_lengths
        self.prefix_lengths = np.where(shared, tokens, 0)
        self.needs = tokens - self.prefix_lengths + limits  # most slots of a sequence
        self.first_sizes = np.minimum(_rounded_up(tokens - self.prefix_lengths + FIRST_TOKENS), self.needs)
        self._least_slots = SPARE + 1 + int((self.prefix_lengths + self.needs).max())
        self.most_slots = max(most_slots, self._least_slots)
        self.waiting = np.lexsort((np.arange(len(prompts)), prompts, -prompt_lengths))
        self._clear()

    def _clear(self) -> None:
        self.running = PooledRows(*[_NONE] * len(fields(PooledRows)))
        self._prefixes: dict[int, int] = {}  # prompt number -> first slot of its tokens
        self._free = FreeSlots(SPARE + 1, self.pool.capacity)

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return len(self.running)

    def has_unfinished(self) -> bool:
        """Whether any sequence is running or waiting."""
        return len(self.running) > 0 or len(self.waiting) > 0

    def admit(self) -> list[Prefill]:
        """Start waiting sequences if enough rows and slots are free; returns the forward passes that fill the pool."""
        free = self.rows - len(self.running)
        worthwhile = min(max(4, len(self.running) // 8, self.samples), self.rows, len(self.waiting))
        if not len(self.waiting) or free < worthwhile:
            return []
        if free >= self.samples:
            free -= free % self.samples
        count = self._fitting(free)
        if count < worthwhile and len(self.running):
            return []
        wave, self.waiting = self.waiting[:count], self.waiting[count:]
        prompts = self.prompts[wave]
        known = set(self._prefixes)
        zeros = np.zeros_like(wave)
        new = PooledRows(wave, self.prompt_lengths[wave] - 1, zeros, zeros, zeros, self.prefix_lengths[wave])
        rows = PooledRows.of([self.running, new])
        self.running = rows.select(np.argsort(self.prompts[rows.sequences], kind="stable"))
        self._prefixes = dict.fromkeys(prompts[new.prefix_lengths > 0].tolist(), SPARE) | self._prefixes
        self._lay_out(np.where(self.running.sizes > 0, self.running.sizes, self.first_sizes[self.running.sequences]))
        return self._prefills(wave, known)

    def _fitting(self, most: int) -> int:
        """How many waiting sequences can start, at most `most`; at least one if none is running."""
        rows, known = self.running, set(self._prefixes)
        promised = self._total(np.minimum(2 * rows.sizes, self.needs[rows.sequences]))
        for count, sequence in enumerate(self.waiting[:most].tolist()):
            promised += min(2 * self.first_sizes[sequence], self.needs[sequence])
            if (prompt := int(self.prompts[sequence])) not in known:
                promised += self.prefix_lengths[sequence]
                known.add(prompt)
            if promised > self.most_slots and (count or len(rows)):
                return count
        return min(most, len(self.waiting))

    def _total(self, sizes: np.ndarray) -> int:
        """Slots in use if the running rows have segments of `sizes`."""
        return SPARE + 1 + int(sizes.sum()) + sum(self._prefix_lengths().values())

    def _prefix_lengths(self) -> dict[int, int]:
        """The length of each shared prompt in the pool, by prompt number."""
        rows = self.running
        lengths = dict(zip(self.prompts[rows.sequences].tolist(), rows.prefix_lengths.tolist(), strict=True))
        return {prompt: lengths[prompt] for prompt in self._prefixes}

    def reserve_slots(self) -> list[int]:
        """Give each running sequence slots for a poll; returns the sequences that went back to the queue for that."""
        preempted: list[int] = []
        while True:
            rows, needs = self.running, self.needs[self.running.sequences]
            needed = np.minimum(rows.slots + self.poll, needs)
            full = needed > rows.sizes
            if not full.any():
                return preempted
            for wanted in (np.maximum(2 * rows.sizes, needed), _rounded_up(needed)):
                sizes = np.where(full, np.minimum(wanted, needs), rows.sizes)
                if self._total(sizes) <= self.most_slots:
                    self._lay_out(sizes)
                    return preempted
            shortest = np.argmin(rows.positions - self.prompt_lengths[rows.sequences])
            preempted.append(int(rows.sequences[shortest]))
            self.waiting = np.concatenate([rows.sequences[[shortest]], self.waiting])
            self._keep(np.arange(len(rows)) != shortest)

    def _lay_out(self, sizes: np.ndarray) -> None:
        """Give the running rows segments of `sizes` (n,), and new prefixes theirs; move what the old ones hold. Rows
        that keep their size stay where they are, unless the free slots are too few or too scattered. Then all segments
        move together, and the pool grows if they fill most of it."""
        rows, lengths, capacity = self.running, self._prefix_lengths(), self.pool.capacity
        grown = np.flatnonzero(sizes != rows.sizes)
        fresh = [prompt for prompt, start in self._prefixes.items() if start == SPARE]
        starts, prefixes = rows.starts.copy(), dict(self._prefixes)
        found = self._free.take([*sizes[grown].tolist(), *(lengths[prompt] for prompt in fresh)])
        if found is not None:
            starts[grown] = found[: len(grown)]
            prefixes |= zip(fresh, found[len(grown) :], strict=True)
        else:
            total = self._total(sizes)
            if total > (capacity if capacity == self._proven else FULL * capacity):
                capacity = max(capacity, total, min(self.most_slots, int(GROWTH * capacity)))
            ends = np.cumsum([SPARE + 1, *lengths.values(), *sizes])
            prefixes, starts = dict(zip(lengths, ends.tolist(), strict=False)), ends[len(lengths) : -1]
            self._free = FreeSlots(total, capacity)
        moves = list(zip(rows.starts, starts, np.where(rows.sizes > 0, rows.slots, 0), strict=True))
        moves += [(old, prefixes[prompt], lengths[prompt]) for prompt, old in self._prefixes.items() if old != SPARE]
        self._move(moves, capacity)
        if found is not None:
            for row in grown[rows.sizes[grown] > 0]:
                self._free.give_back(int(rows.starts[row]), int(rows.sizes[row]))
        rows.starts, rows.sizes, self._prefixes = starts, sizes, prefixes
        numbers = self.prompts[rows.sequences].tolist()
        rows.prefix_starts = np.array([prefixes.get(prompt, SPARE) for prompt in numbers], dtype=np.int64)

    def _move(self, moves: list[tuple[int, int, int]], capacity: int) -> None:
        """Copy `count` slots from `old` to `new` for each (old, new, count) in the pool."""
        if capacity == self.pool.capacity:
            moves = [(old, new, count) for old, new, count in moves if old != new]
        sources, targets = (
            np.concatenate([_NONE, *(move[end] + np.arange(move[2]) for move in moves)]) for end in (0, 1)
        )
        if len(sources) or capacity != self.pool.capacity:
            self.pool.repack(sources, targets, capacity)

    def _prefills(self, wave: np.ndarray, known: set[int]) -> list[Prefill]:
        """Forward passes over the prompts of a wave, without the prompts `known` that are in the pool."""
        rows = self.running
        own = np.isin(rows.sequences, wave) & (rows.prefix_lengths == 0)
        targets = list(zip(self.prompts[rows.sequences[own]].tolist(), rows.starts[own].tolist(), strict=True))
        targets += [(prompt, start) for prompt, start in self._prefixes.items() if prompt not in known]
        sequence_of = {int(self.prompts[sequence]): sequence for sequence in wave[::-1].tolist()}
        leaders = np.array([sequence_of[prompt] for prompt in dict.fromkeys(prompt for prompt, _ in targets)], np.int64)
        passes = []
        for part, tokens in prefill_passes(self.prompt_lengths[leaders]):
            number = {int(self.prompts[leader]): row for row, leader in enumerate(leaders[part])}
            source, slots = [_NONE], [_NONE]
            for prompt, start in targets:
                if prompt in number:
                    places = np.arange(self.prompt_lengths[sequence_of[prompt]] - 1)
                    source.append(number[prompt] * tokens + places)
                    slots.append(start + places)
            passes.append(Prefill(self.pool, leaders[part], np.concatenate(slots), np.concatenate(source), tokens))
        return passes

    def advance(self, finished: np.ndarray, tokens: int) -> None:
        """Record that every running sequence got `tokens` tokens; drop those where `finished` (n,) is True."""
        self.running.positions = self.running.positions + tokens
        self._keep(~finished)

    def _keep(self, kept: np.ndarray) -> None:
        """Drop the running rows where `kept` (n,) is False, and shared prompts without a row."""
        lengths = self._prefix_lengths()
        dropped, self.running = self.running.select(~kept), self.running.select(kept)
        for start, size in zip(dropped.starts.tolist(), dropped.sizes.tolist(), strict=True):
            self._free.give_back(start, size)
        for prompt in set(self._prefixes) - set(self.prompts[self.running.sequences].tolist()):
            self._free.give_back(self._prefixes.pop(prompt), lengths[prompt])

    def preempt(self, rows: int) -> list[int]:
        """Return all running sequences to the front of the queue and allow only `rows` rows; returns the sequences. The
        pool is empty then, and may grow to as many slots a row as before."""
        sequences = self.running.sequences
        self.waiting = np.concatenate([sequences, self.waiting])
        self.most_slots = max(self._least_slots, self.most_slots * rows // self.rows)
        self.rows = rows
        self.pool.release()
        self._clear()
        return sequences.tolist()


def _rounded_up(sizes: np.ndarray) -> np.ndarray:
    return -(-sizes // SEGMENT_STEP) * SEGMENT_STEP
