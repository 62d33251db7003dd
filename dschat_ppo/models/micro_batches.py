"""Divide rows of uneven lengths among ranks and into micro-batches, and lay them end to end as one
packed row, in which rows that begin alike hold their common beginning once.

Answers to one prompt become `[prompt | answer 1 | answer 2 | ...]`. The first row of a group is
whole; the others keep the tokens after the common beginning, with the positions that they have in
their own rows, and attend to the beginning of the first. The outputs are those of separate rows,
and the gradients of all answers flow into one prompt. So answers to one prompt stay together in a
micro-batch, and their prompt counts once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.models.backbone import unwrap
from dschat_ppo.types import Model

LEAST_TOKENS = 8  # shorter beginnings (a BOS, a role's name) save less than an attention call costs
LEAST_SAVING = 0.05  # share of the tokens that a micro-batch must save, else its rows stay separate


class VarlenSegments(NamedTuple):
    """Segments of a packed row for variable-length attention."""

    queries: Tensor  # (segments + 1,) int32, where those of each segment begin, and the last end
    keys: Tensor  # likewise
    most_queries: int  # of a segment
    most_keys: int
    columns: Tensor | None  # (keys,) int64 of the packed row; None: all in order


@dataclass(frozen=True)
class Segments:
    """The segments of a row, each of which attends to itself, and what kernels need to know of
    them, made when it is first needed. `lengths`: of the segments, which follow one another, none
    0. `seen`: for each segment, the columns (start, end) of earlier ones that all of its tokens see
    too, as if they were right before them; none if start = end. None: no segment sees any."""

    lengths: list[int]
    seen: list[tuple[int, int]] | None = None
    _varlen: dict[torch.device, VarlenSegments] = field(default_factory=dict, repr=False)

    def varlen(self, device: torch.device) -> VarlenSegments:
        """Each segment's keys are the columns that it sees before its own, and its own."""
        if device in self._varlen:
            return self._varlen[device]
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        most = max(self.lengths)
        if self.seen is None:
            queries = ends.int().to(device)
            found = VarlenSegments(queries, queries, most, most, None)
        else:
            columns = torch.cat(
                [
                    torch.arange(*span)
                    for start, end, *before in self._columns
                    for span in (before, (start, end))
                ]
            )
            counts = [end - start + last - first for start, end, first, last in self._columns]
            parts = [ends, torch.tensor([0, *counts]).cumsum(0), columns]
            queries, keys, columns = _in_one_copy(parts, device)
            found = VarlenSegments(queries.int(), keys.int(), most, max(counts), columns)
        self._varlen[device] = found
        return found

    @cached_property
    def _columns(self) -> list[tuple[int, int, int, int]]:
        ends = list(itertools.accumulate(self.lengths))
        seen = self.seen or [(0, 0)] * len(ends)
        return [
            (end - own, end, *before)
            for end, own, before in zip(ends, self.lengths, seen, strict=True)
        ]

    @cached_property
    def most_keys(self) -> int:
        """The most keys that a query sees if no window hides any."""
        return max(end - start + last - first for start, end, first, last in self._columns)

    @cached_property
    def table(self) -> Tensor:
        """(segments, 4) int64: `_columns`, for kernels on a CPU."""
        return torch.tensor(self._columns)

    @cached_property
    def groups(self) -> Tensor:
        """(groups + 1,) int64: the first segment of each group, and their number. No segment sees
        another group."""
        # needed: the first column that later ones see
        firsts = [len(self.lengths)]
        needed = sum(self.lengths)
        for number, (start, _, first, end) in reversed(list(enumerate(self._columns))):
            needed = min(needed, first) if first < end else needed
            if needed >= start:
                firsts.append(number)
        return torch.tensor(firsts[::-1])


@dataclass(frozen=True)
class PackedRows:
    """Right-padded rows (B, T) as one packed row of N tokens."""

    tokens: Tensor  # (N,) int64, where each packed token is in the rows, flattened to (B x T)
    positions: Tensor  # (N,) int64, its column there
    # (B, T) int64, where each token of a row is in the packed row; any valid place after a row's
    # end
    places: Tensor
    segments: Segments


@dataclass(frozen=True)
class RowPrompts:
    """Beginnings of n rows, for models that share them: `groups` (n,) int64, equal for one prompt;
    `tokens` (n,)."""

    groups: Tensor
    tokens: Tensor

    def at(self, index: Tensor) -> RowPrompts:
        """Those of the rows at `index`."""
        return RowPrompts(self.groups[index], self.tokens[index])


