"""Decode steps at fixed addresses. Nothing in them waits for the device, so a feature may record
them, one for each bucket of rows and length."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dschat_ppo.features import hooks
from dschat_ppo.rollout.kv_cache import SPARE, KVCache, PooledMetadata
from dschat_ppo.rollout.running_pool import PooledRows
from dschat_ppo.rollout.sampling import NUCLEUS_STATIC, NucleusSearch
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers

LENGTH_STEP = 256  # slots between two length buckets
SMALL_ROWS = (4, 16)  # buckets below 32 rows: with fewer rows a step on a GPU takes as long
# polls that needed the whole vocabulary, after which the rest of the rollout searches it at once
OVERFLOWS = 2

# (sequences (n,), positions (n,), metadata, where the nucleus is searched) -> finished (n,) bool
Step = Callable[[Tensor, Tensor, list[PooledMetadata], NucleusSearch], Tensor]


class Bucket(NamedTuple):
    """What a step is made for: at most `rows` rows of at most `length` tokens. `shares`:
    whether some share their prompt; `searches_all`: whether the nucleus is searched in the whole
    vocabulary."""

    rows: int
    length: int
    shares: bool
    searches_all: bool


def row_bucket(count: int, most: int) -> int:
    """Rows of the bucket for `count` rows: 4, 16, then the next power of two, at most `most`."""
    for rows in SMALL_ROWS:
        if count <= rows:
            return min(rows, most)
    return min(1 << (count - 1).bit_length(), most)


class StepRecorder(Protocol):
    """Records the decode steps of the rollouts of a run. Recordings refer to the memory of a
    rollout by address, so it is kept for the next one."""

    def recorded(
        self,
        memory: StaticMemory,
        bucket: Bucket,
        step: Callable[[], None],
        make_idle: Callable[[], None],
    ) -> Callable[[], None]:
        """What to run in place of `step`, which generates a token for each entry of a bucket: a
        recording, which may be made now, after `make_idle`, or `step` itself."""

    def capacity(self, key: Hashable, most: int) -> int:
        """The first capacity of a pool, at most `most` slots, for rollouts with this `key`."""

    def take(self, key: Hashable, width: int, model: nn.Module) -> StaticMemory | None:
        """The memory of the last rollout, or None, after which it is released. `key`: all that is
        part of a recorded step of `model`, and the number of sequences. `width`: of the prompts."""

    def keep(self, key: Hashable, model: nn.Module, memory: StaticMemory) -> None:
        """Keep what a rollout used for the next one, if that is sensible."""

    def text(self, is_used: bool) -> str:
        """Whether it records steps, for the log."""


def new_recorder() -> StepRecorder | None:
    """A recorder for the rollouts of a run on a GPU, which a feature offers as
    `step_recorders.recorder_of_run()`; None: no step is recorded."""
    for new in hooks("step_recorders.recorder_of_run"):
        recorder: StepRecorder = new()
        return recorder
    return None


class StaticMemory:
    """What steps refer to by address. `entries` (6, rows) int64 are the inputs: sequences,
    positions, and `offsets`, `starts`, `prefix_starts` and `prefix_lengths` of `PooledMetadata`.
    `marks` (2, rows) bool are finished rows and rows whose nucleus overflowed. `most_slots` is the
    largest capacity of the pool. `recordings` is what the `recorder` made for these addresses."""

    def __init__(
        self,
        buffers: SequenceBuffers,
        pool: KVCache,
        rows: int,
        most_slots: int,
        recorder: StepRecorder | None = None,
    ):
        """Memory for steps of at most `rows` rows, which read and write `buffers` and `pool`."""
        device = buffers.token_ids.device
        self.recorder = recorder
        self.buffers = buffers
        self.pool = pool
        self.most_slots = most_slots
        self.entries = torch.zeros(6, rows, dtype=torch.int64, device=device)
        self.marks = torch.zeros(2, rows, dtype=torch.bool, device=device)
        self.recordings: Any = None

    def release(self) -> None:
        """Drop all recordings, their memory, and what the pool holds."""
        self.recordings = None
        self.pool.keys = {}
        self.pool.values = {}
        self.pool.capacity = SPARE + 1


@dataclass(eq=False)
class StaticDecoder:
    """Generates `poll` tokens for every running row before the host checks which are finished.

    Buffers and pool do not move meanwhile. Entries beyond the running rows are idle: all their
    numbers are 0, so they write to the spare slot of the pool, and to the spare row of
    `SequenceBuffers`.

    Top-p needs the likeliest tokens in order, and a recorded step cannot choose how many. So steps
    look at a fixed number of them and mark the rows for which these are too few; the host then
    repeats the `poll` tokens over the whole vocabulary.
    """

    step: Step  # generates one token for every entry of its inputs
    prompt_lengths: np.ndarray  # (A,) int64, of all sequences
    memory: StaticMemory
    poll: int
    # as many for each row as for the longest one: short rows need own buckets
    reads_all_slots: Callable[[], bool]
    overflows: int = 0  # polls that were repeated

    def run(self, rows: PooledRows, most_rows: int) -> np.ndarray:
        """Generate `poll` tokens for every running row, of at most `most_rows`; (n,) bool, True for
        finished ones."""
        searches_all = self.overflows >= OVERFLOWS
        finished, overflow = self._generate(rows, most_rows, searches_all)
        if overflow.any() and not searches_all:
            self.overflows += 1
            counts = rows.positions + 1 - self.prompt_lengths[rows.sequences]
            # without the tokens of this poll
            self.memory.buffers.reset(rows.sequences.tolist(), counts.tolist())
            finished, _ = self._generate(rows, most_rows, searches_all=True)
        return finished

    def _generate(self, rows: PooledRows, most_rows: int, searches_all: bool) -> np.ndarray:
        """(2, n) bool: finished rows, and rows whose nucleus was larger than the tokens
        searched."""
        count = row_bucket(len(rows), most_rows)
        length_step = LENGTH_STEP
        if self.poll == 1:  # a check after each token makes steps of any size worthwhile
            count = len(rows)
            length_step = 1
        length = self.memory.buffers.width  # most tokens of a row, of prompt and response
        if self.reads_all_slots():
            needed = int(rows.positions.max()) + self.poll
            length = min(-(-needed // length_step) * length_step, length)
        shares = bool(rows.prefix_lengths.any())
        advance = self._advance_of(Bucket(count, length, shares, searches_all))
        self._load(rows)
        for _ in range(self.poll):
            advance()
        marks: np.ndarray = self.memory.marks.cpu().numpy()
        return marks[:, : len(rows)]

    def _load(self, rows: PooledRows | None) -> None:
        """Set the entries to `rows`, and all others idle."""
        entries = np.zeros(self.memory.entries.shape, dtype=np.int64)
        entries[0] = self.memory.buffers.count
        if rows is not None:
            entries[:, : len(rows)] = (
                rows.sequences,
                rows.positions,
                rows.slots,
                rows.starts,
                rows.prefixes,
                rows.prefix_lengths,
            )
        self.memory.entries.copy_(torch.from_numpy(entries))
        self.memory.marks.zero_()

    def _advance(self, bucket: Bucket) -> None:
        """Generate one token for each entry of the bucket, mark what finished, and make the entries
        those of the next token. Nothing waits for the device."""
        memory = self.memory
        spare = self.memory.buffers.count
        entries = memory.entries[:, : bucket.rows]
        marks = memory.marks[:, : bucket.rows]
        sequences, positions, offsets, starts, prefix_starts, prefix_lengths = entries
        idle = sequences == spare
        overflow = torch.zeros_like(marks[1])
        metadata = PooledMetadata(
            memory.pool,
            offsets,
            starts,
            prefix_starts,
            prefix_lengths,
            length=bucket.length,
            shares=bucket.shares,
        )
        searched_tokens: int | None = NUCLEUS_STATIC
        if bucket.searches_all:
            searched_tokens = None
        search = NucleusSearch(searched_tokens, overflow)
        finished = self.step(sequences, positions, [metadata], search)
        marks[0] |= finished
        marks[1] |= overflow & ~idle
        # A finished entry is idle until the next check: its next position may be beyond the model's
        # last one.
        sequences.masked_fill_(finished, spare)
        entries[1:3].add_(1)
        entries[1:].mul_(sequences != spare)

    def _advance_of(self, bucket: Bucket) -> Callable[[], None]:
        """The step for one bucket; recorded, where it can be, while all entries are idle."""

        def eager() -> None:
            self._advance(bucket)

        recorder = self.memory.recorder
        if recorder is None:
            return eager
        return recorder.recorded(self.memory, bucket, eager, lambda: self._load(None))
