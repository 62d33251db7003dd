"""Token rows to padded batches: of answers, pairs, labelled answers (KTO), answers with labelled steps, and prompts. A
batch is as wide as its longest row; masks and lengths exclude the padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.data.sampler import PADDING_ROW
from dschat_ppo.types import PromptBatch


@dataclass(frozen=True)
class SFTBatch:
    """Right-padded rows: `input_ids` (B, T) int64, and `loss_mask` (B, T) bool, True on the tokens whose loss counts
    (never on the first token, never on a padding row). `lengths` (B,) int64, and `data_sources` (B,) int64: the number
    of each row's data set, None if the rows do not name it."""

    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor | None = None
    data_sources: Tensor | None = None


@dataclass(frozen=True)
class PairBatch:
    """B pairs as 2B right-padded rows, all chosen answers first: `input_ids` (2B, T) int64, `lengths` (2B,)
    int64, `pair_mask` (B,) bool (False on padding pairs), `margin` (B,) fp32, `data_sources` (B,) int64 or None."""

    input_ids: Tensor
    lengths: Tensor
    pair_mask: Tensor
    margin: Tensor
    data_sources: Tensor | None = None


@dataclass(frozen=True)
class AnswerBatch:
    """B pairs as 2B right-padded rows, all chosen answers first: `input_ids` (2B, T) int64, `answer_mask` (2B, T) bool,
    True on the tokens of the answers (all of them, even where both answers start alike; never on a padding pair),
    `pair_mask` (B,) bool (False on padding pairs), `lengths` (2B,) int64, `data_sources` (B,) int64 or None."""

    input_ids: Tensor
    answer_mask: Tensor
    pair_mask: Tensor
    lengths: Tensor | None = None
    data_sources: Tensor | None = None


@dataclass(frozen=True)
class PreferenceBatch:
    """The fields of an `AnswerBatch`, and `ref_logprobs` (2B,) fp64: the reference's log-prob of each whole answer."""

    input_ids: Tensor
    answer_mask: Tensor
    pair_mask: Tensor
    ref_logprobs: Tensor
    lengths: Tensor | None = None
    data_sources: Tensor | None = None


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


def real_rows(batch: SFTBatch | PairBatch | AnswerBatch | PreferenceBatch) -> Tensor:
    """(rows,) bool, False on the rows that only fill a batch."""
    return batch.loss_mask.any(dim=1) if isinstance(batch, SFTBatch) else batch.pair_mask.repeat(2)


REFERENCE_COLUMNS = ("chosen_ref_logprob", "rejected_ref_logprob")
OTHER_ROW, OTHER_REF_LOGPROB, REF_LOGPROB = "other_row", "other_ref_logprob", "ref_logprob"
_CHUNK = 1000  # rows that are read at a time


def rows_at(rows: Dataset, indices: Sequence[int]) -> tuple[list[dict[str, Any]], list[bool]]:
    """(token rows, whether each is real). A padding row is a copy of row 0."""
    return [rows[max(index, 0)] for index in indices], [index != PADDING_ROW for index in indices]


def right_padded(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad sequences of token ids, none empty, on the right: `(input_ids (B, T) int64, lengths (B,) int64)`."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    input_ids = torch.full((len(sequences), int(lengths.max())), pad_id)
    for row, sequence in zip(input_ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return input_ids, lengths


def data_sources_of(records: Sequence[dict[str, Any]]) -> Tensor | None:
    """(B,) int64, the column `source`; None if the rows do not have it."""
    return torch.tensor([r["source"] for r in records]) if "source" in records[0] else None


def mask_from(starts: Sequence[int], input_ids: Tensor, lengths: Tensor) -> Tensor:
    """(B, T) bool, True from position `starts` (B) of each row to its last token."""
    columns = torch.arange(input_ids.shape[1])
    return (columns >= torch.tensor(starts).unsqueeze(1)) & (columns < lengths.unsqueeze(1))


def _both_answers(records: Sequence[dict[str, Any]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Right-padded rows of prompt + answer, all chosen answers first: ids (2B, T), lengths (2B,)."""
    return right_padded([[*r["prompt_ids"], *r["answers"][side]] for side in (0, 1) for r in records], pad_id)


def collate_sft(rows: Dataset, indices: Sequence[int], pad_id: int, train_on_prompt: bool) -> SFTBatch:
    """Each prompt and its answer as one row. The loss covers the answer including its final token, and the tokens of
    the prompt that the column `prompt_spans` names ([start, end) pairs), if there is one; with `train_on_prompt` it
    covers everything but the first token of the row."""
    records, real = rows_at(rows, indices)
    ids, lengths = right_padded([[*r["prompt_ids"], *r["answers"][0]] for r in records], pad_id)
    starts = [1 if train_on_prompt else len(r["prompt_ids"]) for r in records]
    mask = mask_from(starts, ids, lengths)
    for row, record in zip(mask, records, strict=True):
        for start, end in record.get("prompt_spans") or ():
            row[max(start, 1) : end] = True  # nothing predicts the first token
    return SFTBatch(ids, mask & torch.tensor(real).unsqueeze(1), lengths, data_sources_of(records))


def collate_pairs(rows: Dataset, indices: Sequence[int], pad_id: int) -> PairBatch:
    """Each prompt once with its chosen and once with its rejected answer, for a reward model."""
    records, real = rows_at(rows, indices)
    ids, lengths = _both_answers(records, pad_id)
    margin = torch.tensor([r["margin"] for r in records])
    return PairBatch(ids, lengths, torch.tensor(real), margin, data_sources_of(records))


def collate_answers(rows: Dataset, indices: Sequence[int], pad_id: int) -> AnswerBatch:
    """The rows of `collate_pairs` with a mask on their answers, for losses on the policy's own log-probs."""
    records, real = rows_at(rows, indices)
    ids, lengths = _both_answers(records, pad_id)
    pair_mask, starts = torch.tensor(real), 2 * [len(r["prompt_ids"]) for r in records]
    answer_mask = mask_from(starts, ids, lengths) & pair_mask.repeat(2).unsqueeze(1)
    return AnswerBatch(ids, answer_mask, pair_mask, lengths, data_sources_of(records))


def collate_preferences(rows: Dataset, indices: Sequence[int], pad_id: int) -> PreferenceBatch:
    """An `AnswerBatch` with the reference log-probs that `with_reference` added to the rows."""
    answers = collate_answers(rows, indices, pad_id)
    records, _ = rows_at(rows, indices)
    reference = torch.tensor([r[name] for name in REFERENCE_COLUMNS for r in records], dtype=torch.float64)
    return PreferenceBatch(
        answers.input_ids, answers.answer_mask, answers.pair_mask, reference, answers.lengths, answers.data_sources
    )


def with_reference(rows: Dataset, logprobs: Tensor) -> Dataset:
    """Add `logprobs` (rows, 2) of the chosen and rejected answers as fp64 columns."""
    for name, column in zip(REFERENCE_COLUMNS, logprobs.double().cpu().unbind(dim=1), strict=True):
        rows = rows.add_column(name, column.numpy())
    return rows


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


def collate_prompts(rows: Dataset, indices: Sequence[int], pad_id: int) -> PromptBatch:
    """Left-padded prompts."""
    reversed_ids, lengths = right_padded([rows[i]["prompt_ids"][::-1] for i in indices], pad_id)
    reversed_mask = torch.arange(reversed_ids.shape[1]) < lengths.unsqueeze(1)
    return PromptBatch(reversed_ids.flip(1), reversed_mask.flip(1))
