"""The running sequences of decode steps at fixed addresses, and their slots in a KV pool.

A sequence starts with a few more slots than its prompt needs, and moves to a segment twice as large when it is full. So
the rows that run together need memory for the tokens that they have, and not for their longest possible answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from dschat_ppo.rollout.kv_cache import SPARE, KVCache, Prefill

FIRST_TOKENS = 128  # of an answer, for which a sequence has slots when it starts
SEGMENT_STEP = 32  # sizes of segments are multiples of it
FULL = 0.75  # a pool with a larger share in use grows; one with less has slots enough in other places
GROWTH = 1.5
_NONE = np.array([], dtype=np.int64)


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


class RunningPool:
    """The running sequences, with a segment of the slots of `pool` each.

    A wave starts only if each running sequence can then still double its segment once. If slots are used up all the
    same, the sequence with the shortest answer goes back to the queue; its seed reproduces the answer later. The one
    with the longest answer is never chosen unless it is alone, and alone it fits, so all sequences finish.

    Args:
        prompt_lengths, prompts, limits: (A,) int64, prompt length, prompt number and most response tokens of each
            sequence; sequences of one prompt are consecutive.
        pool: one row, whose contents are lost. If it has the capacity that another rollout needed, it grows only once
            that is used up.
        most_slots: the largest capacity of the pool; raised to what a single sequence needs.
        poll: tokens of a decode step.
        share_from: prompts of more tokens are in the pool once, for all their sequences; 0: never.
    """

    def __init__(
        self, prompt_lengths: np.ndarray, prompts: np.ndarray, limits: np.ndarray, pool: KVCache, most_slots: int,
        poll: int, share_from: int,
    ):  # fmt: skip
        self.prompt_lengths = prompt_lengths
        self.prompts = prompts
        self.pool = pool
        self.most_slots = most_slots
        self.poll = poll
        self._proven = pool.capacity  # enough for another rollout, unless the pool is new
        tokens = prompt_lengths - 1  # the first decode step feeds the last token of a prompt
        shared = (tokens >= share_from) & (share_from > 0) & (np.bincount(prompts)[prompts] > 1)
        self.prefix_lengths = np.where(shared, tokens, 0)
        self.needs = tokens - self.prefix_lengths + limits  # most slots of a sequence
        self.first_sizes = np.minimum(_rounded_up(tokens - self.prefix_lengths + FIRST_TOKENS), self.needs)
        self.clear()

    def clear(self) -> None:
        """Forget all running sequences."""
        self.most_slots = max(self.most_slots, SPARE + 1 + int((self.prefix_lengths + self.needs).max()))
        self.rows = PooledRows(*[_NONE] * len(fields(PooledRows)))
        self._prefixes: dict[int, int] = {}  # prompt number -> first slot of its tokens
        self._free = FreeSlots(SPARE + 1, self.pool.capacity)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sequences(self) -> np.ndarray:
        """The running sequences, (n,) int64."""
        return self.rows.sequences

    @property
    def positions(self) -> np.ndarray:
        """The positions of the tokens that the next step feeds, (n,) int64."""
        return self.rows.positions

    def room_for(self, waiting: np.ndarray, worthwhile: int) -> int:
        """How many of these sequences can start: at least `worthwhile` or none, and at least one if none is running."""
        rows, known = self.rows, set(self._prefixes)
        promised = self._total(np.minimum(2 * rows.sizes, self.needs[rows.sequences]))
        for count, sequence in enumerate(waiting.tolist()):
            promised += min(2 * self.first_sizes[sequence], self.needs[sequence])
            if (prompt := int(self.prompts[sequence])) not in known:
                promised += self.prefix_lengths[sequence]
                known.add(prompt)
            if promised > self.most_slots and (count or len(rows)):
                return 0 if count < worthwhile and len(rows) else count
        return 0 if len(waiting) < worthwhile and len(rows) else len(waiting)

    def start(self, wave: np.ndarray) -> list[Prefill]:
        """Give the sequences of `wave` their first segments. Returns what the pool gets: prompts that are not in it."""
        known, zeros = set(self._prefixes), np.zeros_like(wave)
        new = PooledRows(wave, self.prompt_lengths[wave] - 1, zeros, zeros, zeros, self.prefix_lengths[wave])
        rows = PooledRows.of([self.rows, new])
        self.rows = rows = rows.select(np.argsort(self.prompts[rows.sequences], kind="stable"))
        self._prefixes = dict.fromkeys(self.prompts[wave[new.prefix_lengths > 0]].tolist(), SPARE) | self._prefixes
        self._lay_out(np.where(rows.sizes > 0, rows.sizes, self.first_sizes[rows.sequences]))
        own = np.isin(rows.sequences, wave) & (rows.prefix_lengths == 0)
        added = [(prompt, start) for prompt, start in self._prefixes.items() if prompt not in known]
        added += zip(self.prompts[rows.sequences[own]].tolist(), rows.starts[own].tolist(), strict=True)
        numbers, starts = np.array(added, dtype=np.int64).reshape(-1, 2).T
        prompts, leaders = np.unique(self.prompts[wave], return_index=True)
        sequences = wave[leaders][np.searchsorted(prompts, numbers)]
        return [Prefill(self.pool, sequences, np.zeros_like(sequences), starts)]

    def _total(self, sizes: np.ndarray) -> int:
        """Slots in use if the running rows have segments of `sizes`."""
        return SPARE + 1 + int(sizes.sum()) + sum(self._prefix_lengths().values())

    def _prefix_lengths(self) -> dict[int, int]:
        """The length of each shared prompt in the pool, by prompt number."""
        rows = self.rows
        lengths = dict(zip(self.prompts[rows.sequences].tolist(), rows.prefix_lengths.tolist(), strict=True))
        return {prompt: lengths[prompt] for prompt in self._prefixes}

    def _sizes_for_poll(self) -> np.ndarray | None:
        """Sizes of segments with which each running sequence has slots for a poll, (n,); None: they do not fit."""
        rows, needs = self.rows, self.needs[self.rows.sequences]
        needed = np.minimum(rows.slots + self.poll, needs)
        full = needed > rows.sizes
        for wanted in (np.maximum(2 * rows.sizes, needed), _rounded_up(needed)):
            sizes = np.where(full, np.minimum(wanted, needs), rows.sizes)
            if not full.any() or self._total(sizes) <= self.most_slots:
                return sizes
        return None

    def stop_for_slots(self) -> list[int]:
        """Stop the sequences with the shortest answers until all others can have slots for a poll; returns these. It
        takes no memory, so none of them gets lost when memory runs out."""
        stopped: list[int] = []
        while self._sizes_for_poll() is None:
            shortest = np.argmin(self.positions - self.prompt_lengths[self.sequences])
            stopped.append(int(self.sequences[shortest]))
            self._keep(np.arange(len(self)) != shortest)
        return stopped

    def reserve_slots(self) -> None:
        """Give each running sequence slots for a poll, after `stop_for_slots`."""
        sizes = self._sizes_for_poll()
        assert sizes is not None
        if (sizes != self.rows.sizes).any():
            self._lay_out(sizes)

    def _lay_out(self, sizes: np.ndarray) -> None:
        """Give the running rows segments of `sizes` (n,), and new prefixes theirs; move what the old ones hold. Rows
        that keep their size stay where they are, unless the free slots are too few or too scattered. Then all segments
        move together, and the pool grows if they fill most of it."""
        rows, lengths, capacity = self.rows, self._prefix_lengths(), self.pool.capacity
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
        if capacity == self.pool.capacity:
            moves = [(old, new, count) for old, new, count in moves if old != new and count]
        if moves or capacity != self.pool.capacity:
            sources, targets = (
                np.concatenate([_NONE, *(move[end] + np.arange(move[2]) for move in moves)]) for end in (0, 1)
            )
            self.pool.move_slots(sources, targets, capacity)
        if found is not None:
            for row in grown[rows.sizes[grown] > 0]:
                self._free.give_back(int(rows.starts[row]), int(rows.sizes[row]))
        rows.starts, rows.sizes, self._prefixes = starts, sizes, prefixes
        of_rows = self.prompts[rows.sequences].tolist()
        rows.prefix_starts = np.array([prefixes.get(prompt, SPARE) for prompt in of_rows], dtype=np.int64)

    def advance(self, finished: np.ndarray, tokens: int) -> None:
        """Record that every running sequence got `tokens` tokens; drop those where `finished` (n,) is True."""
        self.rows.positions = self.rows.positions + tokens
        self._keep(~finished)

    def _keep(self, kept: np.ndarray) -> None:
        """Drop the running rows where `kept` (n,) is False, and shared prompts without a row."""
        lengths = self._prefix_lengths()
        dropped, self.rows = self.rows.select(~kept), self.rows.select(kept)
        for start, size in zip(dropped.starts.tolist(), dropped.sizes.tolist(), strict=True):
            self._free.give_back(start, size)
        for prompt in set(self._prefixes) - set(self.prompts[self.rows.sequences].tolist()):
            self._free.give_back(self._prefixes.pop(prompt), lengths[prompt])


def _rounded_up(sizes: np.ndarray) -> np.ndarray:
    return -(-sizes // SEGMENT_STEP) * SEGMENT_STEP
