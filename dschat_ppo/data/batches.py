"""From token rows to batches: the order of an epoch, and padded batches; `supervised_batches.py`
has more of them.

The order of rows does not depend on the number of ranks. A batch is as wide as its longest row;
masks and lengths exclude the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data.lazy_rows import (
    TrainingRows,
    position_in_data,
    read_on,
    rows_at_hand,
)
from dschat_ppo.types import PromptBatch

# (token rows, their ids (B, T)) -> what stands in place of the embeddings of some ids, or None
GivenFor = Callable[[Sequence[dict[str, Any]], Tensor], Any]
PADDING_ROW = -1  # index of a row that fills up the last batch and has no loss


# The order of an epoch


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """A permutation of all row indices, fixed by seed and epoch."""
    return torch.randperm(num_rows, generator=shared_generator(seed, epoch)).tolist()


def chunked_order(rows: TrainingRows, seed: int, epoch: int) -> Iterator[int]:
    """All row indices of an epoch: chunk after chunk of lazy rows, each a permutation that is drawn
    when it is needed. A single chunk has the `epoch_order`: a last 0 does not change the
    generator."""
    size = len(rows_at_hand(rows))
    for chunk, first in enumerate(range(0, len(rows), size)):
        order = torch.randperm(
            min(size, len(rows) - first), generator=shared_generator(seed, epoch, chunk)
        )
        yield from (order + first).tolist()


def optimizer_steps(
    order: Iterable[int], micro_batch: int, accumulation: int, world_size: int, rank: int
) -> Iterator[list[list[int]]]:
    """This rank's micro-batches of each optimizer step, once through `order`.

    A step takes the next rows of `order`: `micro_batch` for each micro-batch of each rank, however
    they are divided. The last step may be short: its micro-batches are smaller, padded with
    `PADDING_ROW`, so that all ranks run equally many of equal size.
    """
    micro_batches = accumulation * world_size  # of all ranks
    indices = iter(order)
    step_rows = list(islice(indices, micro_batch * micro_batches))
    while step_rows:
        size = -(-len(step_rows) // micro_batches)  # rounded up
        step_rows += [PADDING_ROW] * (size * micro_batches - len(step_rows))
        rank_rows = step_rows[rank * accumulation * size : (rank + 1) * accumulation * size]
        yield [rank_rows[start : start + size] for start in range(0, len(rank_rows), size)]
        step_rows = list(islice(indices, micro_batch * micro_batches))


class IndexStream:
    """An endless sequence of row indices, the same on every rank, reshuffled every epoch."""

    def __init__(self, rows: TrainingRows, seed: int):
        self._rows = rows
        self._seed = seed
        self._rest_of_epoch: Iterator[int] = iter(())
        self.taken = 0  # indices since the start, over all epochs

    def take(self, count: int) -> list[int]:
        """The next `count` row indices; a request may run over the end of an epoch into the next
        one."""
        indices = list[int]()
        while len(indices) < count:
            of_epoch = list(islice(self._rest_of_epoch, count - len(indices)))
            if not of_epoch:
                epoch, done = divmod(self.taken, len(self._rows))
                order = chunked_order(self._rows, self._seed, epoch)
                self._rest_of_epoch = islice(order, done, None)
            indices += of_epoch
            self.taken += len(of_epoch)
        return indices

    def state_dict(self) -> dict[str, Any]:
        """Position in the sequence, and in the data of lazy rows, for `load_state_dict`."""
        return {"taken": self.taken, "data": position_in_data(self._rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position, over the same rows with the same seed."""
        self.taken = state["taken"]
        self._rest_of_epoch = iter(())
        read_on(self._rows, state.get("data"))


# Batches