def lay_out(input_ids: Tensor, lengths: Tensor, packs: bool, shares: bool) -> PackedRows | None:
    """The packed row for right-padded `input_ids` (B, T) with `lengths` (B,), all above 0; None:
    rows stay padded. `packs` rows that differ in length; `shares`: packs rows that begin alike, if
    that saves enough. The host computes the layout, so that it waits for a GPU only to read the
    rows, before the first layer."""
    if not packs and not shares:
        return None
    width = input_ids.shape[1]
    device = input_ids.device
    lengths = lengths.cpu()
    # rows in `order`; row i leaves its first `shared[i]` tokens to row `leaders[i]`
    order = leaders = numbers = torch.arange(len(lengths))
    shared = torch.zeros_like(numbers)
    if shares and len(lengths) > 1:
        in_groups, prompts = common_beginnings(input_ids.cpu(), lengths)
        saved = torch.where(prompts.groups == numbers, 0, prompts.tokens)
        if int(saved.sum()) >= LEAST_SAVING * int(lengths.sum()):
            order = torch.tensor(in_groups)
            leaders = prompts.groups
            shared = saved
    if not shared.any() and not (packs and are_uneven(lengths)):
        return None
    left_out = shared.unsqueeze(1)
    slots = torch.arange(width)
    # (B, T) in the order of the packed row
    kept = ((slots < lengths.unsqueeze(1)) & (slots >= left_out))[order]
    places = torch.empty(kept.shape, dtype=torch.int64)
    places[order] = kept.flatten().cumsum(0).view(kept.shape) - 1
    places = torch.where(slots < left_out, places[leaders], places)
    tokens = (order.unsqueeze(1) * width + slots)[kept]  # (N,)
    starts = dict[int, int]()
    segments = []
    seen = []
    end = 0
    for row, leader, left, size in torch.stack(
        [order, leaders[order], shared[order], lengths[order]], dim=1
    ).tolist():
        starts[row] = end
        if own := size - left:  # a row may be the beginning of another
            segments.append(own)
            seen.append((starts[leader], starts[leader] + left))
            end += own
    tokens, places = _in_one_copy([tokens, places], device)
    return PackedRows(
        tokens, tokens % width, places, Segments(segments, seen if shared.any() else None)
    )


def are_uneven(lengths: Tensor) -> bool:
    """Whether rows differ in length (B,), so that packing saves padding."""
    return bool(lengths.min() < lengths.max())


