"""CUDA graphs kept from one rollout to the next, with the memory that they refer to by address."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from dschat_ppo.common.phases import largest_peak
from dschat_ppo.rollout.cuda_graphs import GraphRecorder, StaticMemory
from dschat_ppo.rollout.kv_pool import SPARE
from dschat_ppo.rollout.memory import LOGITS_BYTES
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers

# Shares of a GPU's memory.
KEPT_SHARE = 0.02  # is kept in any case; more would be missing in training,
MOST_KEPT_SHARE = 0.05  # which is kept if it and the largest update
LEFT_SHARE = 0.1  # leave this free, for fragments and libraries


@dataclass(frozen=True)
class _Kept:
    key: Hashable
    addresses: tuple[int, ...]
    buffers: SequenceBuffers
    memory: StaticMemory


class RolloutGraphs:
    """Records the decode steps of the rollouts of a run, and keeps the graphs of the last rollout if they stay valid.

    They do where weights stay where they are (ZeRO stages 0 to 2), and where the KV pool is a small part of the GPU's
    memory, because it stays allocated while the model trains. A pool that is not kept begins with the capacity that the
    last rollout of the kind needed: graphs are recorded once, and not again after each growth.
    """

    def __init__(self) -> None:
        self.recorder = GraphRecorder()
        self._kept: _Kept | None = None
        self._weights_move = False
        self._capacities: dict[Hashable, int] = {}
        self._is_beside_training = False  # what is kept was counted in the peaks of updates, if they are the largest

    def capacity(self, key: Hashable, most: int) -> int:
        """The first capacity of a pool: what the last rollout with this key needed, at most `most` slots."""
        return max(SPARE + 1, min(self._capacities.get(key, 0), most))

    def take(self, key: Hashable, width: int, model: nn.Module) -> tuple[SequenceBuffers, StaticMemory] | None:
        """The buffers and the static memory of the last rollout, or None, after which they are released.

        Args:
            key: all that is part of a recorded step, and the number of sequences.
            width: of the prompts.
            model: whose steps were recorded.
        """
        kept, self._kept = self._kept, None
        if kept is None or kept.key != key or kept.buffers.prompt_width < width:
            return None
        if kept.addresses != _addresses(model):
            self._weights_move = True
            return None
        return kept.buffers, kept.memory

    def keep(self, key: Hashable, model: nn.Module, buffers: SequenceBuffers, memory: StaticMemory) -> None:
        """Keep what a rollout used for the next one, if it is small and its graphs will be valid."""
        self._capacities[key] = memory.pool.capacity
        if not memory.graphs or self._weights_move:
            return
        logits = memory.entries.shape[1] * len(buffers.is_end) * LOGITS_BYTES
        if self._fits(memory.pool.nbytes + buffers.nbytes + logits, buffers.token_ids.device):
            self._kept = _Kept(key, _addresses(model), buffers, memory)

    def _fits(self, size: int, device: torch.device) -> bool:
        """Whether updates leave `size` bytes for what is kept. The largest one is known after the first PPO step."""
        total, peak = torch.cuda.mem_get_info(device)[1], largest_peak("train")
        is_small = size <= KEPT_SHARE * total
        beside = 0 if self._is_beside_training else size
        fits = peak is not None and size <= MOST_KEPT_SHARE * total and peak + beside <= (1 - LEFT_SHARE) * total
        self._is_beside_training = fits and not is_small
        return is_small or fits


def _addresses(model: nn.Module) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers()))
