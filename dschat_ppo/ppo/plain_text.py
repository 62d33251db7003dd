"""Batches of plain text for the PTX loss."""

from __future__ import annotations

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.data.collators import SFTBatch, collate_sft
from dschat_ppo.data.sampler import IndexStream
from dschat_ppo.types import to_device


class TextBatches:
    """Serves to each optimizer step as many blocks of text as the step has answers.

    Args:
        rows: token blocks of `data.unsupervised`.
        rows_per_update: blocks of one optimizer step over all ranks, a multiple of `micro_batch` times the ranks.
        micro_batch: blocks of one forward pass.
        seed: of the order.
        pad_id: any id; padding is masked.
        device: of this rank.
    """

    def __init__(
        self, rows: Dataset, rows_per_update: int, micro_batch: int, seed: int, pad_id: int, device: torch.device
    ):
        self.rows = rows
        self._rows_per_update = rows_per_update
        self._micro_batch = micro_batch
        self._pad_id = pad_id
        self._device = device
        self.stream = IndexStream(len(rows), seed)

    def take(self) -> tuple[list[SFTBatch], Tensor]:
        """This rank's micro-batches of the next optimizer step, and the number of tokens of all ranks. Collective."""
        taken = self.stream.take(self._rows_per_update)[dist.data_rank() :: dist.data_ranks()]
        parts = [taken[start : start + self._micro_batch] for start in range(0, len(taken), self._micro_batch)]
        batches = [to_device(collate_sft(self.rows, part, self._pad_id, True), self._device) for part in parts]
        counts = torch.stack([batch.loss_mask.sum() for batch in batches])
        return batches, dist.all_reduce(counts.sum()) // dist.sequence_ranks()  # each block once
