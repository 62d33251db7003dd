"""CUDA graphs kept from one rollout to the next, with the memory that they refer to by address."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from dschat_ppo.rollout.cuda_graphs import GraphRecorder, StaticMemory
from dschat_ppo.rollout.memory import LOGITS_BYTES
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers

KEPT_SHARE = 0.02  # of a GPU's memory: more would be missing in training


@dataclass(frozen=True)
class _Kept:
    key: Hashable
    addresses: tuple[int, ...]
    buffers: SequenceBuffers
    memory: StaticMemory


class RolloutGraphs:
    """Records the decode steps of the rollouts of a run, and keeps the graphs of the last rollout if they stay valid.

    They do where weights stay where they are (ZeRO stages 0 to 2), and where the KV pool is a small part of the GPU's
    memory, because it stays allocated while the model trains.
    """

    def __init__(self) -> None:
        self.recorder = GraphRecorder()
        self._kept: _Kept | None = None
        self._weights_move = False

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
        device, logits = buffers.token_ids.device, memory.entries.shape[1] * len(buffers.is_end) * LOGITS_BYTES
        if not memory.graphs or self._weights_move:
            return
        if memory.pool.nbytes + buffers.nbytes + logits <= KEPT_SHARE * torch.cuda.mem_get_info(device)[1]:
            self._kept = _Kept(key, _addresses(model), buffers, memory)


def _addresses(model: nn.Module) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers()))
