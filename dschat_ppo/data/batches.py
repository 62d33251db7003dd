"""From token rows to batches: the order of an epoch, which samples share a packed row (`--packing`), padded batches.

The order of rows does not depend on the number of ranks. A batch is as wide as its longest row; masks and lengths
exclude the padding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data.streaming import StreamedRows, load_stream_state, rows_at_hand, stream_state
from dschat_ppo.types import PromptBatch

PADDING_ROW = -1  # index of a row that fills up the last batch and has no loss
PACKING = 11  # separates the order of packed rows from other random streams of the same seed and epoch
_CHUNK = 10_000  # rows whose lengths are read at a time
# Columns that step 2 adds: the row whose answer a row borrows (KTO); the log-probs of both answers under the reference.
OTHER_ROW, REF_LOGPROBS = "other_row", "ref_logprobs"


# The order of an epoch


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """A permutation of all row indices, fixed by seed and epoch."""
    return torch.randperm(num_rows, generator=shared_generator(seed, epoch)).tolist()


def chunked_order(rows: Dataset | StreamedRows, seed: int, epoch: int) -> Iterator[int]:
    """All row indices of an epoch: chunk after chunk of a stream, each a permutation that is drawn when it is needed. A
    single chunk has the `epoch_order`: a last 0 does not change the generator."""
    size = len(rows_at_hand(rows))
    for chunk, first in enumerate(range(0, len(rows), size)):
        order = torch.randperm(min(size, len(rows) - first), generator=shared_generator(seed, epoch, chunk))
        yield from (order + first).tolist()


def optimizer_steps(
    order: Iterable[int], micro_batch: int, accumulation: int, world_size: int, rank: int
) -> Iterator[list[list[int]]]:
    """Yield this rank's micro-batches of each optimizer step, once through `order`. A step takes the next `micro_batch
    * accumulation * world_size` rows, however they are split over ranks and micro-batches. The last one may be short:
    its micro-batches are smaller, padded with `PADDING_ROW`, so that all ranks run equally many of equal size."""
    micro_batches = accumulation * world_size  # of all ranks
    indices = iter(order)
    while step := list(islice(indices, micro_batch * micro_batches)):
        size = -(-len(step) // micro_batches)
        step += [PADDING_ROW] * (size * micro_batches - len(step))
        mine = step[rank * accumulation * size : (rank + 1) * accumulation * size]
        yield [mine[i : i + size] for i in range(0, len(mine), size)]


class IndexStream:
    """An endless sequence of row indices, the same on every rank, reshuffled every epoch."""

    def __init__(self, rows: Dataset | StreamedRows, seed: int):
        self._rows, self._seed = rows, seed
        self._left: Iterator[int] = iter(())  # of the epoch, if it has begun
        self.taken = 0

    def take(self, count: int) -> list[int]:
        """The next `count` row indices; a request may run over the end of an epoch into the next one."""
        rows: list[int] = []
        while len(rows) < count:
            found = list(islice(self._left, count - len(rows)))
            if not found:
                epoch, done = divmod(self.taken, len(self._rows))
                self._left = islice(chunked_order(self._rows, self._seed, epoch), done, None)
            rows += found
            self.taken += len(found)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Position in the sequence, and in the data of a stream, for `load_state_dict`."""
        return {"taken": self.taken, "data": stream_state(self._rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position, over the same rows with the same seed."""
        self.taken, self._left = state["taken"], iter(())
        load_stream_state(self._rows, state.get("data"))


# Packing: the number of packed rows depends on the lengths of the samples alone, so every epoch has the same number;
# which samples meet is drawn again in each epoch.


def sample_tokens(rows: Dataset) -> np.ndarray:
    """Tokens of each sample, (n,) int64: of its answers, and of the prompt once for each of them."""
    found = [np.zeros(0, dtype=np.int64)]
    for part in rows.select_columns(["prompt_ids", "answers"]).with_format("arrow").iter(_CHUNK):
        prompts = pc.list_value_length(part["prompt_ids"]).to_numpy()
        answers = pc.list_value_length(pc.list_flatten(part["answers"])).to_numpy().reshape(len(prompts), -1)
        found.append(answers.sum(axis=1) + prompts * answers.shape[1])  # every row has equally many answers
    return np.concatenate(found).astype(np.int64)


def pack(tokens: np.ndarray, capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Divide samples of (n,) int64 `tokens` into packed rows of at most `capacity` tokens: the longest sample first,
    each into the fullest row that has room for it; one over the capacity is a row by itself. `order`, a permutation,
    decides among samples of equal length. Best fit decreasing needs at most 11/9 of the smallest possible number of
    rows, plus 4 (Johnson et al. 1974)."""
    shuffled = np.asarray(order, dtype=np.int64)
    by_length = shuffled[np.argsort(-tokens[shuffled], kind="stable")]
    packed: list[list[int]] = []
    rooms, rows = list[int](), list[int]()  # of the packed rows with room: its tokens, rising, and their numbers
    for sample, size in zip(by_length.tolist(), tokens[by_length].tolist(), strict=True):
        place = bisect_left(rooms, size)
        if place < len(rooms):
            room, row = rooms.pop(place), rows.pop(place)
        else:
            room, row = capacity, len(packed)
            packed.append([])
        packed[row].append(sample)
        if room > size:
            place = bisect_left(rooms, room - size)
            rooms.insert(place, room - size)
            rows.insert(place, row)
    return packed


@dataclass(frozen=True)
class PackingPlan:
    """The samples of an epoch and the size of the packed rows."""

    tokens: np.ndarray  # (n,) int64, tokens of each sample
    capacity: int  # most tokens of a packed row
    rows: int  # packed rows of an epoch

    def epoch(self, seed: int, epoch: int) -> list[list[int]]:
        """The samples of each packed row, and the packed rows in the order of training; fixed by seed and epoch."""
        packed = pack(self.tokens, self.capacity, epoch_order(len(self.tokens), seed, epoch))
        order = torch.randperm(len(packed), generator=shared_generator(seed, epoch, PACKING))
        return [packed[number] for number in order.tolist()]


def plan_packing(rows: Dataset, max_seq_len: int) -> PackingPlan:
    """Packed rows of `max_seq_len` tokens for each answer of a sample: a pair takes two rows, and stays together."""
    tokens = sample_tokens(rows)
    capacity = max_seq_len * len(rows[0]["answers"])
    return PackingPlan(tokens, capacity, len(pack(tokens, capacity, range(len(tokens)))))


def samples_of(packed: list[list[int]], numbers: Sequence[int]) -> list[int]:
    """The samples of the packed rows `numbers`; one `PADDING_ROW` if all of these are padding."""
    return [s for number in numbers if number != PADDING_ROW for s in packed[number]] or [PADDING_ROW]


# Batches


@dataclass(frozen=True)
class SFTBatch:
    """B right-padded rows of prompt and answer."""

    input_ids: Tensor  # (B, T) int64
    loss_mask: Tensor  # (B, T) bool, True on the tokens whose loss counts; never on the first one or a padding row
    lengths: Tensor | None = None  # (B,) int64
    data_sources: Tensor | None = None  # (B,) int64, the number of each row's data set, in all batches


@dataclass(frozen=True)
class PairBatch:
    """B pairs as 2B right-padded rows, all chosen answers first."""

    input_ids: Tensor  # (2B, T) int64
    lengths: Tensor  # (2B,) int64
    answer_mask: Tensor  # (2B, T) bool, True on all tokens of the answers, and nowhere on a padding pair
    pair_mask: Tensor  # (B,) bool, False on padding pairs
    margin: Tensor  # (B,) fp32
    data_sources: Tensor | None = None  # (B,)
    ref_logprobs: Tensor | None = None  # (2B,) fp64, the reference's log-prob of each whole answer


@dataclass(frozen=True)
class LabelledBatch:
    """B right-padded rows of prompt and answer, and B mismatched rows: the same prompts and other rows' answers."""

    input_ids: Tensor  # (B, T) int64
    answer_mask: Tensor  # (B, T) bool, True on the tokens of the answers, and nowhere on a padding row
    desirable: Tensor  # (B,) bool
    row_mask: Tensor  # (B,) bool, False on padding rows
    other_ids: Tensor  # (B, S) int64, of the mismatched rows
    other_mask: Tensor  # (B, S) bool, as `answer_mask`
    lengths: Tensor  # (B,) int64
    data_sources: Tensor | None = None  # (B,)
    ref_logprobs: Tensor | None = None  # (B, 2) fp64, the reference's log-prob of each whole answer and mismatched one
    baseline: Tensor | None = None  # (B,) fp64, the KL estimate of the optimizer step, equal in all rows


@dataclass(frozen=True)
class StepBatch:
    """B right-padded rows of prompt and answer with labels at the ends of steps."""

    input_ids: Tensor  # (B, T) int64
    lengths: Tensor  # (B,) int64
    label_mask: Tensor  # (B, T) bool, True on tokens with a label, and nowhere on a padding row
    labels: Tensor  # (B, T) fp32 in [0, 1], 0 outside `label_mask`
    data_sources: Tensor | None = None  # (B,)


def rows_at(rows: Dataset, indices: Sequence[int]) -> tuple[list[dict[str, Any]], Tensor]:
    """(token rows, (B,) bool, whether each is real). A padding row is a copy of row 0."""
    return [rows[max(index, 0)] for index in indices], torch.tensor([index != PADDING_ROW for index in indices])


def right_padded(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad sequences of token ids, none empty, on the right: `(input_ids (B, T) int64, lengths (B,) int64)`."""
    ids = pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True, padding_value=pad_id)
    return ids, torch.tensor([len(sequence) for sequence in sequences])


def _column(records: Sequence[dict[str, Any]], name: str, dtype: torch.dtype | None = None) -> Tensor | None:
    """A column of the rows; None if they do not have it."""
    return torch.tensor([record[name] for record in records], dtype=dtype) if name in records[0] else None


def answered(
    records: Sequence[dict[str, Any]], answers: Sequence[Sequence[int]], real: Tensor, pad_id: int, whole: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The prompt of each record, then an answer: `(input_ids (B, T) int64, lengths (B,) int64, mask (B, T) bool)`. The
    mask is True on the tokens of the answers, or on all but the first with `whole`, and nowhere on rows not `real`."""
    prompts = [record["prompt_ids"] for record in records]
    ids, lengths = right_padded([[*prompt, *ids] for prompt, ids in zip(prompts, answers, strict=True)], pad_id)
    starts, columns = torch.tensor([1 if whole else len(ids) for ids in prompts]), torch.arange(ids.shape[1])
    return ids, lengths, (columns >= starts[:, None]) & (columns < lengths[:, None]) & real[:, None]


def collate_sft(rows: Dataset, indices: Sequence[int], pad_id: int, train_on_prompt: bool) -> SFTBatch:
    """Each prompt and its answer as one row. The loss covers the answer including its final token, and the tokens of
    the prompt that the column `prompt_spans` names ([start, end) pairs), if there is one; with `train_on_prompt` it
    covers everything but the first token of the row."""
    records, real = rows_at(rows, indices)
    ids, lengths, mask = answered(records, [r["answers"][0] for r in records], real, pad_id, train_on_prompt)
    for row, record, is_real in zip(mask, records, real, strict=True):
        for start, end in record.get("prompt_spans") or ():
            row[max(start, 1) : end] = is_real  # nothing predicts the first token
    return SFTBatch(ids, mask, lengths, _column(records, "source"))


def collate_pairs(rows: Dataset, indices: Sequence[int], pad_id: int) -> PairBatch:
    """Each prompt once with its chosen and once with its rejected answer, and what `with_references` added."""
    records, real = rows_at(rows, indices)
    answers = [r["answers"][side] for side in (0, 1) for r in records]
    ids, lengths, mask = answered(records * 2, answers, real.repeat(2), pad_id)
    margin, reference = torch.tensor([r["margin"] for r in records]), _column(records, REF_LOGPROBS, torch.float64)
    flat = None if reference is None else reference.T.flatten()
    return PairBatch(ids, lengths, mask, real, margin, _column(records, "source"), flat)


def collate_labelled(rows: Dataset, indices: Sequence[int], pad_id: int, max_seq_len: int) -> LabelledBatch:
    """Each answer after its prompt, and after the prompt the answer of the row in the column `other_row`, which is cut
    at its end where the mismatched row would exceed `max_seq_len` tokens."""
    records, real = rows_at(rows, indices)
    ids, lengths, mask = answered(records, [r["answers"][0] for r in records], real, pad_id)
    rooms = [max(1, max_seq_len - len(r["prompt_ids"])) for r in records]
    borrowed = [rows[r[OTHER_ROW]]["answers"][0][:room] for r, room in zip(records, rooms, strict=True)]
    other_ids, _, other_mask = answered(records, borrowed, real, pad_id)
    desirable, sources = torch.tensor([r["label"] > 0.5 for r in records]), _column(records, "source")
    reference = _column(records, REF_LOGPROBS, torch.float64)
    return LabelledBatch(ids, mask, desirable, real, other_ids, other_mask, lengths, sources, reference)


def collate_steps(rows: Dataset, indices: Sequence[int], pad_id: int) -> StepBatch:
    """Each prompt and its answer as one row, with the labels at the columns `step_ends` of the answer."""
    records, real = rows_at(rows, indices)
    ids, lengths, _ = answered(records, [r["answers"][0] for r in records], real, pad_id)
    mask, labels = torch.zeros(ids.shape, dtype=torch.bool), torch.zeros(ids.shape)
    for row, (record, is_real) in enumerate(zip(records, real, strict=True)):
        columns = [len(record["prompt_ids"]) + end for end in record["step_ends"]]
        mask[row, columns] = is_real
        labels[row, columns] = torch.tensor(record["step_labels"]) * is_real
    return StepBatch(ids, lengths, mask, labels, _column(records, "source"))


def collate_prompts(rows: Dataset, indices: Sequence[int], pad_id: int) -> PromptBatch:
    """Left-padded prompts."""
    reversed_ids, lengths = right_padded([rows[i]["prompt_ids"][::-1] for i in indices], pad_id)
    reversed_mask = torch.arange(reversed_ids.shape[1]) < lengths.unsqueeze(1)
    return PromptBatch(reversed_ids.flip(1), reversed_mask.flip(1))
