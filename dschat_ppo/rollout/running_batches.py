"""The running sequences of continuous batching and their places in KV caches.

On a CPU, and where passes are collective, they run in batches of one cache each, which grows.
Decode steps at fixed addresses have one pool of slots: a sequence starts with a few more than its
prompt needs, and moves to a segment twice as large when it is full. So the rows that run together
need memory for the tokens that they have, and not for their longest possible answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dschat_ppo.rollout.kv_cache import SPARE, DecodeMetadata, KVCache, Prefill, SharedPrefix

# slots by which a cache or a segment grows: less means more copies, more means more empty slots
GROWTH = 32
MAX_BATCHES = 4  # each batch costs some small operations per layer
SMALL_BATCH = 16  # fewer rows do not justify a batch
MIN_LENGTH_RATIO = 0.75  # shortest prompt of a new batch, relative to its longest
# Of a pool:
FIRST_TOKENS = 128  # of an answer, for which a sequence has slots when it starts
# a pool with a larger share in use grows; one with less has slots enough in other places
FULL = 0.75
POOL_GROWTH = 1.5
_NONE = np.array([], dtype=np.int64)

AnyRows = TypeVar("AnyRows", bound="Rows")


def rounded_up(slots: Any) -> Any:
    """A number of slots, or an array of numbers, rounded up to a multiple of `GROWTH`."""
    return -(-slots // GROWTH) * GROWTH


@dataclass(eq=False)
class Rows:
    """Running sequences, one entry for each, numpy int64 (n,).

    `sequences` are the rows in `SequenceBuffers`; `positions` those of the tokens that the next
    step feeds. The first `prefix_lengths` tokens of a row are kept once for all rows of its prompt,
    at the place `prefixes`: a row of the prefix of a `DecodeBatch`, or the first slot in a pool.
    Without a prefix both are 0.
    """

    sequences: np.ndarray
    positions: np.ndarray
    prefix_lengths: np.ndarray
    prefixes: np.ndarray

    @classmethod
    def of(cls: type[AnyRows], parts: Sequence[AnyRows]) -> AnyRows:
        """The rows of all parts, in order."""
        columns = ([getattr(part, field.name) for part in parts] for field in fields(cls))
        return cls(*(np.concatenate([_NONE, *column]) for column in columns))

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def slots(self) -> np.ndarray:
        """The number of own tokens of each row, (n,) int64: the next one goes to that slot of its
        row or segment."""
        return self.positions - self.prefix_lengths

    def select(self: AnyRows, chosen: np.ndarray) -> AnyRows:
        """The rows where `chosen` (n,) is True, or those with these numbers."""
        return type(self)(*(getattr(self, field.name)[chosen] for field in fields(self)))


@dataclass(eq=False)
class DecodeBatch:
    """Running sequences in the first rows of `cache`. Sequences of one prompt may share its keys:
    `prefix` then holds one row for each prompt."""

    cache: KVCache
    rows: Rows
    prefix: KVCache | None = None
    _shared: SharedPrefix | None = None  # of the current rows, made by the first step that needs it

    def __len__(self) -> int:
        return len(self.rows)

    def shared_prefix(self, device: torch.device) -> SharedPrefix | None:
        """Which rows read which prompt of the prefix; None without one."""
        if self.prefix is not None and self._shared is None:
            prefixes = self.rows.prefixes
            counts = np.bincount(prefixes, minlength=self.prefix.rows)  # sequences of each prompt
            order = np.argsort(prefixes, kind="stable")
            column = np.empty_like(order)  # number of each sequence among those of its prompt
            column[order] = np.arange(len(order)) - (np.cumsum(counts) - counts)[prefixes[order]]
            grid = np.zeros((self.prefix.rows, counts.max()), dtype=np.int64)
            grid[prefixes, column] = np.arange(len(self))
            arrays = self.rows.prefix_lengths, grid, prefixes * grid.shape[1] + column
            self._shared = SharedPrefix(
                self.prefix, *(torch.from_numpy(part).to(device) for part in arrays)
            )
        return self._shared

    def unshare(self) -> None:
        """Copy the shared prefix to each row, so that the batch can be merged with others."""
        if self.prefix is None:
            return
        rows = self.rows
        whole = KVCache(len(rows), int(rows.prefix_lengths.max()) + self.cache.capacity)
        for name in ("keys", "values"):
            for layer, shared in getattr(self.prefix, name).items():
                new = shared.new_zeros(whole.rows, shared.shape[1], whole.capacity, shared.shape[3])
                own = getattr(self.cache, name).get(layer)  # None before the first decode step
                for row, (source, length) in enumerate(
                    zip(rows.prefixes, rows.prefix_lengths, strict=True)
                ):
                    new[row, :, :length] = shared[source, :, :length]
                    if own is not None:
                        new[row, :, length : length + self.cache.capacity] = own[row]
                getattr(whole, name)[layer] = new
        self.cache, self.prefix, self._shared = whole, None, None
        rows.prefix_lengths, rows.prefixes = (
            np.zeros_like(rows.prefixes),
            np.zeros_like(rows.prefixes),
        )


def merged(first: DecodeBatch, second: DecodeBatch) -> DecodeBatch:
    """One batch with the rows of two without a shared prefix, whose caches are emptied layer by
    layer."""
    capacity = max(rounded_up(int(batch.rows.slots.max()) + 1) for batch in (first, second))
    cache = KVCache(len(first) + len(second), capacity)
    for name in ("keys", "values"):
        for layer in list(getattr(first.cache, name)):
            above, below = (
                getattr(batch.cache, name).pop(layer)[: len(batch), :, :capacity]
                for batch in (first, second)
            )
            new = above.new_zeros(cache.rows, above.shape[1], capacity, above.shape[3])
            new[: len(first), :, : above.shape[2]] = above
            new[len(first) :, :, : below.shape[2]] = below
            getattr(cache, name)[layer] = new
    return DecodeBatch(cache, Rows.of([first.rows, second.rows]))


@dataclass(eq=False)
class RunningBatches:
    """The running sequences, in batches. `prompt_lengths` and `prompts` (A,) int64 are prompt
    length and prompt number of each sequence. Sequences of one prompt that start together read its
    keys from one copy if all prompts of the batch have more than `share_from` tokens; 0: never."""

    prompt_lengths: np.ndarray
    prompts: np.ndarray
    share_from: int
    batches: list[DecodeBatch] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.batches)

    @property
    def rows(self) -> Rows:
        """The running sequences, batch after batch."""
        return Rows.of([batch.rows for batch in self.batches])

    def room_for(self, waiting: np.ndarray, worthwhile: int) -> int:
        """How many of these sequences can start: all, because caches grow as long as there is
        memory."""
        return len(waiting)

    def start(self, wave: np.ndarray) -> list[Prefill]:
        """Start `wave`, longest prompts first, in batches of similar lengths, none small; what
        their caches get."""
        ends = list[int]()
        begin = 0
        for end in range(SMALL_BATCH, len(wave) - SMALL_BATCH + 1):
            shortest = MIN_LENGTH_RATIO * self.prompt_lengths[wave[begin]]
            if end - begin >= SMALL_BATCH and self.prompt_lengths[wave[end]] < shortest:
                ends.append(begin := end)
        prefills = list[Prefill]()
        for sequences in np.split(wave, ends):
            _, leaders, source = np.unique(
                self.prompts[sequences], return_index=True, return_inverse=True
            )
            # the first decode step feeds the last token
            lengths = np.maximum(self.prompt_lengths[sequences] - 1, 1)
            prompts = sequences[leaders]
            longest = int(lengths.max())
            zeros = np.zeros_like(source)
            rows = Rows(sequences, self.prompt_lengths[sequences] - 1, zeros, zeros)
            # one prefix for several
            if 0 < self.share_from <= lengths.min() and len(leaders) < len(sequences):
                filled = KVCache(len(leaders), longest)
                cache = KVCache(len(sequences), rounded_up(1))
                rows.prefix_lengths, rows.prefixes = lengths, source
                self.batches.append(DecodeBatch(cache, rows, filled))
            else:
                filled = KVCache(len(sequences), rounded_up(longest + 1))
                prompts = prompts[source]
                self.batches.append(DecodeBatch(filled, rows))
            prefills.append(
                Prefill(filled, prompts, np.arange(len(prompts)), np.zeros_like(prompts))
            )
        return prefills

    def next_step(self, device: torch.device) -> tuple[Tensor, Tensor, list[DecodeMetadata]]:
        """Merge small batches and grow caches, so that the next step can write. Returns its inputs
        on `device`: the sequences and the positions of the tokens that are fed, (n,) int64 each,
        and the metadata of each batch."""
        for batch in self.batches:
            if len(batch) <= SMALL_BATCH // 2 and len(self.batches) > 1:
                batch.unshare()
        plain = sorted((batch for batch in self.batches if batch.prefix is None), key=len)
        while len(plain) > 1 and (
            len(plain) > MAX_BATCHES or len(plain[0]) + len(plain[1]) <= SMALL_BATCH
        ):
            new = merged(plain[0], plain[1])
            self.batches = [batch for batch in self.batches if batch not in plain[:2]] + [new]
            plain = sorted([*plain[2:], new], key=len)
        for batch in self.batches:
            needed = int(batch.rows.slots.max()) + 1
            if needed > batch.cache.capacity:
                batch.cache.grow(len(batch), rounded_up(needed))
        rows = self.rows
        arrays = np.stack([rows.sequences, rows.positions, rows.slots])
        sequences, positions, slots = torch.from_numpy(arrays).to(device)
        metadata = list[DecodeMetadata]()
        first = 0
        for batch in self.batches:
            own = slots[first : first + len(batch)]
            metadata.append(DecodeMetadata(first, batch.cache, own, batch.shared_prefix(device)))
            first += len(batch)
        return sequences, positions, metadata

    def advance(self, finished: np.ndarray, tokens: int) -> None:
        """Record `tokens` new tokens of each; the last unfinished rows move into the holes of those
        `finished` (n,)."""
        first = 0
        for batch in self.batches:
            done = finished[first : first + len(batch)]
            first += len(batch)
            batch.rows.positions += tokens
            if not done.any():
                continue
            kept = np.arange((~done).sum())
            holes = np.flatnonzero(done[: len(kept)])
            movers = len(kept) + np.flatnonzero(~done[len(kept) :])
            if len(holes):
                batch.cache.move_rows(movers.tolist(), holes.tolist())
            kept[holes] = movers
            batch.rows = batch.rows.select(kept)
            batch._shared = None
        self.batches = [batch for batch in self.batches if len(batch)]

    def clear(self) -> None:
        """Forget all running sequences."""
        self.batches = []


class FreeSlots:
    """The unused slots `first .. capacity - 1` of a pool, as runs of consecutive slots."""

    def __init__(self, first: int, capacity: int):
        # (start, size), by start
        if capacity > first:
            self._runs = [(first, capacity - first)]
        else:
            self._runs = []

    def take(self, sizes: Sequence[int]) -> list[int] | None:
        """The starts of segments of `sizes`, each in the first run that has room; None: some does
        not fit anywhere."""
        runs = list(self._runs)
        starts = []
        for size in sizes:
            number = next((number for number, (_, room) in enumerate(runs) if room >= size), None)
            if number is None:
                return None
            start, room = runs[number]
            starts.append(start)
            if room > size:
                runs[number : number + 1] = [(start + size, room - size)]
            else:
                runs[number : number + 1] = []
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
class PooledRows(Rows):
    """Rows in a pool; those of a prompt are next to each other. The tokens that are not in the
    prefix of a row are in its own segment, of `sizes` slots from slot `starts` on. `parked` is 1
    for rows that wait for an environment."""

    starts: np.ndarray
    sizes: np.ndarray
    parked: np.ndarray


class RunningPool:
    """The running sequences, with a segment of the slots of `pool` each.

    A wave starts only if each running sequence can then still double its segment once. If slots are
    used up all the same, the sequence with the shortest answer goes back to the queue; its seed
    reproduces the answer later. The one with the longest answer is never chosen unless it is alone,
    and alone it fits, so all sequences finish.

    Arguments as of `RunningBatches`; sequences of one prompt are consecutive. `limits` (A,) int64:
    most response tokens of each. `pool`: one row, whose contents are lost; if it has the capacity
    that another rollout needed, it grows only once that is used up. `most_slots`: its largest
    capacity; raised to what a single sequence needs. `poll`: tokens of a decode step. `given` (A,)
    int64: tokens with which each sequence starts, of which its prompt is the beginning; None: the
    prompt. The caller may change it.
    """

    def __init__(
        self,
        prompt_lengths: np.ndarray,
        prompts: np.ndarray,
        limits: np.ndarray,
        pool: KVCache,
        most_slots: int,
        poll: int,
        share_from: int,
        given: np.ndarray | None = None,
    ):
        self.prompt_lengths = prompt_lengths
        self.prompts = prompts
        self.given = prompt_lengths if given is None else given
        self.pool = pool
        self.most_slots = most_slots
        self.poll = poll
        self._proven = pool.capacity  # enough for another rollout, unless the pool is new
        tokens = prompt_lengths - 1  # the first decode step feeds the last token of a prompt
        shared = (tokens >= share_from) & (share_from > 0) & (np.bincount(prompts)[prompts] > 1)
        self.prefix_lengths = np.where(shared, tokens, 0)
        # by number of the prompt
        self._shared = dict(zip(prompts.tolist(), self.prefix_lengths.tolist(), strict=True))
        self.needs = tokens - self.prefix_lengths + limits  # most slots of a sequence
        self.clear()

    def clear(self) -> None:
        """Forget all running sequences."""
        self.most_slots = max(
            self.most_slots, SPARE + 1 + int((self.prefix_lengths + self.needs).max())
        )
        self.rows = PooledRows.of([])
        self._prefixes: dict[int, int] = {}  # prompt number -> first slot of its tokens
        self._free = FreeSlots(SPARE + 1, self.pool.capacity)

    def __len__(self) -> int:
        return len(self.rows)

    def first_sizes(self, sequences: np.ndarray) -> np.ndarray:
        """Slots with which `sequences` (n,) start, (n,) int64."""
        own = self.given[sequences] - 1 - self.prefix_lengths[sequences]
        sizes: np.ndarray = np.minimum(rounded_up(own + FIRST_TOKENS), self.needs[sequences])
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
            if (prompt := int(self.prompts[sequence])) not in known:
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
        known = set(self._prefixes)
        zeros = np.zeros_like(wave)
        new = PooledRows(
            wave, self.given[wave] - 1, self.prefix_lengths[wave], zeros, zeros, zeros, zeros
        )
        rows = PooledRows.of([self.rows, new])
        self.rows = rows = rows.select(np.argsort(self.prompts[rows.sequences], kind="stable"))
        self._prefixes = (
            dict.fromkeys(self.prompts[wave[new.prefix_lengths > 0]].tolist(), SPARE)
            | self._prefixes
        )
        self._lay_out(np.where(rows.sizes > 0, rows.sizes, self.first_sizes(rows.sequences)))
        own = np.isin(rows.sequences, wave) & (rows.prefix_lengths == 0)
        added = [(prompt, start) for prompt, start in self._prefixes.items() if prompt not in known]
        added += zip(
            self.prompts[rows.sequences[own]].tolist(), rows.starts[own].tolist(), strict=True
        )
        numbers, starts = np.array(added, dtype=np.int64).reshape(-1, 2).T
        prompts, leaders = np.unique(self.prompts[wave], return_index=True)
        sequences = wave[leaders][np.searchsorted(prompts, numbers)]
        return [Prefill(self.pool, sequences, np.zeros_like(sequences), starts)]

    def _total(self, sizes: np.ndarray) -> int:
        """Slots in use if the running rows have segments of `sizes`."""
        return SPARE + 1 + int(sizes.sum()) + sum(self._shared[prompt] for prompt in self._prefixes)

    def _sizes_for_poll(self) -> np.ndarray | None:
        """Sizes of segments with which each running sequence has slots for a poll, (n,); None: they
        do not fit."""
        rows = self.rows
        needs = self.needs[self.rows.sequences]
        needed = np.minimum(rows.slots + self.poll, needs)
        full = needed > rows.sizes
        for wanted in (np.maximum(2 * rows.sizes, needed), rounded_up(needed)):
            sizes = np.where(full, np.minimum(wanted, needs), rows.sizes)
            if not full.any() or self._total(sizes) <= self.most_slots:
                return sizes
        return None

    def stop_for_slots(self) -> list[int]:
        """Stop the sequences with the shortest answers until all others can have slots for a poll;
        returns these. It takes no memory, so none of them gets lost when memory runs out."""
        stopped: list[int] = []
        while self._sizes_for_poll() is None:
            shortest = np.argmin(self.rows.positions - self.prompt_lengths[self.rows.sequences])
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
        lengths = {prompt: self._shared[prompt] for prompt in self._prefixes}
        grown = np.flatnonzero(sizes != rows.sizes)
        fresh = [prompt for prompt, start in self._prefixes.items() if start == SPARE]
        starts = rows.starts.copy()
        prefixes = dict(self._prefixes)
        found = self._free.take([*sizes[grown].tolist(), *(lengths[prompt] for prompt in fresh)])
        if found is not None:
            starts[grown] = found[: len(grown)]
            prefixes |= zip(fresh, found[len(grown) :], strict=True)
        else:
            total = self._total(sizes)
            if total > (capacity if capacity == self._proven else FULL * capacity):
                capacity = max(capacity, total, min(self.most_slots, int(POOL_GROWTH * capacity)))
            ends = np.cumsum([SPARE + 1, *lengths.values(), *sizes])
            prefixes = dict(zip(lengths, ends.tolist(), strict=False))
            starts = ends[len(lengths) : -1]
            self._free = FreeSlots(total, capacity)
        # of rows that need more slots for what they observe, or start
        held = np.minimum(rows.slots, rows.sizes)
        moves = list(zip(rows.starts, starts, held, strict=True))
        moves += [
            (old, prefixes[prompt], lengths[prompt])
            for prompt, old in self._prefixes.items()
            if old != SPARE
        ]
        if capacity == self.pool.capacity:
            moves = [(old, new, count) for old, new, count in moves if old != new and count]
        if moves or capacity != self.pool.capacity:
            sources, targets = (
                np.concatenate([_NONE, *(move[end] + np.arange(move[2]) for move in moves)])
                for end in (0, 1)
            )
            self.pool.move_slots(sources, targets, capacity)
        if found is not None:
            for row in grown[rows.sizes[grown] > 0]:
                self._free.give_back(int(rows.starts[row]), int(rows.sizes[row]))
        rows.starts, rows.sizes, self._prefixes = starts, sizes, prefixes
        of_rows = self.prompts[rows.sequences].tolist()
        rows.prefixes = np.array(
            [prefixes.get(prompt, SPARE) for prompt in of_rows], dtype=np.int64
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
        kept = np.ones(len(self), dtype=bool)
        kept[active] = ~finished
        self._keep(kept)

    def park(self, sequence: int, position: int) -> None:
        """Let the row of a sequence wait. `position`: of its last token, the one that is fed
        next."""
        row = self.rows.sequences == sequence
        self.rows.positions[row], self.rows.parked[row] = position, 1

    def resume(self, sequence: int, position: int) -> None:
        """Let the row of a sequence go on at `position`, whose earlier tokens are in its slots."""
        row = self.rows.sequences == sequence
        self.rows.positions[row], self.rows.parked[row] = position, 0

    def drop(self, sequence: int) -> None:
        """Let the row of a sequence go."""
        self._keep(self.rows.sequences != sequence)

    def _keep(self, kept: np.ndarray) -> None:
        """Drop the running rows where `kept` (n,) is False, and shared prompts without a row."""
        dropped = self.rows.select(~kept)
        self.rows = self.rows.select(kept)
        for start, size in zip(dropped.starts.tolist(), dropped.sizes.tolist(), strict=True):
            self._free.give_back(start, size)
        for prompt in set(self._prefixes) - set(self.prompts[self.rows.sequences].tolist()):
            self._free.give_back(self._prefixes.pop(prompt), self._shared[prompt])
