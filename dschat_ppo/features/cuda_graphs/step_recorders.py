"""CUDA graphs of decode steps at fixed addresses, which are kept between rollouts."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from dschat_ppo.common.exit_codes import ran_out_of_memory
from dschat_ppo.common.phases import largest_peak
from dschat_ppo.rollout.cache_memory import LOGITS_BYTES, RESERVE_BYTES
from dschat_ppo.rollout.kv_cache import SPARE
from dschat_ppo.rollout.static_steps import Bucket, StaticMemory

_log = logging.getLogger(__name__)

# Shares of a GPU's memory.
KEPT_SHARE = 0.02  # is kept in any case; more would be missing in training,
MOST_KEPT_SHARE = 0.05  # which is kept if it and the largest update
LEFT_SHARE = 0.1  # leave this free, for fragments and libraries
_SYNC = "called a synchronizing CUDA operation"  # PyTorch's message in the sync debug mode "error"


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


@dataclass
class Graphs:
    """The graphs of one memory."""

    capacity: int  # of its pool, when they were recorded
    by_bucket: dict[Bucket, Any] = field(default_factory=dict)
    pool: Any = None  # memory for what the steps of all graphs compute


def graphs_of(memory: StaticMemory) -> Graphs:
    """The graphs of a memory, without those of a pool that has grown since, and so has other
    addresses."""
    if memory.recordings is None:
        memory.recordings = Graphs(memory.pool.capacity)
    graphs: Graphs = memory.recordings
    if graphs.capacity != memory.pool.capacity:
        graphs.by_bucket = {}
        graphs.capacity = memory.pool.capacity
    return graphs


class RolloutGraphs:
    """Records the decode steps of the rollouts of a run, and keeps the graphs of the last rollout
    if they stay valid: where weights stay where they are (ZeRO stages 0 to 2), and where the KV
    pool is a small part of the GPU's memory, because it stays allocated while the model trains. A
    pool that is not kept begins with the capacity that the last rollout of the kind needed: graphs
    are recorded once, and not again after each growth."""

    def __init__(self) -> None:
        self.recorder = GraphRecorder()
        self._memory: StaticMemory | None = None
        self._key: Hashable = None  # of the rollout that left it
        self._addresses: tuple[int, ...] = ()  # of the weights then
        self._weights_move = False
        self._capacities: dict[Hashable, int] = {}
        # what is kept was counted in the peaks of updates, if they are the largest
        self._is_beside_training = False

    def recorded(
        self,
        memory: StaticMemory,
        bucket: Bucket,
        step: Callable[[], None],
        make_idle: Callable[[], None],
    ) -> Callable[[], None]:
        """A graph of `step`, recorded now, after `make_idle`, if there is none; `step` itself where
        that is impossible."""
        graphs = graphs_of(memory)
        recorder = self.recorder
        if bucket in graphs.by_bucket:
            replay: Callable[[], None] = graphs.by_bucket[bucket].replay
            return replay
        if recorder.refusal:
            return step
        logits = bucket.rows * len(memory.buffers.is_end) * LOGITS_BYTES
        release_if_short(memory.entries.device, logits)
        # PyTorch does not record another graph with a pool whose graphs are all gone
        if not graphs.by_bucket:
            graphs.pool = torch.cuda.MemPool()
        make_idle()
        recorder.warm_up(step, graphs.pool)
        if recorder.refusal:
            return step
        try:
            graph = recorder.record(step, graphs.pool)
        except RuntimeError as problem:
            if ran_out_of_memory(problem):
                raise
            return step
        graphs.by_bucket[bucket] = graph
        return graph.replay

    def capacity(self, key: Hashable, most: int) -> int:
        """The first capacity of a pool: what the last rollout with this key needed, at most `most`
        slots."""
        return max(SPARE + 1, min(self._capacities.get(key, 0), most))

    def take(self, key: Hashable, width: int, model: nn.Module) -> StaticMemory | None:
        """The memory of the last rollout, or None, after which it is released. `key`: all that is
        part of a recorded step of `model`, and the number of sequences. `width`: of the prompts."""
        memory = self._memory
        self._memory = None
        if memory is None or self._key != key or memory.buffers.prompt_width < width:
            return None
        if self._addresses != _addresses(model):
            self._weights_move = True
            return None
        return memory

    def keep(self, key: Hashable, model: nn.Module, memory: StaticMemory) -> None:
        """Keep what a rollout used for the next one, if it is small and its graphs will be
        valid."""
        self._capacities[key] = memory.pool.capacity
        buffers = memory.buffers
        if not graphs_of(memory).by_bucket or self._weights_move:
            return
        logits = memory.entries.shape[1] * len(buffers.is_end) * LOGITS_BYTES
        if self._fits(memory.pool.nbytes + buffers.nbytes + logits, buffers.token_ids.device):
            self._key = key
            self._addresses = _addresses(model)
            self._memory = memory

    def text(self, is_used: bool) -> str:
        """Whether steps are graphs, for the log."""
        if is_used:
            return "CUDA graphs"
        return "no CUDA graphs"

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


def release_if_short(device: torch.device, needed: int) -> None:
    """Give cached memory back to the device if less than `needed` + `RESERVE_BYTES` is free there.
    A CUDA graph needs its own memory, and the allocator gives nothing back for it when the device
    has too little. (pytorch issue 159674)"""
    if torch.cuda.mem_get_info(device)[0] < RESERVE_BYTES + needed:
        torch.cuda.empty_cache()


def recorder_of_run() -> RolloutGraphs:
    """What records the decode steps of a run."""
    return RolloutGraphs()
