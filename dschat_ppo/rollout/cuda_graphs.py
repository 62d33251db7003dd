"""Decode steps at fixed addresses: on a GPU, one CUDA graph for each bucket of rows and length."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dschat_ppo.rollout.attention_metadata import PooledMetadata
from dschat_ppo.rollout.decode_batch import DecodeInputs
from dschat_ppo.rollout.kv_pool import KVPool
from dschat_ppo.rollout.memory import release_if_short
from dschat_ppo.rollout.pool_scheduler import PooledRows
from dschat_ppo.runtime.memory_advice import ran_out_of_memory

_log = logging.getLogger(__name__)

LENGTH_STEP = 256  # slots between two length buckets
SMALL_ROWS = (4, 16)  # buckets below 32 rows: with fewer rows a step on a GPU takes as long
OVERFLOWS = 2  # polls that needed the whole vocabulary, after which the rest of the rollout searches it at once
_SYNC = "called a synchronizing CUDA operation"  # PyTorch's message in the sync debug mode "error"

# (inputs, metadata, overflow (n,) bool, search the whole vocabulary for the nucleus) -> finished (n,) bool
Step = Callable[[DecodeInputs, PooledMetadata, Tensor, bool], Tensor]


class Bucket(NamedTuple):
    """What a recorded step is made for.

    `rows`: at most so many rows; `length`: of at most so many tokens; `shares`: whether some share their prompt;
    `whole`: whether the nucleus is searched in the whole vocabulary.
    """

    rows: int
    length: int
    shares: bool
    whole: bool


def row_bucket(count: int, most: int) -> int:
    """Rows of the bucket for `count` rows: 4, 16, then the next power of two, at most `most`."""
    return min(next((rows for rows in SMALL_ROWS if count <= rows), 1 << (count - 1).bit_length()), most)


def length_bucket(length: int, capacity: int) -> int:
    """Slots of the bucket for `length` slots: the next multiple of `LENGTH_STEP`, at most `capacity`."""
    return min(-(-length // LENGTH_STEP) * LENGTH_STEP, capacity)


class GraphRecorder:
    """Records decode steps as CUDA graphs, on one stream. One object serves all rollouts of a run.

    `refusal` is the reason why nothing is recorded any more, "" as long as graphs are recorded; `captures` counts them.
    """

    def __init__(self) -> None:
        self.refusal = ""
        self.captures = 0
        self._stream: Any = None
        self._tried = False

    def warm_up(self, step: Callable[[], None], pool: Any) -> None:
        """Run `step` on the recording stream, with memory of `pool`, so that its capture needs hardly any other.

        The first time, `step` runs twice more before: libraries choose kernels and allocate memory that they keep, and
        it must not wait for the GPU. A capture that fails half-way may leave the allocator in a state in which it no
        longer releases memory. (Before PyTorch 2.12; pytorch issue 180395)
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
        """Record `step` as a graph.

        Unlike the context manager `torch.cuda.graph`, this leaves the recording stream whatever fails, and keeps the
        memory that the allocator has cached.

        Args:
            step: was run by `warm_up`.
            pool: as in `warm_up`.

        Raises:
            RuntimeError: the capture failed. Unless memory ran out and the capture ended in order, nothing is recorded
                any more.
        """
        graph, ended, collects = torch.cuda.CUDAGraph(), False, gc.isenabled()
        gc.disable()  # it might free memory of older graphs, which CUDA does not allow during a capture
        try:
            with torch.cuda.stream(self._stream):
                # Only calls of this thread matter: NCCL's watchdog and pinning threads may call CUDA meanwhile.
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
    """What recorded steps refer to by address, and their graphs.

    `entries` (6, rows) int64 are the inputs: sequences, positions, and `slots`, `starts`, `prefix_starts` and
    `prefix_lengths` of `PooledMetadata`. `marks` (2, rows) bool are finished rows and rows whose nucleus overflowed.
    `most_slots` is the largest capacity of the pool.
    """

    def __init__(self, pool: KVPool, rows: int, most_slots: int, device: torch.device):
        self.pool = pool
        self.most_slots = most_slots
        self.entries = torch.zeros(6, rows, dtype=torch.int64, device=device)
        self.marks = torch.zeros(2, rows, dtype=torch.bool, device=device)
        self.graph_pool: Any = None  # memory for what the steps of all graphs compute
        self._graphs: dict[Bucket, Any] = {}
        self._recorded_version = pool.version

    @property
    def graphs(self) -> dict[Bucket, Any]:
        """The graphs by bucket, without those of a pool that has grown since, and so has other addresses."""
        if self._recorded_version != self.pool.version:
            self._graphs, self._recorded_version = {}, self.pool.version
        return self._graphs

    def forget_graphs(self) -> None:
        """Drop all graphs and their memory."""
        self._graphs, self.graph_pool = {}, None


