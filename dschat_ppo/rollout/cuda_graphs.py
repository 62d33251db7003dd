"""Decode steps at fixed addresses: on a GPU, a CUDA graph for each bucket of rows and length, kept
between rollouts."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dschat_ppo.common.exit_codes import ran_out_of_memory
from dschat_ppo.common.phases import largest_peak
from dschat_ppo.rollout.cache_memory import LOGITS_BYTES, release_if_short
from dschat_ppo.rollout.kv_cache import SPARE, KVCache, PooledMetadata
from dschat_ppo.rollout.running_pool import PooledRows
from dschat_ppo.rollout.sampling import NUCLEUS_STATIC, NucleusSearch
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers

_log = logging.getLogger(__name__)

LENGTH_STEP = 256  # slots between two length buckets
SMALL_ROWS = (4, 16)  # buckets below 32 rows: with fewer rows a step on a GPU takes as long
# polls that needed the whole vocabulary, after which the rest of the rollout searches it at once
OVERFLOWS = 2
# Shares of a GPU's memory.
KEPT_SHARE = 0.02  # is kept in any case; more would be missing in training,
MOST_KEPT_SHARE = 0.05  # which is kept if it and the largest update
LEFT_SHARE = 0.1  # leave this free, for fragments and libraries
_SYNC = "called a synchronizing CUDA operation"  # PyTorch's message in the sync debug mode "error"

# (sequences (n,), positions (n,), metadata, where the nucleus is searched) -> finished (n,) bool
Step = Callable[[Tensor, Tensor, list[PooledMetadata], NucleusSearch], Tensor]


class Bucket(NamedTuple):
    """What a recorded step is made for: at most `rows` rows of at most `length` tokens. `shares`:
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


class GraphRecorder:
    """Records decode steps as CUDA graphs, on one stream. One object serves all rollouts of a run.
    `refusal` is the reason why nothing is recorded any more, or ""; `captures` counts graphs."""

    def __init__(self) -> None:
        self.refusal = ""
        self.captures = 0
        self._stream: Any = None
        self._tried = False

    def warm_up(self, step: Callable[[], None], pool: Any) -> None:
        """Run `step` on the recording stream, with memory of `pool`, so that its capture needs
        hardly any other.

        The first time, `step` runs twice more before: libraries choose kernels and allocate memory
        that they keep. A capture that fails half-way may leave the allocator unable to release
        memory (before PyTorch 2.12; pytorch issue 180395).
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                if not self._tried:
                    step()
                    self._tried = True
                    self._check_for_waits(step)
                if not self.refusal:
                    with torch.cuda.use_mem_pool(pool):
                        step()
        finally:  # memory that a failed step used may be given to others right away
            torch.cuda.current_stream().wait_stream(self._stream)

    def _check_for_waits(self, step: Callable[[], None]) -> None:
        """Run `step`, and refuse to record any if the host waits for the GPU in it."""
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch calls the mode a prototype
                torch.cuda.set_sync_debug_mode("error")
            step()
        except RuntimeError as problem:
            if _SYNC not in str(problem):
                raise
            self._refuse("a step of this model waits for the GPU")
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def record(self, step: Callable[[], None], pool: Any) -> Any:
        """Record `step`, which `warm_up` ran with the same `pool`, as a graph.

        Unlike the context manager `torch.cuda.graph`, this leaves the recording stream whatever
        fails, and keeps the memory that the allocator has cached. If the capture fails, this raises
        a `RuntimeError`; unless memory ran out and the capture ended in order, nothing is recorded
        any more.
        """
        graph = torch.cuda.CUDAGraph()
        ended = False
        collects = gc.isenabled()
        # it might free memory of older graphs, which CUDA does not allow during a capture
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                # Only calls of this thread matter: NCCL's watchdog and pinning threads may call
                # CUDA meanwhile.
                graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
                    ended = True
        except RuntimeError as problem:
            torch.cuda.synchronize()
            if not (ended and ran_out_of_memory(problem)):
                self._refuse(f"a CUDA graph of this model cannot be captured ({problem})")
            raise
        finally:
            if collects:
                gc.enable()
        self.captures += 1
        return graph

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        _log.warning(f"rollout: {reason}; steps run without CUDA graphs and are slower")


class StaticMemory:
    """What recorded steps refer to by address, and their graphs. `entries` (6, rows) int64 are the
    inputs: sequences, positions, and `offsets`, `starts`, `prefix_starts` and `prefix_lengths` of
    `PooledMetadata`. `marks` (2, rows) bool are finished rows and rows whose nucleus overflowed.
    `most_slots` is the largest capacity of the pool. Without a `recorder` steps run without graphs,
    as on the CPU."""

    def __init__(
        self,
        buffers: SequenceBuffers,
        pool: KVCache,
        rows: int,
        most_slots: int,
        recorder: GraphRecorder | None = None,
    ):
        """Memory for steps of at most `rows` rows, which read and write `buffers` and `pool`."""
        device = buffers.token_ids.device
        self.recorder = recorder
        self.buffers = buffers
        self.pool = pool
        self.most_slots = most_slots
        self.entries = torch.zeros(6, rows, dtype=torch.int64, device=device)
        self.marks = torch.zeros(2, rows, dtype=torch.bool, device=device)
        # of the rollout that left it to the next one, see `RolloutGraphs`
        self.key: Hashable = None
        self.addresses: tuple[int, ...] = ()  # of the weights then
        self.graph_pool: Any = None  # memory for what the steps of all graphs compute
        self._graphs: dict[Bucket, Any] = {}
        self._recorded_capacity = pool.capacity

    @property
    def graphs(self) -> dict[Bucket, Any]:
        """The graphs by bucket, without those of a pool that has grown since, and so has other
        addresses."""
        if self._recorded_capacity != self.pool.capacity:
            self._graphs = {}
            self._recorded_capacity = self.pool.capacity
        return self._graphs

    def release(self) -> None:
        """Drop all graphs, their memory, and what the pool holds."""
        self._graphs = {}
        self.graph_pool = None
        self.pool.keys = {}
        self.pool.values = {}
        self.pool.capacity = SPARE + 1


@dataclass(eq=False)
class GraphedDecoder:
    """Generates `poll` tokens for every running row before the host checks which are finished.

    Buffers and pool do not move meanwhile. Entries beyond the running rows are idle: all their
    numbers are 0, so they write to the spare slot of the pool, and to the spare row of
    `SequenceBuffers`.

    Top-p needs the likeliest tokens in order, and a graph cannot choose how many. So steps look at
    a fixed number of them and mark the rows for which these are too few; the host then repeats the
    `poll` tokens over the whole vocabulary.
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
        """The step for one bucket; where it can be recorded, as a CUDA graph, recorded while all
        entries are idle."""

        def eager() -> None:
            self._advance(bucket)

        graphs = self.memory.graphs
        recorder = self.memory.recorder
        if bucket in graphs:
            replay: Callable[[], None] = graphs[bucket].replay
            return replay
        if recorder is None or recorder.refusal:
            return eager
        logits = bucket.rows * len(self.memory.buffers.is_end) * LOGITS_BYTES
        release_if_short(self.memory.entries.device, logits)
        # PyTorch does not record another graph with a pool whose graphs are all gone
        if not graphs:
            self.memory.graph_pool = torch.cuda.MemPool()
        self._load(None)
        recorder.warm_up(eager, self.memory.graph_pool)
        if recorder.refusal:
            return eager
        try:
            graph = recorder.record(eager, self.memory.graph_pool)
        except RuntimeError as problem:
            if ran_out_of_memory(problem):
                raise
            return eager
        graphs[bucket] = graph
        return graph.replay