def _in_one_copy(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """int64 tensors of the host on the device."""
    if device.type == "cpu":
        return parts
    moved = torch.cat([part.flatten() for part in parts]).to(device)
    return [
        part.view(one.shape)
        for part, one in zip(moved.split([p.numel() for p in parts]), parts, strict=True)
    ]


def common_beginnings(input_ids: Tensor, lengths: Tensor) -> tuple[list[int], RowPrompts]:
    """Groups of rows whose first tokens are equal, such that the fewest tokens are left if each
    group holds its common beginning once: all rows, group after group; and for each row the first
    row of its group, and the tokens that all rows of its group have in common (0 in a group of
    one). `input_ids` (B, T) right-padded, `lengths` (B,) above 0."""
    ids = input_ids.cpu()
    sizes = lengths.cpu()
    words = [row[:size].numpy().tobytes() for row, size in zip(ids, sizes.tolist(), strict=True)]
    order = sorted(range(len(words)), key=words.__getitem__)  # rows that begin alike are neighbours
    equal = (ids[order[1:]] == ids[order[:-1]]).long().cumprod(dim=1).sum(dim=1)  # (B - 1,)
    common = torch.minimum(equal, torch.minimum(sizes[order[1:]], sizes[order[:-1]])).numpy()

    # Groups `[start, end)` of the sorted rows, each of which saves its beginning in all rows but
    # the first. For the first `end` rows: the most tokens saved, and the start of their last group.
    # Of equal choices the latest counts.
    saved = np.zeros(len(words) + 1, dtype=np.int64)
    begin = [0, *range(len(words))]
    for end in range(2, len(words) + 1):
        # by a last group that starts at end - 2, end - 3, ...
        shared = np.minimum.accumulate(common[end - 2 :: -1])
        shared = shared[shared >= LEAST_TOKENS]
        totals = (
            saved[end - 1 - len(shared) : end - 1][::-1] + np.arange(1, len(shared) + 1) * shared
        )
        saved[end] = max(saved[end - 1], totals.max(initial=0))
        if saved[end] > saved[end - 1]:
            begin[end] = end - 2 - int(totals.argmax())

    leaders = [0] * len(words)
    of_group = [0] * len(words)
    end = len(words)
    while end > 0:
        start = begin[end]
        for row in order[start:end]:
            leaders[row], of_group[row] = (
                order[start],
                min(common[start : end - 1].tolist(), default=0),
            )
        end = start
    return order, RowPrompts(
        torch.tensor(leaders, device=lengths.device), torch.tensor(of_group, device=lengths.device)
    )


# Each answer but the first copies the keys and values of its prompt, which take about this fraction
# of the memory that all activations of the same tokens take.
COPIED = 8


def share_prompts(*engines: Model | None) -> bool:
    """Whether all of these models that are not None run the prompt of several rows once."""
    models: list[Any] = [unwrap(engine) for engine in engines if engine is not None]
    return all(model.layout.shares for model in models)


def split_by_tokens(
    lengths: Tensor, budget: int, prompts: RowPrompts | None = None
) -> list[Tensor]:
    """Row numbers of micro-batches with `rows x longest <= budget`, longest rows first; a longer
    row is one by itself. `lengths` (n,) int64, tokens of each row. Rows that share their prompt
    come first, in micro-batches without padding, which hold at most `budget` tokens and copies of
    prompts. Each of 0 .. n-1 is in one part."""
    groups, rows = (
        ([], torch.arange(len(lengths))) if prompts is None else _sharing(lengths, prompts)
    )
    parts = []
    if groups and prompts is not None:
        parts = [
            torch.tensor(part, device=lengths.device)
            for part in _Filling(lengths, prompts).parts(groups, budget)
        ]
    rows = rows.to(lengths.device)
    order = rows[torch.argsort(lengths[rows], descending=True, stable=True)]
    start = 0
    ordered = lengths[order].tolist()
    while start < len(ordered):
        size = max(1, budget // max(1, ordered[start]))
        parts.append(order[start : start + size])
        start += size
    return parts


def even_passes(
    lengths: Tensor, budget: int, prompts: RowPrompts | None = None
) -> tuple[list[Tensor], int]:
    """`split_by_tokens`, with the last part repeated so that all ranks have as many, and how many
    are not repeated."""
    parts = split_by_tokens(lengths, budget, prompts)
    passes = int(dist.all_reduce(torch.tensor(len(parts), device=lengths.device), "max"))
    return parts + (passes - len(parts)) * parts[-1:], len(parts)


def deal(lengths: Tensor, ranks: int, prompts: RowPrompts | None = None) -> list[Tensor]:
    """Row numbers for each rank, with nearly the same number of tokens.

    Rows, a multiple of `ranks`, are dealt from the longest to the shortest, alternately forwards
    and backwards over the ranks, the same number to each. If rows share prompts, they are divided
    group after group instead, such that the rank with the most tokens has as few as possible; then
    a rank may have no rows.
    """
    groups, rest = ([], torch.empty(0)) if prompts is None else _sharing(lengths, prompts)
    if not groups or prompts is None:
        rounds = torch.argsort(lengths, descending=True, stable=True).view(-1, ranks)
        rounds[1::2] = rounds[1::2].flip(1)
        return list(rounds.unbind(dim=1))
    filling = _Filling(lengths, prompts)
    groups += [[row] for row in rest.tolist()]
    low = int(lengths.max())
    high = int(lengths.sum())
    while low < high:  # bisect for the smallest capacity with which the ranks hold all rows
        middle = (low + high) // 2
        enough = len(filling.parts(groups, middle, divide=True)) <= ranks
        low, high = (low, middle) if enough else (middle + 1, high)
    parts = filling.parts(groups, low, divide=True)
    parts += (ranks - len(parts)) * [[]]
    return [torch.tensor(part, dtype=torch.int64, device=lengths.device) for part in parts]


def sharing_pays(prompt: int, answers: int, tokens: int) -> bool:
    """Whether to run the `prompt` tokens of so many answers once. `tokens`: of their rows, each
    with its prompt."""
    return prompt >= LEAST_TOKENS and (answers - 1) * prompt >= 2 * LEAST_SAVING * tokens


def _sharing(lengths: Tensor, prompts: RowPrompts) -> tuple[list[list[int]], Tensor]:
    """Groups of rows whose prompt is worth sharing, those with the most tokens first, and the other
    rows (k,)."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(prompts.groups.tolist()):
        members.setdefault(group, []).append(row)
    sizes = lengths.tolist()
    shared = prompts.tokens.tolist()
    groups = [
        rows
        for rows in members.values()
        if sharing_pays(shared[rows[0]], len(rows), sum(sizes[row] for row in rows))
    ]
    groups.sort(key=lambda rows: -sum(sizes[row] for row in rows))
    together = {row for rows in groups for row in rows}
    return groups, torch.tensor(
        [row for row in range(len(sizes)) if row not in together], dtype=torch.int64
    )


class _Filling:
    """Fills parts of a limited capacity with groups of rows that share their prompt, one after
    another."""

    def __init__(self, lengths: Tensor, prompts: RowPrompts):
        self.prompt: list[int] = prompts.tokens.tolist()
        self.own: list[int] = (lengths - prompts.tokens).tolist()  # tokens after the prompt

    def cost(self, row: int, is_first: bool) -> int:
        """Tokens that a row adds to a part, as the first one of its prompt or not."""
        return self.own[row] + (self.prompt[row] if is_first else self.prompt[row] // COPIED)

    def parts(
        self, groups: list[list[int]], capacity: int, divide: bool = False
    ) -> list[list[int]]:
        """Rows of each part of `capacity`, none empty. A row above the capacity is a part by
        itself. `divide` every group that does not fit into what is left of a part; else only those
        that do not fit into a part at all."""
        parts: list[list[int]] = []
        room = 0
        for rows in groups:
            whole = sum(self.cost(row, row == rows[0]) for row in rows)
            if not divide and room < whole <= capacity:
                room = 0  # begin the next part
            is_first = True
            for row in rows:
                if self.cost(row, is_first) > room:
                    parts.append([])
                    room, is_first = capacity, True
                parts[-1].append(row)
                room -= self.cost(row, is_first)
                is_first = False
        return parts