class GraphedDecoder:
    """Generates `poll` tokens for every running row before the host checks which are finished.

    Buffers and pool do not move meanwhile. Entries beyond the running rows are idle: all their numbers are 0, so they
    write to the spare slot of the pool, and to the spare row of `SequenceBuffers`.

    Top-p needs the likeliest tokens in order, and a graph cannot choose how many. So steps look at a fixed number of
    them and mark the rows for which these are too few; the host then repeats the `poll` tokens over the whole
    vocabulary.

    Args:
        step: generates one token for every entry of its inputs.
        rewind: forgets the tokens that the running sequences got in this poll.
        memory: with entries for all rows.
        spare: the spare row of `SequenceBuffers`.
        poll: tokens of one `run`.
        longest: most tokens of a row, of prompt and answer.
        logits_bytes: bytes that a step needs for the logits of a row.
        reads_all_slots: whether attention reads as many slots for each row as for the longest one, so that short rows
            need a bucket of their own.
        recorder: None: the same steps run without graphs, as on the CPU.
    """

    def __init__(
        self, step: Step, rewind: Callable[[PooledRows], None], memory: StaticMemory, spare: int, poll: int,
        longest: int, logits_bytes: int, reads_all_slots: Callable[[], bool], recorder: GraphRecorder | None,
    ):  # fmt: skip
        self.poll = poll
        self._step = step
        self._rewind = rewind
        self._memory = memory
        self._spare = spare
        self._longest = longest
        self._logits_bytes = logits_bytes
        self._marks = memory.marks
        self._reads_all_slots = reads_all_slots
        self._recorder = recorder
        self._overflows = 0

    def run(self, rows: PooledRows, most_rows: int) -> np.ndarray:
        """Generate `poll` tokens for every row.

        Args:
            rows: running sequences.
            most_rows: no step has more entries.

        Returns:
            (n,) bool, True for finished rows; some may have finished before the last token.
        """
        whole = self._overflows >= OVERFLOWS
        finished, overflow = self._generate(rows, most_rows, whole)
        if overflow.any() and not whole:
            self._overflows += 1
            self._rewind(rows)
            finished, _ = self._generate(rows, most_rows, True)
        return finished

    def _generate(self, rows: PooledRows, most_rows: int, whole: bool) -> np.ndarray:
        """(2, n) bool: finished rows, and rows whose nucleus was larger than the tokens searched."""
        length = self._longest
        if self._reads_all_slots():
            length = length_bucket(int(rows.positions.max()) + self.poll, length)
        shares = bool(rows.prefix_lengths.any())
        advance = self._advance_of(Bucket(row_bucket(len(rows), most_rows), length, shares, whole))
        self._load(rows)
        for _ in range(self.poll):
            advance()
        marks: np.ndarray = self._marks.cpu().numpy()
        return marks[:, : len(rows)]

    def _load(self, rows: PooledRows | None) -> None:
        """Set the entries to `rows`, and all others idle."""
        entries = np.zeros(self._memory.entries.shape, dtype=np.int64)
        entries[0] = self._spare
        if rows is not None:
            numbers = rows.sequences, rows.positions, rows.slots, rows.starts, rows.prefix_starts, rows.prefix_lengths
            entries[:, : len(rows)] = numbers
        self._memory.entries.copy_(torch.from_numpy(entries))
        self._marks.zero_()

    def _advance(self, bucket: Bucket) -> None:
        entries, overflow = self._memory.entries[:, : bucket.rows], torch.zeros_like(self._marks[1, : bucket.rows])
        sequences, positions, slots, starts, prefix_starts, prefix_lengths = entries
        idle = sequences == self._spare
        metadata = PooledMetadata(
            self._memory.pool, slots, starts, prefix_starts, prefix_lengths, bucket.length, bucket.shares
        )
        finished = self._step(DecodeInputs(sequences, positions, slots), metadata, overflow, bucket.whole)
        self._marks[0, : bucket.rows] |= finished
        self._marks[1, : bucket.rows] |= overflow & ~idle
        # A finished entry is idle until the next check: its next position may be beyond the model's last one.
        sequences.masked_fill_(finished, self._spare)
        entries[1:3].add_(1)
        entries[1:].mul_(sequences != self._spare)

    def _advance_of(self, bucket: Bucket) -> Callable[[], None]:
        """The step for one bucket; where it can be recorded, as a CUDA graph, recorded while all entries are idle."""

        def eager() -> None:
            self._advance(bucket)

        graphs = self._memory.graphs
        if bucket in graphs:
            replay: Callable[[], None] = graphs[bucket].replay
            return replay
        if self._recorder is None or self._recorder.refusal:
            return eager
        release_if_short(self._memory.entries.device, bucket.rows * self._logits_bytes)
        if self._memory.graph_pool is None:
            self._memory.graph_pool = torch.cuda.MemPool()
        self._load(None)
        self._recorder.warm_up(eager, self._memory.graph_pool)
        if self._recorder.refusal:
            return eager
        try:
            graphs[bucket] = graph = self._recorder.record(eager, self._memory.graph_pool)
        except RuntimeError as problem:
            if ran_out_of_memory(problem):
                raise
            return eager
        return graph.replay
