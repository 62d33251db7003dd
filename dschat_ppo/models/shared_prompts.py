"""Rows laid end to end as one packed row, in which rows that begin alike hold their common beginning once.

Answers to one prompt become `[prompt | answer 1 | answer 2 | ...]`. The first row of a group is whole; the others keep
the tokens after the common beginning, with the positions that they have in their own rows, and attend to the beginning
of the first. The outputs are those of separate rows, and the gradients of all answers flow into one prompt.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LEAST_TOKENS = 8  # shorter beginnings (a BOS, a role's name) save less than an attention call costs
LEAST_SAVING = 0.05  # share of the tokens that a micro-batch must save, else its rows stay separate


@dataclass(frozen=True)
class PackedRows:
    """Right-padded rows (B, T) as one packed row of N tokens."""

    tokens: Tensor  # (N,) int64, where each packed token is in the rows, flattened to (B x T)
    positions: Tensor  # (N,) int64, its column there
    places: Tensor  # (B, T) int64, where each token of a row is in the packed row; any valid place after a row's end
    lengths: list[int]  # of the segments of the packed row, none 0
    # for each segment, the columns (start, end) of the packed row that it attends to before its own, empty if start =
    # end; None: no segment has any
    seen: list[tuple[int, int]] | None = None


@dataclass(frozen=True)
class RowPrompts:
    """The prompts, or other beginnings, of n rows, for models that share them: `groups` (n,) int64, equal for rows with
    one prompt; `tokens` (n,)."""

    groups: Tensor
    tokens: Tensor

    def at(self, index: Tensor) -> RowPrompts:
        """Those of the rows at `index`."""
        return RowPrompts(self.groups[index], self.tokens[index])


@dataclass(frozen=True)
class VarlenSegments:
    """Segments of a packed row for variable-length attention. `queries` and `keys`, (segments + 1,) int32, are where
    those of each segment begin, and the last end; no segment has more than `most_queries` and `most_keys`. `columns`
    (keys,) int64 of the packed row are the keys; None: all in order."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    columns: Tensor | None

    @classmethod
    def of(cls, lengths: list[int], seen: list[tuple[int, int]] | None, device: torch.device) -> VarlenSegments:
        """Each segment's keys are the columns that it sees before its own, and its own."""
        ends, most = torch.tensor([0, *lengths]).cumsum(0), max(lengths)
        if seen is None:
            queries = ends.int().to(device)
            return cls(queries, queries, most, most, None)
        own = itertools.pairwise(ends.tolist())
        columns = torch.cat([torch.arange(*span) for pair in zip(seen, own, strict=True) for span in pair])
        counts = [end - start + length for (start, end), length in zip(seen, lengths, strict=True)]
        queries, keys, columns = _in_one_copy([ends, torch.tensor([0, *counts]).cumsum(0), columns], device)
        return cls(queries.int(), keys.int(), most, max(counts), columns)


def lay_out(input_ids: Tensor, lengths: Tensor, packs: bool, shares: bool) -> PackedRows | None:
    """The packed row for right-padded `input_ids` (B, T) with `lengths` (B,), all above 0; None: rows stay padded.
    `packs` rows that differ in length; `shares`: packs rows that begin alike, if that saves enough. The host computes
    the layout, so that it waits for a GPU only to read the rows, before the first layer."""
    if not packs and not shares:
        return None
    width, device, lengths = input_ids.shape[1], input_ids.device, lengths.cpu()
    # rows in `order`; row i leaves its first `shared[i]` tokens to row `leaders[i]`
    order = leaders = numbers = torch.arange(len(lengths))
    shared = torch.zeros_like(numbers)
    if shares and len(lengths) > 1:
        in_groups, prompts = common_beginnings(input_ids.cpu(), lengths)
        saved = torch.where(prompts.groups == numbers, 0, prompts.tokens)
        if int(saved.sum()) >= LEAST_SAVING * int(lengths.sum()):
            order, leaders, shared = torch.tensor(in_groups), prompts.groups, saved
    if not shared.any() and not (packs and are_uneven(lengths)):
        return None
    left_out = shared.unsqueeze(1)
    slots = torch.arange(width)
    kept = ((slots < lengths.unsqueeze(1)) & (slots >= left_out))[order]  # (B, T) in the order of the packed row
    places = torch.empty(kept.shape, dtype=torch.int64)
    places[order] = kept.flatten().cumsum(0).view(kept.shape) - 1
    places = torch.where(slots < left_out, places[leaders], places)
    tokens = (order.unsqueeze(1) * width + slots)[kept]  # (N,)
    starts, segments, seen, end = dict[int, int](), [], [], 0
    for row, leader, left, size in torch.stack([order, leaders[order], shared[order], lengths[order]], dim=1).tolist():
        starts[row] = end
        if own := size - left:  # a row may be the beginning of another
            segments.append(own)
            seen.append((starts[leader], starts[leader] + left))
            end += own
    tokens, places = _in_one_copy([tokens, places], device)
    return PackedRows(tokens, tokens % width, places, segments, seen if shared.any() else None)


def are_uneven(lengths: Tensor) -> bool:
    """Whether rows differ in length (B,), so that packing saves padding."""
    return bool(lengths.min() < lengths.max())


def _in_one_copy(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """int64 tensors of the host on the device."""
    if device.type == "cpu":
        return parts
    moved = torch.cat([part.flatten() for part in parts]).to(device)
    return [part.view(one.shape) for part, one in zip(moved.split([p.numel() for p in parts]), parts, strict=True)]


def common_beginnings(input_ids: Tensor, lengths: Tensor) -> tuple[list[int], RowPrompts]:
    """Groups of rows whose first tokens are equal, such that the fewest tokens are left if each group holds its common
    beginning once: all rows, group after group; and for each row the first row of its group, and the tokens that all
    rows of its group have in common (0 in a group of one). `input_ids` (B, T) right-padded, `lengths` (B,) above 0."""
    ids, sizes = input_ids.cpu(), lengths.cpu()
    words = [row[:size].numpy().tobytes() for row, size in zip(ids, sizes.tolist(), strict=True)]
    order = sorted(range(len(words)), key=words.__getitem__)  # rows that begin alike are neighbours
    equal = (ids[order[1:]] == ids[order[:-1]]).long().cumprod(dim=1).sum(dim=1)  # (B - 1,)
    common = torch.minimum(equal, torch.minimum(sizes[order[1:]], sizes[order[:-1]])).numpy()

    # Groups `[start, end)` of the sorted rows, each of which saves its beginning in all rows but the first. For the
    # first `end` rows: the most tokens saved, and the start of their last group. Of equal choices the latest counts.
    saved, begin = np.zeros(len(words) + 1, dtype=np.int64), [0, *range(len(words))]
    for end in range(2, len(words) + 1):
        shared = np.minimum.accumulate(common[end - 2 :: -1])  # by a last group that starts at end - 2, end - 3, ...
        shared = shared[shared >= LEAST_TOKENS]
        totals = saved[end - 1 - len(shared) : end - 1][::-1] + np.arange(1, len(shared) + 1) * shared
        saved[end] = max(saved[end - 1], totals.max(initial=0))
        if saved[end] > saved[end - 1]:
            begin[end] = end - 2 - int(totals.argmax())

    leaders, of_group, end = [0] * len(words), [0] * len(words), len(words)
    while end > 0:
        start = begin[end]
        for row in order[start:end]:
            leaders[row], of_group[row] = order[start], min(common[start : end - 1].tolist(), default=0)
        end = start
    return order, RowPrompts(
        torch.tensor(leaders, device=lengths.device), torch.tensor(of_group, device=lengths.device)
    )
