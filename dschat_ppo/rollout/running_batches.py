"""The running sequences of continuous batching in batches of one KV cache each, which grows: on a
CPU, and where passes are collective. `running_pool.py` has those with one pool of slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache, Prefill, SharedPrefix

# slots by which a cache or a segment grows: less means more copies, more means more empty slots
GROWTH = 32
MAX_BATCHES = 4  # each batch costs some small operations per layer
SMALL_BATCH = 16  # fewer rows do not justify a batch
MIN_LENGTH_RATIO = 0.75  # shortest prompt of a new batch, relative to its longest
_NONE = np.array([], dtype=np.int64)

AnyRows = TypeVar("AnyRows", bound="RunningRows")


@dataclass(eq=False)
class Sequences:
    """All A sequences of a generation, numpy int64 (A,) each; those of one prompt are consecutive.

    `prompts` is the index of the prompt of each, `prompt_lengths` its tokens, `limits` the most
    response tokens. `start_lengths` are the tokens with which a sequence starts, or starts again:
    its prompt and, in a dialogue, all before its current action. All of them change in place.
    `waiting` (n,) are the sequences that wait to start, in order: at first all, the longest prompts
    first, and those of one prompt together.
    """

    prompts: np.ndarray
    prompt_lengths: np.ndarray
    limits: np.ndarray
    start_lengths: np.ndarray = field(init=False)
    waiting: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.start_lengths = self.prompt_lengths.copy()
        self.waiting = np.argsort(-self.prompt_lengths, kind="stable")

    def wait_first(self, sequences: np.ndarray) -> None:
        """Let `sequences` (n,) be the next ones that start."""
        self.waiting = np.concatenate([sequences, self.waiting])

    def wait_last(self, sequence: int) -> None:
        """Let a sequence start after those that wait."""
        self.waiting = np.append(self.waiting, sequence)


def rounded_up(slots: Any) -> Any:
    """A number of slots, or an array of numbers, rounded up to a multiple of `GROWTH`."""
    return -(-slots // GROWTH) * GROWTH


@dataclass(eq=False)
class RunningRows:
    """Running sequences, one entry for each, numpy int64 (n,).

    `sequences` are the rows in `SequenceBuffers`; `positions` those of the tokens that the next
    step feeds. The first `prefix_lengths` tokens of a row are kept once for all rows of its prompt,
    at `prefixes`: a row of the prefix of a `DecodeBatch`, or the first slot in a pool.
    Without a prefix both are 0.
    """

    sequences: np.ndarray
    positions: np.ndarray
    prefix_lengths: np.ndarray
    prefixes: np.ndarray

    @classmethod
    def of(cls: type[AnyRows], groups: Sequence[AnyRows]) -> AnyRows:
        """The rows of all groups, in order."""
        columns = []
        for column in fields(cls):
            arrays = [getattr(group, column.name) for group in groups]
            columns.append(np.concatenate([_NONE, *arrays]))
        return cls(*columns)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def slots(self) -> np.ndarray:
        """The number of own tokens of each row, (n,) int64: the next one goes to that slot of its
        row or segment."""
        return self.positions - self.prefix_lengths

    def select(self: AnyRows, chosen: np.ndarray) -> AnyRows:
        """The rows where `chosen` (n,) is True, or those with these indices."""
        return type(self)(*(getattr(self, field.name)[chosen] for field in fields(self)))


@dataclass(eq=False)
class DecodeBatch:
    """Running sequences in the first rows of `cache`. Sequences of one prompt may share its keys:
    `prefix` then holds one row for each prompt."""

    cache: KVCache
    rows: RunningRows
    prefix: KVCache | None = None
    _shared: SharedPrefix | None = None  # of the current rows, made by the first step that needs it

    def __len__(self) -> int:
        return len(self.rows)

    def shared_prefix(self, device: torch.device) -> SharedPrefix | None:
        """Which rows read which prompt of the prefix; None without one."""
        if self.prefix is not None and self._shared is None:
            self._shared = self._build_shared_prefix(self.prefix, device)
        return self._shared

    def _build_shared_prefix(self, prefix: KVCache, device: torch.device) -> SharedPrefix:
        """The sequences of each prompt as a grid, computed on the host."""
        prefixes = self.rows.prefixes
        counts = np.bincount(prefixes, minlength=prefix.rows)  # sequences of each prompt
        order = np.argsort(prefixes, kind="stable")
        column = np.empty_like(order)  # index of each sequence among those of its prompt
        column[order] = np.arange(len(order)) - (np.cumsum(counts) - counts)[prefixes[order]]
        grid = np.zeros((prefix.rows, counts.max()), dtype=np.int64)
        grid[prefixes, column] = np.arange(len(self))
        cells = prefixes * grid.shape[1] + column
        return SharedPrefix(
            prefix,
            torch.from_numpy(self.rows.prefix_lengths).to(device),
            torch.from_numpy(grid).to(device),
            torch.from_numpy(cells).to(device),
        )

    def unshare(self) -> None:
        """Copy the shared prefix to each row, so that the batch can be joined with others."""
        if self.prefix is None:
            return
        rows = self.rows
        capacity = int(rows.prefix_lengths.max()) + self.cache.capacity
        cache = KVCache(len(rows), capacity)
        for name in ("keys", "values"):
            for layer, shared in getattr(self.prefix, name).items():
                tokens = shared.new_zeros(len(rows), shared.shape[1], capacity, shared.shape[3])
                # None before the first decode step
                row_tokens = getattr(self.cache, name).get(layer)
                for row, (prefix, length) in enumerate(
                    zip(rows.prefixes, rows.prefix_lengths, strict=True)
                ):
                    tokens[row, :, :length] = shared[prefix, :, :length]
                    if row_tokens is not None:
                        end = length + self.cache.capacity
                        tokens[row, :, length:end] = row_tokens[row]
                getattr(cache, name)[layer] = tokens
        self.cache = cache
        self.prefix = None
        self._shared = None
        rows.prefix_lengths = np.zeros_like(rows.prefixes)
        rows.prefixes = np.zeros_like(rows.prefixes)


def join_batches(first: DecodeBatch, second: DecodeBatch) -> DecodeBatch:
    """One batch with the rows of two without a shared prefix, whose caches are emptied layer by
    layer."""
    most_slots = max(int(first.rows.slots.max()), int(second.rows.slots.max()))
    capacity = rounded_up(most_slots + 1)
    cache = KVCache(len(first) + len(second), capacity)
    for name in ("keys", "values"):
        for layer in list(getattr(first.cache, name)):
            above = getattr(first.cache, name).pop(layer)[: len(first), :, :capacity]
            below = getattr(second.cache, name).pop(layer)[: len(second), :, :capacity]
            tokens = above.new_zeros(cache.rows, above.shape[1], capacity, above.shape[3])
            tokens[: len(first), :, : above.shape[2]] = above
            tokens[len(first) :, :, : below.shape[2]] = below
            getattr(cache, name)[layer] = tokens
    return DecodeBatch(cache, RunningRows.of([first.rows, second.rows]))


@dataclass(eq=False)
class RunningBatches:
    """The running ones of all `sequences`, in batches. Those of one prompt that start together read
    its keys from one copy if all prompts of the batch have more than `share_from` tokens; 0:
    never."""

    sequences: Sequences
    share_from: int
    batches: list[DecodeBatch] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.batches)

    @property
    def rows(self) -> RunningRows:
        """The running sequences, batch after batch."""
        return RunningRows.of([batch.rows for batch in self.batches])

    def room_for(self, waiting: np.ndarray, worthwhile: int) -> int:
        """How many of these sequences can start: all, because caches grow as long as there is
        memory."""
        return len(waiting)

    def start(self, wave: np.ndarray) -> list[Prefill]:
        """Start `wave` (n,), sequences with the longest prompts first, in batches of similar
        lengths, none small. Returns what their caches get."""
        lengths = self.sequences.prompt_lengths[wave]
        ends = list[int]()
        begin = 0
        for end in range(SMALL_BATCH, len(wave) - SMALL_BATCH + 1):
            shortest = MIN_LENGTH_RATIO * lengths[begin]
            if end - begin >= SMALL_BATCH and lengths[end] < shortest:
                ends.append(end)
                begin = end
        return [self._start_batch(sequences) for sequences in np.split(wave, ends)]

    def _start_batch(self, sequences: np.ndarray) -> Prefill:
        """Start `sequences` (n,) as one batch, with one prefix for several where that is worth it.
        Returns what its cache, or its prefix, gets."""
        _, leaders, source = np.unique(
            self.sequences.prompts[sequences], return_index=True, return_inverse=True
        )
        # the first decode step feeds the last token
        positions = self.sequences.prompt_lengths[sequences] - 1
        lengths = np.maximum(positions, 1)
        longest = int(lengths.max())
        prompts = sequences[leaders]  # for each prompt a sequence that has it
        zeros = np.zeros_like(source)
        rows = RunningRows(sequences, positions, zeros, zeros)
        if 0 < self.share_from <= lengths.min() and len(leaders) < len(sequences):
            filled = KVCache(len(leaders), longest)
            rows.prefix_lengths = lengths
            rows.prefixes = source
            batch = DecodeBatch(KVCache(len(sequences), rounded_up(1)), rows, filled)
        else:
            filled = KVCache(len(sequences), rounded_up(longest + 1))
            prompts = prompts[source]
            batch = DecodeBatch(filled, rows)
        self.batches.append(batch)
        return Prefill(filled, prompts, np.arange(len(prompts)), np.zeros_like(prompts))

    def next_step(self, device: torch.device) -> tuple[Tensor, Tensor, list[DecodeMetadata]]:
        """Join small batches and grow caches, so that the next step can write. Returns its inputs
        on `device`: the sequences and the positions of the tokens that are fed, (n,) int64 each,
        and the metadata of each batch."""
        self._join_small_batches()
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
            batch_slots = slots[first : first + len(batch)]
            prefix = batch.shared_prefix(device)
            metadata.append(DecodeMetadata(first, batch.cache, batch_slots, prefix))
            first += len(batch)
        return sequences, positions, metadata

    def _join_small_batches(self) -> None:
        """Join batches that are small or too many; those with few rows give their prefix up."""
        for batch in self.batches:
            if len(batch) <= SMALL_BATCH // 2 and len(self.batches) > 1:
                batch.unshare()
        unshared = sorted((batch for batch in self.batches if batch.prefix is None), key=len)
        while len(unshared) > 1:
            smallest = unshared[:2]
            rows = sum(len(batch) for batch in smallest)
            if len(unshared) <= MAX_BATCHES and rows > SMALL_BATCH:
                break
            new = join_batches(*smallest)
            self.batches = [batch for batch in self.batches if batch not in smallest]
            self.batches.append(new)
            unshared = sorted([*unshared[2:], new], key=len)

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
            left = np.arange((~done).sum())  # rows of the batch, after others moved into holes
            holes = np.flatnonzero(done[: len(left)])
            movers = len(left) + np.flatnonzero(~done[len(left) :])
            if len(holes):
                batch.cache.move_rows(movers.tolist(), holes.tolist())
            left[holes] = movers
            batch.rows = batch.rows.select(left)
            batch._shared = None
        self.batches = [batch for batch in self.batches if len(batch)]

    def clear(self) -> None:
        """Forget all running sequences."""
        self.batches = []
