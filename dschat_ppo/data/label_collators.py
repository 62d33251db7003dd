"""Token rows with labels to padded batches: single answers (KTO), and answers with labelled steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.data.collators import data_sources_of, mask_from, right_padded, rows_at

OTHER_ROW, OTHER_REF_LOGPROB, REF_LOGPROB = "other_row", "other_ref_logprob", "ref_logprob"
_CHUNK = 1000  # rows that are read at a time


@dataclass(frozen=True)
class LabelledBatch:
    """B right-padded rows of prompt and answer, and B mismatched rows, with the same prompts and other rows' answers.
    `answer_mask` and `other_mask` are True on the tokens of the answers, and nowhere on a padding row."""

    input_ids: Tensor  # (B, T) int64
    answer_mask: Tensor  # (B, T) bool
    desirable: Tensor  # (B,) bool
    row_mask: Tensor  # (B,) bool, False on padding rows
    other_ids: Tensor  # (B, S) int64, of the mismatched rows
    other_mask: Tensor  # (B, S) bool
    lengths: Tensor | None = None  # (B,) int64
    data_sources: Tensor | None = None  # (B,) int64
    ref_logprobs: Tensor | None = None  # (B,) fp64, the reference's log-prob of each whole answer
    other_ref_logprobs: Tensor | None = None  # (B,) fp64, that of the mismatched answers
    baseline: Tensor | None = None  # (B,) fp64, the KL estimate of the optimizer step, equal in all rows


@dataclass(frozen=True)
class StepBatch:
    """B right-padded rows of prompt and answer with labels at the ends of steps."""

    input_ids: Tensor  # (B, T) int64
    lengths: Tensor  # (B,) int64
    label_mask: Tensor  # (B, T) bool, True on tokens with a label, and nowhere on a padding row
    labels: Tensor  # (B, T) fp32 in [0, 1], 0 outside `label_mask`
    data_sources: Tensor | None = None  # (B,) int64


def mismatched_rows(rows: Dataset) -> np.ndarray:
    """For each row the row whose answer it borrows: one with another prompt, (n,) int64.

    In the order of prompts (rows of a prompt together, prompts as they come first) each row borrows from the one so
    many places before it as the most frequent prompt has rows. So every answer is borrowed once, and desirable and
    undesirable ones as often as they occur. If more than half of the rows have one prompt, these share the answers of
    the others; if all have it, each borrows from the row before.
    """
    keys: list[int] = []
    for part in rows.select_columns(["prompt_ids"]).with_format("numpy").iter(_CHUNK):
        keys += [hash(np.asarray(ids, dtype=np.int64).tobytes()) for ids in part["prompt_ids"]]
    _, first, prompts = np.unique(np.array(keys), return_index=True, return_inverse=True)
    numbers = first[prompts]  # (n,) the first row with the same prompt
    order = np.argsort(numbers, kind="stable")
    sizes = np.bincount(numbers, minlength=1)
    most, other = int(sizes.max()), np.empty(len(order), dtype=np.int64)
    other[order] = np.roll(order, 1 if most == len(order) else most)
    if len(order) / 2 < most < len(order):
        large, rest = order[numbers[order] == sizes.argmax()], order[numbers[order] != sizes.argmax()]
        other[large] = np.resize(rest, len(large))
    return other


def collate_labelled(rows: Dataset, indices: Sequence[int], pad_id: int, max_seq_len: int) -> LabelledBatch:
    """Each answer after its prompt, and after the prompt the answer of the row in the column `other_row`, which is cut
    at its end where the mismatched row would exceed `max_seq_len` tokens."""
    records, real = rows_at(rows, indices)
    ids, lengths = right_padded([[*r["prompt_ids"], *r["answers"][0]] for r in records], pad_id)
    borrowed = [rows[r[OTHER_ROW]]["answers"][0] for r in records]
    other_ids, other_lengths = right_padded(
        [
            [*r["prompt_ids"], *answer[: max(1, max_seq_len - len(r["prompt_ids"]))]]
            for r, answer in zip(records, borrowed, strict=True)
        ],
        pad_id,
    )
    starts, row_mask = [len(r["prompt_ids"]) for r in records], torch.tensor(real)
    reference = {
        field: torch.tensor([r[column] for r in records], dtype=torch.float64) if column in records[0] else None
        for field, column in (("ref_logprobs", REF_LOGPROB), ("other_ref_logprobs", OTHER_REF_LOGPROB))
    }
    return LabelledBatch(
        ids, mask_from(starts, ids, lengths) & row_mask.unsqueeze(1), torch.tensor([r["label"] > 0.5 for r in records]),
        row_mask, other_ids, mask_from(starts, other_ids, other_lengths) & row_mask.unsqueeze(1), lengths,
        data_sources_of(records), **reference,
    )  # fmt: skip


def collate_steps(rows: Dataset, indices: Sequence[int], pad_id: int) -> StepBatch:
    """Each prompt and its answer as one row, with the labels at the columns `step_ends` of the answer."""
    records, real = rows_at(rows, indices)
    ids, lengths = right_padded([[*r["prompt_ids"], *r["answers"][0]] for r in records], pad_id)
    mask, labels = torch.zeros(ids.shape, dtype=torch.bool), torch.zeros(ids.shape)
    for row, (record, is_real) in enumerate(zip(records, real, strict=True)):
        columns = [len(record["prompt_ids"]) + end for end in record["step_ends"]]
        mask[row, columns] = is_real
        labels[row, columns] = torch.tensor(record["step_labels"]) * is_real
    return StepBatch(ids, lengths, mask, labels, data_sources_of(records))