@dataclass(frozen=True)
class SFTBatch:
    """B right-padded rows of prompt and answer."""

    input_ids: Tensor  # (B, T) int64
    # (B, T) bool, True on the tokens whose loss counts; never on the first one or a padding row
    loss_mask: Tensor
    lengths: Tensor | None = None  # (B,) int64
    # (B,) int64, the number of each row's data set, in all batches
    data_sources: Tensor | None = None
    # `GivenEmbeddings` of `models`, on the device; None: the model embeds all ids
    given: Any = None


def rows_at(rows: Dataset, indices: Sequence[int]) -> tuple[list[dict[str, Any]], Tensor]:
    """(token rows, (B,) bool, whether each is real). A padding row is a copy of row 0."""
    records = [rows[max(index, 0)] for index in indices]
    is_real = torch.tensor([index != PADDING_ROW for index in indices])
    return records, is_real


def right_padded(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad sequences of token ids, none empty, on the right: `(input_ids (B, T) int64, lengths (B,)
    int64)`."""
    ids = pad_sequence(
        [torch.tensor(sequence) for sequence in sequences], batch_first=True, padding_value=pad_id
    )
    return ids, torch.tensor([len(sequence) for sequence in sequences])


def column(
    records: Sequence[dict[str, Any]], name: str, dtype: torch.dtype | None = None
) -> Tensor | None:
    """A column of the rows; None if they do not have it."""
    if name in records[0]:
        return torch.tensor([record[name] for record in records], dtype=dtype)
    return None


def answered(
    records: Sequence[dict[str, Any]],
    answers: Sequence[Sequence[int]],
    real: Tensor,
    pad_id: int,
    train_on_prompt: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The prompt of each record, then an answer: `(input_ids (B, T) int64, lengths (B,) int64, mask
    (B, T) bool)`. The mask is True on the tokens of the answers, with `train_on_prompt` on all but
    the first token of a row, and nowhere on rows not `real`."""
    sequences = list[list[int]]()
    starts = list[int]()
    for record, answer in zip(records, answers, strict=True):
        prompt = record["prompt_ids"]
        sequences.append([*prompt, *answer])
        starts.append(1 if train_on_prompt else len(prompt))
    ids, lengths = right_padded(sequences, pad_id)
    columns = torch.arange(ids.shape[1])
    is_after_start = columns >= torch.tensor(starts)[:, None]
    is_in_row = columns < lengths[:, None]
    return ids, lengths, is_after_start & is_in_row & real[:, None]


def collate_sft(
    rows: Dataset,
    indices: Sequence[int],
    pad_id: int,
    train_on_prompt: bool,
    given_for: GivenFor | None = None,
) -> SFTBatch:
    """Each prompt and its answer as one row. The loss covers the answer including its final token,
    and the tokens of the prompt that the column `prompt_spans` names ([start, end) pairs), if there
    is one; with `train_on_prompt` it covers everything but the first token of the row."""
    records, real = rows_at(rows, indices)
    answers = [record["answers"][0] for record in records]
    ids, lengths, mask = answered(records, answers, real, pad_id, train_on_prompt)
    for row_mask, record, is_real in zip(mask, records, real, strict=True):
        for start, end in record.get("prompt_spans") or ():
            row_mask[max(start, 1) : end] = is_real  # nothing predicts the first token
    given_embeddings = None
    if given_for is not None:
        given_embeddings = given_for(records, ids)
    return SFTBatch(ids, mask, lengths, column(records, "source"), given_embeddings)


def collate_prompts(
    rows: Dataset | Sequence[dict[str, Any]],
    indices: Sequence[int],
    pad_id: int,
    extra: dict[str, Tensor] | None = None,
) -> PromptBatch:
    """Left-padded prompts. `extra`: columns of features of these; None: none."""
    reversed_ids, lengths = right_padded([rows[i]["prompt_ids"][::-1] for i in indices], pad_id)
    reversed_mask = torch.arange(reversed_ids.shape[1]) < lengths.unsqueeze(1)
    return PromptBatch(reversed_ids.flip(1), reversed_mask.flip(1), extra=extra or {})
