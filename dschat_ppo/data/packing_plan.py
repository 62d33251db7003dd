"""Packing (`--packing`): which samples share a packed row, so that micro-batches are full of tokens.

A packed row holds whole samples with at most `capacity` tokens together. The number of packed rows depends on the
lengths of the samples alone, so every epoch has the same number; which samples meet is drawn again in each epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset

from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data.sampler import PADDING_ROW, epoch_order

PACKING = 11  # separates the order of packed rows from other random streams of the same seed and epoch
_CHUNK = 10_000  # rows whose lengths are read at a time


def sample_tokens(rows: Dataset) -> np.ndarray:
    """Tokens of each sample, (n,) int64: of its answers, and of the prompt once for each of them."""
    table, found = rows.data, [np.zeros(0, dtype=np.int64)]
    for start in range(0, table.num_rows, _CHUNK):
        part = table.slice(start, _CHUNK)
        prompts = pc.list_value_length(part.column("prompt_ids")).to_numpy()
        answers = part.column("answers").combine_chunks()
        before = np.concatenate([[0], np.cumsum(pc.list_value_length(answers.flatten()).to_numpy())])
        offsets = answers.offsets.to_numpy() - answers.offsets[0].as_py()  # answers before each row
        found.append(before[offsets[1:]] - before[offsets[:-1]] + prompts * np.diff(offsets))
    tokens = np.concatenate(found).astype(np.int64)
    # Lengths of the whole table, then of the selected rows: `datasets` would copy the tokens of a selection.
    return tokens if rows._indices is None else tokens[rows._indices.column(0).to_numpy()]


def pack(tokens: np.ndarray, capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Divide samples into packed rows: the longest sample first, each into the fullest row that has room for it.

    Best fit decreasing needs at most 11/9 of the smallest possible number of rows, plus 4 (Johnson et al. 1974).

    Args:
        tokens: (n,) int64, tokens of each sample, above 0.
        capacity: most tokens of a packed row; a sample with more is a row by itself.
        order: the numbers 0 .. n-1; decides among samples of equal length.
    """
    shuffled = np.asarray(order, dtype=np.int64)
    by_length = shuffled[np.argsort(-tokens[shuffled], kind="stable")]
    packed: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # room in tokens -> packed rows
    rooms = 0  # bit r is set if a packed row has room for exactly r tokens
    for sample, size in zip(by_length.tolist(), tokens[by_length].tolist(), strict=True):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
            packed[row].append(sample)
        else:
            room, row = capacity, len(packed)
            packed.append([sample])
        left = room - size
        if left > 0:
            with_room[left].append(row)
            rooms |= 1 << left
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
