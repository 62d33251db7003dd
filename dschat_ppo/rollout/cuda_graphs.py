"""Decode steps at fixed addresses: on a GPU, one CUDA graph for each bucket of rows and length."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dschat_ppo.rollout.attention import DecodeMetadata
from dschat_ppo.rollout.decode_batch import DecodeBatch, DecodeInputs
from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.memory import is_out_of_memory

_log = logging.getLogger(__name__)

LENGTH_STEP = 256  # slots between two length buckets
Step = Callable[[DecodeInputs, list[DecodeMetadata]], Tensor]


def row_bucket(count: int, most: int) -> int:
    """Rows of the bucket for `count` rows: the next power of two, at most `most`."""
    return min(1 << (count - 1).bit_length(), most)


def length_bucket(length: int, capacity: int) -> int:
    """Slots of the bucket for `length` slots: the next multiple of `LENGTH_STEP`, at most `capacity`."""
    return min(-(-length // LENGTH_STEP) * LENGTH_STEP, capacity)


class GraphedDecoder:
    """Generates `poll` tokens for every row of a decode batch before the host checks which are finished.

    Buffers, cache and outputs never move. Entries beyond the rows of the batch are idle: they write to the last slot
    of the cache, which no sequence uses, and to the spare row of `SequenceBuffers`. On the CPU the same steps run
    without a graph.

    Args:
        step: generates one token for every entry of its inputs.
        cache: of all rows; its last slot is spare.
        spare: the spare row of `SequenceBuffers`.
        poll: tokens of one `run`.
        device: of the cache and the buffers.
    """

    def __init__(self, step: Step, cache: KVCache, spare: int, poll: int, device: torch.device):
        self.poll = poll
        self._step = step
        self._cache = cache
        self._spare = spare
        self._inputs = DecodeInputs(*torch.zeros(3, cache.rows, dtype=torch.int64, device=device))
        self._finished = torch.zeros(cache.rows, dtype=torch.bool, device=device)
        self._graphs: dict[tuple[int, int], Callable[[], None]] = {}
        self._pool: Any = None

    def run(self, batch: DecodeBatch) -> np.ndarray:
        """Generate `poll` tokens for every row of `batch`.

        Returns:
            (n,) bool, True for finished rows; some may have finished before the last token.
        """
        rows = row_bucket(len(batch), self._cache.rows)
        length = length_bucket(int(batch.slots.max()) + self.poll, self._cache.capacity)
        advance = self._graphs.get((rows, length)) or self._capture(rows, length)
        self._reset()
        running = self._inputs.first(len(batch))
        running.sequences.copy_(torch.from_numpy(batch.sequences))
        running.positions.copy_(torch.from_numpy(batch.positions))
        running.slots.copy_(torch.from_numpy(batch.slots))
        for _ in range(self.poll):
            advance()
        return self._finished[: len(batch)].cpu().numpy()

    def _reset(self) -> None:
        """Make all entries idle."""
        self._inputs.sequences.fill_(self._spare)
        self._inputs.positions.zero_()
        self._inputs.slots.fill_(self._cache.capacity - 1)
        self._finished.zero_()

    def _advance(self, rows: int, length: int) -> None:
        inputs = self._inputs.first(rows)
        finished = self._step(inputs, [DecodeMetadata(0, rows, self._cache, inputs.slots, length, None)])
        self._finished[:rows] |= finished
        # A finished entry is idle until the next check: its next position may be beyond the model's last one.
        inputs.sequences.masked_fill_(finished, self._spare)
        running = inputs.sequences != self._spare
        inputs.positions.add_(1).mul_(running)
        inputs.slots.add_(1).masked_fill_(~running, self._cache.capacity - 1)

    def _capture(self, rows: int, length: int) -> Callable[[], None]:
        """The step for one bucket, as a CUDA graph captured while all entries are idle; on the CPU, the step itself."""

        def eager() -> None:
            self._advance(rows, length)

        if not self._finished.is_cuda:
            return eager  # not kept in `_graphs`: it refers to this object
        try:
            self._reset()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):  # in their first runs libraries choose kernels and allocate; do not record that
                    eager()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                eager()
            self._pool = graph.pool()
            self._graphs[rows, length] = graph.replay
        except RuntimeError as problem:
            if is_out_of_memory(problem):
                raise
            _log.warning(f"rollout: a CUDA graph of this model cannot be captured ({problem}); steps are slower")
            self._graphs[rows, length] = eager
        return self._graphs[rows, length]