class RolloutGraphs:
    """Records the decode steps of the rollouts of a run, and keeps the graphs of the last rollout
    if they stay valid: where weights stay where they are (ZeRO stages 0 to 2), and where the KV
    pool is a small part of the GPU's memory, because it stays allocated while the model trains. A
    pool that is not kept begins with the capacity that the last rollout of the kind needed: graphs
    are recorded once, and not again after each growth."""

    def __init__(self) -> None:
        self.recorder = GraphRecorder()
        self._memory: StaticMemory | None = None
        self._weights_move = False
        self._capacities: dict[Hashable, int] = {}
        # what is kept was counted in the peaks of updates, if they are the largest
        self._is_beside_training = False

    def capacity(self, key: Hashable, most: int) -> int:
        """The first capacity of a pool: what the last rollout with this key needed, at most `most`
        slots."""
        return max(SPARE + 1, min(self._capacities.get(key, 0), most))

    def take(self, key: Hashable, width: int, model: nn.Module) -> StaticMemory | None:
        """The memory of the last rollout, or None, after which it is released. `key`: all that is
        part of a recorded step of `model`, and the number of sequences. `width`: of the prompts."""
        memory = self._memory
        self._memory = None
        if memory is None or memory.key != key or memory.buffers.prompt_width < width:
            return None
        if memory.addresses != _addresses(model):
            self._weights_move = True
            return None
        return memory

    def keep(self, key: Hashable, model: nn.Module, memory: StaticMemory) -> None:
        """Keep what a rollout used for the next one, if it is small and its graphs will be
        valid."""
        self._capacities[key] = memory.pool.capacity
        buffers = memory.buffers
        if not memory.graphs or self._weights_move:
            return
        logits = memory.entries.shape[1] * len(buffers.is_end) * LOGITS_BYTES
        if self._fits(memory.pool.nbytes + buffers.nbytes + logits, buffers.token_ids.device):
            memory.key = key
            memory.addresses = _addresses(model)
            self._memory = memory

    def _fits(self, size: int, device: torch.device) -> bool:
        """Whether updates leave `size` bytes for what is kept. The largest one is known after the
        first PPO step."""
        total = torch.cuda.mem_get_info(device)[1]
        peak = largest_peak("train")
        is_small = size <= KEPT_SHARE * total
        added = size  # to the peak, unless that has counted it
        if self._is_beside_training:
            added = 0
        fits = (
            peak is not None
            and size <= MOST_KEPT_SHARE * total
            and peak + added <= (1 - LEFT_SHARE) * total
        )
        self._is_beside_training = fits and not is_small
        return is_small or fits


def _addresses(model: nn.Module) -> tuple[int, ...]:
    """Where the weights and buffers of `model` are in memory."""
    return tuple(tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers()))
