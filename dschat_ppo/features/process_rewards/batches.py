"""Batches of answers with labelled steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.data.batches import answered, column, rows_at


@dataclass(frozen=True)
class StepBatch:
    """B right-padded rows of prompt and answer with labels at the ends of steps."""

    input_ids: Tensor  # (B, T) int64
    lengths: Tensor  # (B,) int64
    label_mask: Tensor  # (B, T) bool, True on tokens with a label, and nowhere on a padding row
    labels: Tensor  # (B, T) fp32 in [0, 1], 0 outside `label_mask`
    data_sources: Tensor | None = None  # (B,)


def collate_steps(rows: Dataset, indices: Sequence[int], pad_id: int) -> StepBatch:
    """Each prompt and its answer as one row, with the labels at the columns `step_ends` of the
    answer."""
    records, real = rows_at(rows, indices)
    answers = [record["answers"][0] for record in records]
    ids, lengths, _ = answered(records, answers, real, pad_id)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    labels = torch.zeros(ids.shape)
    for row, (record, is_real) in enumerate(zip(records, real, strict=True)):
        columns = [len(record["prompt_ids"]) + end for end in record["step_ends"]]
        mask[row, columns] = is_real
        labels[row, columns] = torch.tensor(record["step_labels"]) * is_real
    return StepBatch(ids, lengths, mask, labels, column(records, "source"))
