"""Decode steps at fixed addresses: on a GPU one CUDA graph for each bucket of rows and length."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dschat_ppo.rollout.attention import Span
from dschat_ppo.rollout.decode_batch import DecodeBatch
from dschat_ppo.rollout.decode_metadata import DecodeMetadata
from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.memory import is_out_of_memory

_log = logging.getLogger(__name__)

REACH = 256  # lengths of one bucket
Step = Callable[[DecodeMetadata, list[Span]], Tensor]


def row_bucket(count: int, most: int) -> int:
    """Rows of the bucket that `count` rows fall in: a power of two, or `most`."""
    return min(1 << (count - 1).bit_length(), most)


def reach_bucket(length: int, capacity: int) -> int:
    """Slots of the bucket that `length` slots fall in: a multiple of `REACH`, or `capacity`."""
    return min(-(-length // REACH) * REACH, capacity)


class GraphedDecoder:
    """Makes `poll` tokens for every row of a bank before anyone looks at which are finished.

    Buffers, store and outputs never move. Lanes beyond the bank's rows stand idle: they write into the store's last
    slot, which no row uses, and into the spare answer. On the CPU the same steps run without a graph.

    Args:
        step: makes one token for every lane.
        store: of all rows; its last slot is spare.
        spare_answer: a row of `SequenceBuffers` that is nobody's.
        poll: tokens of one `run`.
        device: of store and answers.
    """

    def __init__(self, step: Step, store: KVCache, spare_answer: int, poll: int, device: torch.device):
        self.poll = poll
        self._step = step
        self._store = store
        self._spare_answer = spare_answer
        self._lanes = DecodeMetadata(*torch.zeros(3, store.rows, dtype=torch.int64, device=device))
        self._done = torch.zeros(store.rows, dtype=torch.bool, device=device)
        self._ready: dict[tuple[int, int], Callable[[], None]] = {}
        self._pool: Any = None

    def run(self, bank: DecodeBatch) -> np.ndarray:
        """`poll` tokens for every row of `bank`; (n,) bool, which rows are finished (some perhaps before the last)."""
        rows = row_bucket(len(bank), self._store.rows)
        reach = reach_bucket(int(bank.slot.max()) + self.poll, self._store.capacity)
        advance = self._ready.get((rows, reach)) or self._prepare(rows, reach)
        self._place(bank)
        for _ in range(self.poll):
            advance()
        return self._done[: len(bank)].cpu().numpy()

    def _place(self, bank: DecodeBatch | None) -> None:
        self._lanes.answer.fill_(self._spare_answer)
        self._lanes.position.zero_()
        self._lanes.slot.fill_(self._store.capacity - 1)
        self._done.zero_()
        if bank is not None:
            at_work = self._lanes.first(len(bank))
            for buffer, fact in (
                (at_work.answer, bank.answer),
                (at_work.position, bank.position),
                (at_work.slot, bank.slot),
            ):
                buffer.copy_(torch.from_numpy(fact))

    def _advance(self, rows: int, reach: int) -> None:
        lanes = self._lanes.first(rows)
        finished = self._step(lanes, [Span(0, rows, self._store, lanes.slot, reach, None)])
        self._done[:rows] |= finished
        # A finished lane stands idle until the next look: its next place may be beyond the model's last position.
        lanes.answer.masked_fill_(finished, self._spare_answer)
        at_work = lanes.answer != self._spare_answer
        lanes.position.add_(1).mul_(at_work)
        lanes.slot.add_(1).masked_fill_(~at_work, self._store.capacity - 1)

    def _prepare(self, rows: int, reach: int) -> Callable[[], None]:
        """The step for one bucket, captured while all lanes stand idle."""

        def eager() -> None:
            self._advance(rows, reach)

        if not self._done.is_cuda:
            return eager  # not kept: it refers to this object
        try:
            self._ready[rows, reach] = self._captured(eager)
        except RuntimeError as problem:
            if is_out_of_memory(problem):
                raise
            _log.warning(f"rollout: a CUDA graph of this model cannot be captured ({problem}); steps are slower")
            self._ready[rows, reach] = eager
        return self._ready[rows, reach]

    def _captured(self, eager: Callable[[], None]) -> Callable[[], None]:
        self._place(None)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):  # libraries choose and allocate in the first runs, which must not be recorded
                eager()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            eager()
        self._pool = graph.pool()
        return graph.replay
