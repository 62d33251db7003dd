"""The running sequences of continuous batching in one pool of slots, for decode steps at fixed
addresses.

A sequence starts with a few more slots than its prompt needs, and moves to a segment twice as large
when it is full. So the rows that run together need memory for the tokens that they have, and not
for their longest possible responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dschat_ppo.rollout.kv_cache import SPARE, KVCache, Prefill
from dschat_ppo.rollout.running_batches import RunningRows, Sequences, rounded_up

FIRST_TOKENS = 128  # of a response, for which a sequence has slots when it starts
# a pool with a larger share in use grows; one with less has slots enough elsewhere
FULL = 0.75
POOL_GROWTH = 1.5
_NONE = np.array([], dtype=np.int64)


class FreeSlots:
    """The unused slots `first .. capacity - 1` of a pool, as runs of consecutive slots."""

    def __init__(self, first: int, capacity: int):
        self._runs: list[tuple[int, int]] = []  # (start, size), by start
        if capacity > first:
            self._runs.append((first, capacity - first))

    def take(self, sizes: Sequence[int]) -> list[int] | None:
        """The starts of segments of `sizes`, each in the first run that has room; None: some does
        not fit anywhere."""
        runs = list(self._runs)
        starts = []
        for size in sizes:
            fitting = (index for index, (_, room) in enumerate(runs) if room >= size)
            index = next(fitting, None)
            if index is None:
                return None
            start, room = runs[index]
            starts.append(start)
            if room > size:
                runs[index] = (start + size, room - size)
            else:
                del runs[index]
        self._runs = runs
        return starts

    def give_back(self, start: int, size: int) -> None:
        """`size` slots from `start` on are unused again."""
        runs: list[tuple[int, int]] = []
        for begin, length in sorted([*self._runs, (start, size)]):
            if runs and sum(runs[-1]) == begin:
                last_begin, last_length = runs[-1]
                runs[-1] = (last_begin, last_length + length)
            else:
                runs.append((begin, length))
        self._runs = runs


@dataclass(eq=False)
class PooledRows(RunningRows):
    """Rows in a pool; those of a prompt are next to each other. The tokens that are not in the
    prefix of a row are in its own segment, of `sizes` slots from slot `starts` on. `parked` is 1
    for rows that wait for a reply."""

    starts: np.ndarray
    sizes: np.ndarray
    parked: np.ndarray


class RunningPool:
    """The running ones of all `sequences`, with a segment of the slots of `pool` each.

    A wave starts only if each running sequence can then still double its segment once. If slots are
    used up all the same, the sequence with the shortest response goes back to the queue; its seed
    reproduces the response later. The one with the longest response is never chosen unless it is
    alone, and alone it fits, so all sequences finish.
    """

    def __init__(
        self,
        sequences: Sequences,
        pool: KVCache,
        most_slots: int,
        poll: int,
        share_from: int,
        stops_parked_first: bool = False,
    ):
        """
        Args:
            sequences: all of the generation.
            pool: a cache of one row, whose contents are lost. If it has the capacity that another
                rollout needed, it grows only once that is used up.
            most_slots: its largest capacity; raised to what a single sequence needs.
            poll: tokens of a decode step.
            share_from: sequences of a prompt with so many tokens read its keys from one copy; 0:
                never.
            stops_parked_first: if slots are used up, rows that wait for a reply stop before others:
                their replies may depend on those.
        """
        self.sequences = sequences
        self.pool = pool
        self.most_slots = most_slots
        self.poll = poll
        self._first_capacity = pool.capacity  # of another rollout, unless the pool is new
        self.share_from = share_from
        self.stops_parked_first = stops_parked_first
        # of each sequence: tokens that it shares, and most slots of its own
        self.prefix_lengths = np.zeros_like(sequences.prompts)
        self.needs = np.zeros_like(sequences.prompts)
        # by the index of a prompt: its tokens in the pool that its sequences share
        self._prompt_tokens = dict[int, int]()
        self.measure(np.arange(len(sequences.prompts)))
        self.clear()

    def measure(self, measured: np.ndarray) -> None:
        """Note what the sequences `measured` (n,) need, none of which is running, after their
        prompts or limits changed."""
        prompts = self.sequences.prompts
        # the first decode step feeds the last token of a prompt
        tokens = self.sequences.prompt_lengths[measured] - 1
        has_several = np.bincount(prompts)[prompts[measured]] > 1
        is_shared = (tokens >= self.share_from) & (self.share_from > 0) & has_several
        shared = np.where(is_shared, tokens, 0)
        self.prefix_lengths[measured] = shared
        self.needs[measured] = tokens - shared + self.sequences.limits[measured]
        self._prompt_tokens |= zip(prompts[measured].tolist(), shared.tolist(), strict=True)
        self._fit_longest()

    def _fit_longest(self) -> None:
        """Let the pool grow to what the longest sequence needs alone."""
        longest = int((self.prefix_lengths + self.needs).max())
        self.most_slots = max(self.most_slots, SPARE + 1 + longest)

    def clear(self) -> None:
        """Forget all running sequences."""
        self._fit_longest()
        self.rows = PooledRows.of([])
        self._prefixes: dict[int, int] = {}  # by prompt: first slot of its tokens
        self._free = FreeSlots(SPARE + 1, self.pool.capacity)

    def __len__(self) -> int:
        return len(self.rows)

    def first_sizes(self, sequences: np.ndarray) -> np.ndarray:
        """Slots with which `sequences` (n,) start, (n,) int64."""
        tokens = self.sequences.start_lengths[sequences] - 1 - self.prefix_lengths[sequences]
        sizes: np.ndarray = np.minimum(rounded_up(tokens + FIRST_TOKENS), self.needs[sequences])
        return sizes

    def room_for(self, waiting: np.ndarray, worthwhile: int) -> int:
        """How many of these sequences can start: at least `worthwhile` or none, and at least one if
        none is running."""
        rows = self.rows
        known = set(self._prefixes)
        promised = self._total(np.minimum(2 * rows.sizes, self.needs[rows.sequences]))
        doubled = np.minimum(2 * self.first_sizes(waiting), self.needs[waiting])
        for count, sequence in enumerate(waiting.tolist()):
            promised += doubled[count]
            prompt = int(self.sequences.prompts[sequence])
            if prompt not in known:
                promised += self.prefix_lengths[sequence]
                known.add(prompt)
            if promised > self.most_slots and (count or len(rows)):
                if count < worthwhile and len(rows):
                    return 0
                return count
        if len(waiting) < worthwhile and len(rows):
            return 0
        return len(waiting)

    def start(self, wave: np.ndarray) -> list[Prefill]:
        """Give the sequences of `wave` their first segments. Returns what the pool gets: prompts
        that are not in it."""
        prompt_of = self.sequences.prompts
        known = set(self._prefixes)
        zeros = np.zeros_like(wave)
        new = PooledRows(
            sequences=wave,
            positions=self.sequences.start_lengths[wave] - 1,
            prefix_lengths=self.prefix_lengths[wave],
            prefixes=zeros,
            starts=zeros,
            sizes=zeros,
            parked=zeros,
        )
        rows = PooledRows.of([self.rows, new])
        rows = rows.select(np.argsort(prompt_of[rows.sequences], kind="stable"))
        self.rows = rows
        new_prompts = prompt_of[wave[new.prefix_lengths > 0]].tolist()
        self._prefixes = dict.fromkeys(new_prompts, SPARE) | self._prefixes
        self._lay_out(np.where(rows.sizes > 0, rows.sizes, self.first_sizes(rows.sequences)))

        # (prompt, first slot) of shared prompts that are new, and of rows of the wave without one
        filled = [
            (prompt, start) for prompt, start in self._prefixes.items() if prompt not in known
        ]
        unshared = np.isin(rows.sequences, wave) & (rows.prefix_lengths == 0)
        unshared_prompts = prompt_of[rows.sequences[unshared]]
        filled += zip(unshared_prompts.tolist(), rows.starts[unshared].tolist(), strict=True)
        filled_prompts, starts = np.array(filled, dtype=np.int64).reshape(-1, 2).T
        prompts, leaders = np.unique(prompt_of[wave], return_index=True)
        sequences = wave[leaders][np.searchsorted(prompts, filled_prompts)]
        return [Prefill(self.pool, sequences, np.zeros_like(sequences), starts)]

    def _total(self, sizes: np.ndarray) -> int:
        """Slots in use if the running rows have segments of `sizes`."""
        return (
            SPARE
            + 1
            + int(sizes.sum())
            + sum(self._prompt_tokens[prompt] for prompt in self._prefixes)
        )

    def _sizes_for_poll(self) -> np.ndarray | None:
        """Sizes of segments with which each running sequence has slots for a poll, (n,); None: they
        do not fit."""
        rows = self.rows
        needs = self.needs[rows.sequences]
        needed = np.minimum(rows.slots + self.poll, needs)
        full = needed > rows.sizes
        doubled = np.maximum(2 * rows.sizes, needed)
        for new_sizes in (doubled, rounded_up(needed)):
            sizes = np.where(full, np.minimum(new_sizes, needs), rows.sizes)
            if not full.any() or self._total(sizes) <= self.most_slots:
                return sizes
        return None

    def stop_for_slots(self) -> list[int]:
        """Stop the sequences with the shortest responses (see `stops_parked_first`) until all
        others can have slots for a poll. Returns those that it stopped. It takes no memory, so none
        of them gets lost when memory runs out."""
        stopped: list[int] = []
        while self._sizes_for_poll() is None:
            lengths = self.rows.positions - self.sequences.prompt_lengths[self.rows.sequences]
            if self.stops_parked_first and self.rows.parked.any():
                lengths = np.where(self.rows.parked == 1, lengths, lengths.max() + 1)
            shortest = np.argmin(lengths)
            stopped.append(int(self.rows.sequences[shortest]))
            self._keep(np.arange(len(self)) != shortest)
        return stopped

    def reserve_slots(self) -> None:
        """Give each running sequence slots for a poll, after `stop_for_slots`."""
        sizes = self._sizes_for_poll()
        assert sizes is not None
        if (sizes != self.rows.sizes).any():
            self._lay_out(sizes)

    def _lay_out(self, sizes: np.ndarray) -> None:
        """Give the running rows segments of `sizes` (n,), and new prefixes theirs; move what the
        old ones hold. Rows that keep their size stay where they are, unless the free slots are too
        few or too scattered. Then all segments move together, and the pool grows if they fill most
        of it."""
        rows = self.rows
        capacity = self.pool.capacity
        lengths = {prompt: self._prompt_tokens[prompt] for prompt in self._prefixes}
        resized = np.flatnonzero(sizes != rows.sizes)
        new_prompts = [prompt for prompt, start in self._prefixes.items() if start == SPARE]
        starts = rows.starts.copy()
        prefixes = dict(self._prefixes)
        new_starts = self._free.take(
            [*sizes[resized].tolist(), *(lengths[prompt] for prompt in new_prompts)]
        )
        if new_starts is not None:
            starts[resized] = new_starts[: len(resized)]
            prefixes |= zip(new_prompts, new_starts[len(resized) :], strict=True)
        else:
            total = self._total(sizes)
            most = FULL * capacity
            if capacity == self._first_capacity:
                most = capacity
            if total > most:
                capacity = max(capacity, total, min(self.most_slots, int(POOL_GROWTH * capacity)))
            ends = np.cumsum([SPARE + 1, *lengths.values(), *sizes])
            prefixes = dict(zip(lengths, ends.tolist(), strict=False))
            starts = ends[len(lengths) : -1]
            self._free = FreeSlots(total, capacity)
        self._move(starts, prefixes, capacity)
        if new_starts is not None:
            for row in resized[rows.sizes[resized] > 0]:
                self._free.give_back(int(rows.starts[row]), int(rows.sizes[row]))
        rows.starts = starts
        rows.sizes = sizes
        self._prefixes = prefixes
        row_prompts = self.sequences.prompts[rows.sequences].tolist()
        row_prefixes = [prefixes.get(prompt, SPARE) for prompt in row_prompts]
        rows.prefixes = np.array(row_prefixes, dtype=np.int64)

    def _move(self, starts: np.ndarray, prefixes: dict[int, int], capacity: int) -> None:
        """Copy what the segments of rows and of shared prompts hold to new ones, which begin at
        `starts` (n,) and `prefixes`, and give the pool its `capacity`."""
        rows = self.rows
        # of rows that need more slots for what they observe, or start
        filled = np.minimum(rows.slots, rows.sizes)
        moves = list(zip(rows.starts, starts, filled, strict=True))  # (source, target, count)
        for prompt, source in self._prefixes.items():
            if source != SPARE:
                moves.append((source, prefixes[prompt], self._prompt_tokens[prompt]))
        if capacity == self.pool.capacity:
            moves = [move for move in moves if move[0] != move[1] and move[2]]
            if not moves:
                return
        sources = [source + np.arange(count) for source, _, count in moves]
        targets = [target + np.arange(count) for _, target, count in moves]
        self.pool.move_slots(
            np.concatenate([_NONE, *sources]), np.concatenate([_NONE, *targets]), capacity
        )

    @property
    def active(self) -> PooledRows:
        """The rows that the next step generates for: those that are not parked."""
        return self.rows.select(self.rows.parked == 0)

    def advance(self, finished: np.ndarray, tokens: int) -> None:
        """Record that every active row got `tokens` tokens; drop those where `finished` (n,) is
        True."""
        active = np.flatnonzero(self.rows.parked == 0)
        self.rows.positions[active] += tokens
        goes_on = np.ones(len(self), dtype=bool)
        goes_on[active] = ~finished
        self._keep(goes_on)

    def park(self, sequence: int, position: int) -> None:
        """Let the row of a sequence wait. `position`: of its last token, the one that is fed
        next."""
        row = self.rows.sequences == sequence
        self.rows.positions[row] = position
        self.rows.parked[row] = 1

    def resume(self, sequence: int, position: int) -> None:
        """Let the row of a sequence go on at `position`, whose earlier tokens are in its slots."""
        row = self.rows.sequences == sequence
        self.rows.positions[row] = position
        self.rows.parked[row] = 0

    def drop(self, sequence: int) -> None:
        """Let the row of a sequence go."""
        self._keep(self.rows.sequences != sequence)

    def _keep(self, goes_on: np.ndarray) -> None:
        """Drop the running rows where `goes_on` (n,) is False, and shared prompts without a row."""
        dropped = self.rows.select(~goes_on)
        self.rows = self.rows.select(goes_on)
        for start, size in zip(dropped.starts.tolist(), dropped.sizes.tolist(), strict=True):
            self._free.give_back(start, size)
        row_prompts = self.sequences.prompts[self.rows.sequences]
        for prompt in set(self._prefixes) - set(row_prompts.tolist()):
            self._free.give_back(self._prefixes.pop(prompt), self._prompt_tokens[prompt])
