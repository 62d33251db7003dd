"""Batches that steps 1 and 2 alone have: which samples share a packed row (`--packing`), batches of
pairs and of labelled answers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data.batches import (
    PADDING_ROW,
    GivenFor,
    answered,
    column,
    epoch_order,
    rows_at,
)

# separates the order of packed rows from other draws of the same seed and epoch
PACKING = 11
_CHUNK = 10_000  # rows whose lengths are read at a time
# Columns that step 2 adds: the row whose answer a row borrows (KTO); the log-probs of both answers
# under the reference.
OTHER_ROW, REF_LOGPROBS = "other_row", "ref_logprobs"


# Packing: the number of packed rows depends on the lengths of the samples alone, so every epoch has
# the same number; which samples meet is drawn again in each epoch.


def sample_tokens(rows: Dataset) -> np.ndarray:
    """Tokens of each sample, (n,) int64: of its answers, and of the prompt once for each of
    them."""
    tokens = [np.zeros(0, dtype=np.int64)]
    tables = rows.select_columns(["prompt_ids", "answers"]).with_format("arrow").iter(_CHUNK)
    for table in tables:
        prompt_lengths = pc.list_value_length(table["prompt_ids"]).to_numpy()
        flat_lengths = pc.list_value_length(pc.list_flatten(table["answers"])).to_numpy()
        # every row has equally many answers
        answer_lengths = flat_lengths.reshape(len(prompt_lengths), -1)
        tokens.append(answer_lengths.sum(axis=1) + prompt_lengths * answer_lengths.shape[1])
    return np.concatenate(tokens).astype(np.int64)


def pack(tokens: np.ndarray, capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Divide samples of (n,) int64 `tokens` into packed rows of at most `capacity` tokens: the
    longest sample first, each into the fullest row that has room for it; one over the capacity is a
    row by itself. `order`, a permutation, decides among samples of equal length. Best fit
    decreasing needs at most 11/9 of the smallest possible number of rows, plus 4 (Johnson et al.
    1974)."""
    shuffled = np.asarray(order, dtype=np.int64)
    by_length = shuffled[np.argsort(-tokens[shuffled], kind="stable")]
    packed = list[list[int]]()
    # the packed rows that have room: the tokens that fit into each, rising, and their indices
    rooms = list[int]()
    rows_with_room = list[int]()
    for sample, size in zip(by_length.tolist(), tokens[by_length].tolist(), strict=True):
        fullest = bisect_left(rooms, size)
        if fullest < len(rooms):
            room = rooms.pop(fullest)
            row = rows_with_room.pop(fullest)
        else:
            room = capacity
            row = len(packed)
            packed.append([])
        packed[row].append(sample)
        if room > size:
            position = bisect_left(rooms, room - size)
            rooms.insert(position, room - size)
            rows_with_room.insert(position, row)
    return packed


@dataclass(frozen=True)
class PackingPlan:
    """The samples of an epoch and the size of the packed rows."""

    tokens: np.ndarray  # (n,) int64, tokens of each sample
    capacity: int  # most tokens of a packed row
    rows: int  # packed rows of an epoch

    def epoch(self, seed: int, epoch: int) -> list[list[int]]:
        """The samples of each packed row, and the packed rows in the order of training; fixed by
        seed and epoch."""
        packed = pack(self.tokens, self.capacity, epoch_order(len(self.tokens), seed, epoch))
        order = torch.randperm(len(packed), generator=shared_generator(seed, epoch, PACKING))
        return [packed[index] for index in order.tolist()]


def plan_packing(rows: Dataset, max_seq_len: int) -> PackingPlan:
    """Packed rows of `max_seq_len` tokens for each answer of a sample: a pair takes two rows, and
    stays together."""
    tokens = sample_tokens(rows)
    capacity = max_seq_len * len(rows[0]["answers"])
    return PackingPlan(tokens, capacity, len(pack(tokens, capacity, range(len(tokens)))))


def samples_of(packed: list[list[int]], indices: Sequence[int]) -> list[int]:
    """The samples of the packed rows with these indices; one `PADDING_ROW` if all of these are
    padding."""
    samples = list[int]()
    for index in indices:
        if index != PADDING_ROW:
            samples += packed[index]
    return samples or [PADDING_ROW]


@dataclass(frozen=True)
class PairBatch:
    """B pairs as 2B right-padded rows, all chosen answers first."""

    input_ids: Tensor  # (2B, T) int64
    lengths: Tensor  # (2B,) int64
    # (2B, T) bool, True on all tokens of the answers, and nowhere on a padding pair
    answer_mask: Tensor
    pair_mask: Tensor  # (B,) bool, False on padding pairs
    margin: Tensor  # (B,) fp32
    data_sources: Tensor | None = None  # (B,)
    ref_logprobs: Tensor | None = None  # (2B,) fp64, the reference's log-prob of each whole answer
    # `GivenEmbeddings` of `models`, on the device; None: the model embeds all ids
    given: Any = None


