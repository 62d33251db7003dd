"""Token rows -> padded batches. Batches are as long as their longest row; padding ids are never looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.data.sampler import FILLER
from dschat_ppo.types import PromptBatch


@dataclass(frozen=True)
class SFTBatch:
    """Right-padded rows: `input_ids` (B, T) int64, and `loss_mask` (B, T) bool, True on tokens that are to be predicted
    (never on the first token, never on a filler row)."""

    input_ids: Tensor
    loss_mask: Tensor


@dataclass(frozen=True)
class PairBatch:
    """B pairs as 2B right-padded rows, all chosen answers first: `input_ids` (2B, T) int64, `lengths` (2B,)
    int64, `pair_mask` (B,) bool (False on filler pairs), `margin` (B,) fp32."""

    input_ids: Tensor
    lengths: Tensor
    pair_mask: Tensor
    margin: Tensor


def rows_at(rows: Dataset, indices: Sequence[int]) -> tuple[list[dict[str, Any]], list[bool]]:
    """(token rows, whether each is real). Fillers stand in as copies of row 0."""
    return [rows[max(index, 0)] for index in indices], [index != FILLER for index in indices]


def _right_padded(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    length = max(len(sequence) for sequence in sequences)
    ids = torch.tensor([[*sequence, *[pad_id] * (length - len(sequence))] for sequence in sequences])
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return ids, (torch.arange(length) < lengths.unsqueeze(1)).long()


def collate_sft(rows: Dataset, indices: Sequence[int], pad_id: int, train_on_prompt: bool) -> SFTBatch:
    """Prompt and answer as one row; the loss covers the answer with its EOS, or with `train_on_prompt` everything."""
    records, real = rows_at(rows, indices)
    ids, mask = _right_padded([[*r["prompt_ids"], *r["answers"][0]] for r in records], pad_id)
    starts = torch.tensor([1 if train_on_prompt else len(r["prompt_ids"]) for r in records])
    loss_mask = (torch.arange(ids.shape[1]) >= starts.unsqueeze(1)) & mask.bool() & torch.tensor(real).unsqueeze(1)
    return SFTBatch(ids, loss_mask)


def collate_pairs(rows: Dataset, indices: Sequence[int], pad_id: int) -> PairBatch:
    """Chosen and rejected answers after their prompt."""
    records, real = rows_at(rows, indices)
    sequences = [[*r["prompt_ids"], *r["answers"][side]] for side in (0, 1) for r in records]
    ids, mask = _right_padded(sequences, pad_id)
    return PairBatch(ids, mask.sum(dim=1), torch.tensor(real), torch.tensor([r["margin"] for r in records]))


def collate_prompts(rows: Dataset, indices: Sequence[int], pad_id: int) -> PromptBatch:
    """Left-padded prompts."""
    reversed_ids, reversed_mask = _right_padded([rows[i]["prompt_ids"][::-1] for i in indices], pad_id)
    return PromptBatch(reversed_ids.flip(1), reversed_mask.flip(1).bool())