@dataclass(frozen=True)
class LabelledBatch:
    """B right-padded rows of prompt and answer, and B mismatched rows: the same prompts and other
    rows' answers."""

    input_ids: Tensor  # (B, T) int64
    # (B, T) bool, True on the tokens of the answers, and nowhere on a padding row
    answer_mask: Tensor
    desirable: Tensor  # (B,) bool
    row_mask: Tensor  # (B,) bool, False on padding rows
    other_ids: Tensor  # (B, S) int64, of the mismatched rows
    other_mask: Tensor  # (B, S) bool, as `answer_mask`
    lengths: Tensor  # (B,) int64
    data_sources: Tensor | None = None  # (B,)
    # (B, 2) fp64, the reference's log-prob of each whole answer and mismatched one
    ref_logprobs: Tensor | None = None
    # (B,) fp64, the KL estimate of the optimizer step, equal in all rows
    baseline: Tensor | None = None
    # `GivenEmbeddings` of `models` for both kinds of rows, on the device; None: the model embeds
    # all ids
    given: Any = None
    other_given: Any = None


def collate_pairs(
    rows: Dataset, indices: Sequence[int], pad_id: int, given_for: GivenFor | None = None
) -> PairBatch:
    """Each prompt once with its chosen and once with its rejected answer, and what
    `with_references` added."""
    records, real = rows_at(rows, indices)
    chosen = [record["answers"][0] for record in records]
    rejected = [record["answers"][1] for record in records]
    ids, lengths, mask = answered(records * 2, chosen + rejected, real.repeat(2), pad_id)
    for row, record in enumerate(records):
        _leave_out_untrained(mask[row], record, record)
        _leave_out_untrained(mask[len(records) + row], record, record, side=1)
    margin = torch.tensor([record["margin"] for record in records])
    ref_logprobs = column(records, REF_LOGPROBS, torch.float64)
    if ref_logprobs is not None:
        ref_logprobs = ref_logprobs.T.flatten()  # (B, 2): all chosen answers first
    given_embeddings = None
    if given_for is not None:
        given_embeddings = given_for(records * 2, ids)
    sources = column(records, "source")
    return PairBatch(ids, lengths, mask, real, margin, sources, ref_logprobs, given_embeddings)


def _leave_out_untrained(
    mask: Tensor, record: dict[str, Any], answer: dict[str, Any], side: int = 0
) -> None:
    """Set the (T,) `mask` of the prompt of one record, and of an answer of the same or of another
    one, to False where the answer is not trained: at what the user says in it."""
    begin = len(record["prompt_ids"])
    spans_of_answers = answer.get("untrained_spans") or [()] * (side + 1)
    for start, end in spans_of_answers[side]:
        mask[begin + start : begin + end] = False


def collate_labelled(
    rows: Dataset,
    indices: Sequence[int],
    pad_id: int,
    max_seq_len: int,
    given_for: GivenFor | None = None,
) -> LabelledBatch:
    """Each answer after its prompt, and after the prompt the answer of the row in the column
    `other_row`, which is cut at its end where the mismatched row would exceed `max_seq_len`
    tokens."""
    records, real = rows_at(rows, indices)
    answers = [record["answers"][0] for record in records]
    ids, lengths, mask = answered(records, answers, real, pad_id)
    lenders = [rows[record[OTHER_ROW]] for record in records]
    borrowed = list[list[int]]()
    for record, lender in zip(records, lenders, strict=True):
        room = max(1, max_seq_len - len(record["prompt_ids"]))
        borrowed.append(lender["answers"][0][:room])
    other_ids, _, other_mask = answered(records, borrowed, real, pad_id)
    for row, (record, lender) in enumerate(zip(records, lenders, strict=True)):
        _leave_out_untrained(mask[row], record, record)
        _leave_out_untrained(other_mask[row], record, lender)
    given_embeddings = None
    other_given = None
    if given_for is not None:
        given_embeddings = given_for(records, ids)
        other_given = given_for(records, other_ids)
    return LabelledBatch(
        ids,
        mask,
        desirable=torch.tensor([record["label"] > 0.5 for record in records]),
        row_mask=real,
        other_ids=other_ids,
        other_mask=other_mask,
        lengths=lengths,
        data_sources=column(records, "source"),
        ref_logprobs=column(records, REF_LOGPROBS, torch.float64),
        given=given_embeddings,
        other_given=other_given,
    )
