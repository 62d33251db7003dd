"""Divide rows of uneven lengths among ranks and into micro-batches, and lay them end to end as one
packed row, in which rows that begin alike hold their common beginning once.

Responses to one prompt become `[prompt | response 1 | response 2 | ...]`. The first row of a group
is whole; the others keep the tokens after the common beginning, with the positions that they have
in their own rows, and attend to the beginning of the first. The outputs are those of separate rows,
and the gradients of all responses flow into one prompt. So responses to one prompt stay together in
a micro-batch, and their prompt counts once.
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
from dschat_ppo.types import Model, Rollout, row_sequences

LEAST_TOKENS = 8  # shorter beginnings (a BOS, a role's name) save less than an attention call costs
LEAST_SAVING = 0.05  # share of the tokens that a micro-batch must save, else its rows stay separate


class VarlenSegments(NamedTuple):
    """Segments of a packed row for variable-length attention."""

    query_bounds: (
        Tensor  # (segments + 1,) int32, where those of each segment begin, and the last end
    )
    key_bounds: Tensor  # likewise
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
        """The segments for variable-length attention on `device`: each one's keys are the columns
        that it sees before its own, and its own."""
        if device not in self._varlen:
            self._varlen[device] = self._build_varlen(device)
        return self._varlen[device]

    def _build_varlen(self, device: torch.device) -> VarlenSegments:
        """`varlen`, computed on the host and copied to `device` at once."""
        query_bounds = torch.tensor([0, *self.lengths]).cumsum(0)
        most_queries = max(self.lengths)
        if self.seen is None:
            bounds = query_bounds.int().to(device)
            return VarlenSegments(bounds, bounds, most_queries, most_queries, None)
        key_columns = []
        key_counts = []
        for start, end, first_seen, end_seen in self._columns:
            key_columns += [torch.arange(first_seen, end_seen), torch.arange(start, end)]
            key_counts.append(end_seen - first_seen + end - start)
        key_bounds = torch.tensor([0, *key_counts]).cumsum(0)
        query_bounds, key_bounds, columns = in_one_copy(
            [query_bounds, key_bounds, torch.cat(key_columns)], device
        )
        return VarlenSegments(
            query_bounds.int(), key_bounds.int(), most_queries, max(key_counts), columns
        )

    @cached_property
    def _columns(self) -> list[tuple[int, int, int, int]]:
        """For each segment where its columns start and end, and where those that it sees do."""
        columns = []
        start = 0
        for segment, length in enumerate(self.lengths):
            first_seen = 0
            end_seen = 0
            if self.seen is not None:
                first_seen, end_seen = self.seen[segment]
            columns.append((start, start + length, first_seen, end_seen))
            start += length
        return columns

    @cached_property
    def most_keys(self) -> int:
        """The most keys that a query sees if no window hides any."""
        return max(
            end - start + end_seen - first_seen
            for start, end, first_seen, end_seen in self._columns
        )

    @cached_property
    def table(self) -> Tensor:
        """(segments, 4) int64: `_columns`, for kernels on a CPU."""
        return torch.tensor(self._columns)

    @cached_property
    def groups(self) -> Tensor:
        """(groups + 1,) int64: the first segment of each group, and the number of segments. No
        segment sees another group."""
        # from the last group to the first; `needed`: the first column that later segments see
        first_segments = [len(self.lengths)]
        needed = sum(self.lengths)
        for segment in reversed(range(len(self.lengths))):
            start, _, first_seen, end_seen = self._columns[segment]
            if first_seen < end_seen:
                needed = min(needed, first_seen)
            if needed >= start:
                first_segments.append(segment)
        return torch.tensor(first_segments[::-1])


@dataclass(frozen=True)
class PackedLayout:
    """Right-padded rows (B, T) as one packed row of N tokens."""

    slots: Tensor  # (N,) int64, where each packed token is in the rows, flattened to (B x T)
    positions: Tensor  # (N,) int64, its column there
    # (B, T) int64, where each token of a row is in the packed row; after a row's end any valid
    # offset
    offsets: Tensor
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


@dataclass(frozen=True)
class PaddedContexts:
    """What n rows with contexts take where sequences stay padded: `counts` (n,) int64, the contexts
    of each row; `longest` (n,) int64, the tokens of its longest one."""

    counts: Tensor
    longest: Tensor

    def at(self, index: Tensor) -> PaddedContexts:
        """Those of the rows at `index`."""
        return PaddedContexts(self.counts[index], self.longest[index])


def padded_contexts(rows: Rollout) -> PaddedContexts | None:
    """Those of the rows; None if they have no contexts."""
    if rows.contexts is None:
        return None
    sequences = row_sequences(rows)
    counts = sequences.rows.bincount()
    longest = torch.zeros_like(counts)
    longest = longest.scatter_reduce(0, sequences.rows, sequences.lengths, "amax")
    return PaddedContexts(counts, longest)


def lay_out(keys: Tensor, lengths: Tensor, packs: bool, shares: bool) -> PackedLayout | None:
    """Lay rows end to end, if that saves enough. The host computes the layout.

    Args:
        keys: (B, T) int64, right-padded, on the host if rows may be packed: the ids, or what else
            tells tokens apart (`compared_keys`).
        lengths: (B,) int64, all above 0, there too.
        packs: pack rows that differ in length.
        shares: pack rows that begin alike, and hold their common beginnings once.

    Returns:
        The packed row; None if rows stay padded.
    """
    if not packs and not shares:
        return None
    width = keys.shape[1]
    order, leaders, shared = _shared_tokens(keys, lengths, shares)
    shares_any = bool(shared.any())
    if not shares_any and not (packs and are_uneven(lengths)):
        return None

    columns = torch.arange(width)
    is_left_out = columns < shared.unsqueeze(1)  # (B, T)
    is_token = columns < lengths.unsqueeze(1)
    is_packed = (is_token & ~is_left_out)[order]  # (B, T) in the order of the packed row
    offsets = torch.empty(is_packed.shape, dtype=torch.int64)
    offsets[order] = is_packed.flatten().cumsum(0).view(is_packed.shape) - 1
    offsets = torch.where(is_left_out, offsets[leaders], offsets)
    slots = (order.unsqueeze(1) * width + columns)[is_packed]  # (N,)

    starts = dict[int, int]()  # by row: where its tokens begin in the packed row
    segment_lengths = []
    seen = []
    end = 0
    rows = torch.stack([order, leaders[order], shared[order], lengths[order]], dim=1)
    for row, leader, left_out, length in rows.tolist():
        starts[row] = end
        packed_tokens = length - left_out
        if packed_tokens == 0:  # the row is the beginning of another
            continue
        segment_lengths.append(packed_tokens)
        seen.append((starts[leader], starts[leader] + left_out))
        end += packed_tokens
    segments = Segments(segment_lengths)
    if shares_any:
        segments = Segments(segment_lengths, seen)
    return PackedLayout(slots, slots % width, offsets, segments)


def _shared_tokens(keys: Tensor, lengths: Tensor, shares: bool) -> tuple[Tensor, Tensor, Tensor]:
    """In which order to pack rows, and what they leave out: (B,) int64 each. Row i leaves its first
    `shared[i]` tokens to row `leaders[i]`: all 0 unless `shares` is True and that saves enough.

    Returns:
        order, leaders and shared.
    """
    row_indices = torch.arange(len(lengths))
    if shares and len(lengths) > 1:
        order, prompts = common_beginnings(keys, lengths)
        saved = torch.where(prompts.groups == row_indices, 0, prompts.tokens)
        if int(saved.sum()) >= LEAST_SAVING * int(lengths.sum()):
            return torch.tensor(order), prompts.groups, saved
    return row_indices, row_indices, torch.zeros_like(row_indices)


def are_uneven(lengths: Tensor) -> bool:
    """Whether rows differ in length (B,), so that packing saves padding."""
    return bool(lengths.min() < lengths.max())


def in_one_copy(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """int64 tensors, all on one device, on `device`."""
    if all(tensor.device == device for tensor in tensors):
        return tensors
    joined = torch.cat([tensor.flatten() for tensor in tensors]).to(device)
    chunks = joined.split([tensor.numel() for tensor in tensors])
    return [chunk.view(tensor.shape) for chunk, tensor in zip(chunks, tensors, strict=True)]


def common_beginnings(keys: Tensor, lengths: Tensor) -> tuple[list[int], RowPrompts]:
    """Group rows whose first tokens are equal, such that the fewest tokens are left if each group
    holds its common beginning once.

    Args:
        keys: (B, T) int64, right-padded: the ids, or what else tells tokens apart
            (`compared_keys`), such as those of images, which have equal ids.
        lengths: (B,) int64, above 0.

    Returns:
        All row indices, group after group; and for each row the first row of its group, and the
        tokens that all rows of its group have in common (0 in a group of one).
    """
    ids = keys.cpu()
    sizes = lengths.cpu()
    # rows that begin alike are neighbours in the order of their bytes
    row_bytes = [
        row[:size].numpy().tobytes() for row, size in zip(ids, sizes.tolist(), strict=True)
    ]
    order = sorted(range(len(row_bytes)), key=row_bytes.__getitem__)
    is_equal = ids[order[1:]] == ids[order[:-1]]
    equal_tokens = is_equal.long().cumprod(dim=1).sum(dim=1)  # (B - 1,)
    shorter = torch.minimum(sizes[order[1:]], sizes[order[:-1]])
    common = torch.minimum(equal_tokens, shorter).numpy()
    begin = _group_starts(common)

    leaders = [0] * len(order)
    shared = [0] * len(order)
    end = len(order)
    while end > 0:
        start = begin[end]
        shared_tokens = min(common[start : end - 1].tolist(), default=0)
        for row in order[start:end]:
            leaders[row] = order[start]
            shared[row] = shared_tokens
        end = start
    groups = torch.tensor(leaders, device=lengths.device)
    return order, RowPrompts(groups, torch.tensor(shared, device=lengths.device))


def _group_starts(common: np.ndarray) -> list[int]:
    """Divide B sorted rows into groups of neighbours, each of which saves its common beginning in
    all rows but the first, such that the most tokens are saved. `common` (B - 1,): tokens that each
    row has in common with the next.

    Returns:
        (B + 1,): at `end` the start of the last group if only the rows before `end` are divided. Of
        equal choices the latest counts.
    """
    rows = len(common) + 1
    saved = np.zeros(rows + 1, dtype=np.int64)  # at `end`: the most tokens of the rows before it
    begin = [0, *range(rows)]
    for end in range(2, rows + 1):
        # by a last group that starts at end - 2, end - 3, ...
        shared = np.minimum.accumulate(common[end - 2 :: -1])
        shared = shared[shared >= LEAST_TOKENS]
        saved_before = saved[end - 1 - len(shared) : end - 1][::-1]
        totals = saved_before + np.arange(1, len(shared) + 1) * shared
        saved[end] = max(saved[end - 1], totals.max(initial=0))
        if saved[end] > saved[end - 1]:
            begin[end] = end - 2 - int(totals.argmax())
    return begin


# Each response but the first copies the keys and values of its prompt, which take about this
# fraction of the memory that all activations of the same tokens take.
COPIED = 8


def share_prompts(*engines: Model | None) -> bool:
    """Whether all of these models that are not None run the prompt of several rows once."""
    models: list[Any] = [unwrap(engine) for engine in engines if engine is not None]
    return all(model.layout.shares for model in models)


def pack_rows(*engines: Model | None) -> bool:
    """Whether all of these models that are not None run rows that differ in length without
    padding."""
    models: list[Any] = [unwrap(engine) for engine in engines if engine is not None]
    return all(model.layout.packed for model in models)


def split_by_tokens(
    lengths: Tensor,
    budget: int,
    prompts: RowPrompts | None = None,
    contexts: PaddedContexts | None = None,
) -> list[Tensor]:
    """Divide rows into micro-batches with `rows x longest <= budget`, longest rows first; a longer
    row is one by itself. Rows that share their prompt come first, in micro-batches without padding,
    which hold at most `budget` tokens and copies of prompts.

    Args:
        lengths: (n,) int64, tokens of each row.
        budget: tokens of a micro-batch.
        prompts: of the rows, for models that share them; None: each row holds its own.
        contexts: of the rows, for models that pad them: in place of rows, contexts are counted, and
            `longest` is that of a context. None: each row is one sequence.

    Returns:
        The row indices of each micro-batch; each of 0 .. n-1 is in one.
    """
    micro_batches = []
    rows = torch.arange(len(lengths))
    if prompts is not None:
        groups, rows = _sharing(lengths, prompts)
        for row_indices in _Filling(lengths, prompts).fill(groups, budget):
            micro_batches.append(torch.tensor(row_indices, device=lengths.device))
    rows = rows.to(lengths.device)
    if contexts is not None:
        lengths = contexts.longest
    order = rows[torch.argsort(lengths[rows], descending=True, stable=True)]
    ordered = lengths[order].tolist()
    counts = [1] * len(ordered)
    if contexts is not None:
        counts = contexts.counts[order].tolist()
    start = 0
    while start < len(ordered):
        most_sequences = budget // max(1, ordered[start])
        end = start + 1
        sequences = counts[start]
        while end < len(ordered) and sequences + counts[end] <= most_sequences:
            sequences += counts[end]
            end += 1
        micro_batches.append(order[start:end])
        start = end
    return micro_batches


def even_passes(
    lengths: Tensor,
    budget: int,
    prompts: RowPrompts | None = None,
    contexts: PaddedContexts | None = None,
) -> tuple[list[Tensor], int]:
    """`split_by_tokens`, with the last micro-batch repeated so that all ranks have as many, and how
    many are not repeated."""
    micro_batches = split_by_tokens(lengths, budget, prompts, contexts)
    count = len(micro_batches)
    passes = int(dist.all_reduce(torch.tensor(count, device=lengths.device), "max"))
    return micro_batches + (passes - count) * micro_batches[-1:], count


def deal(lengths: Tensor, ranks: int, prompts: RowPrompts | None = None) -> list[Tensor]:
    """Row indices for each rank, with nearly the same number of tokens.

    Rows, a multiple of `ranks`, are dealt from the longest to the shortest, alternately forwards
    and backwards over the ranks, the same number to each. If rows share prompts, they are divided
    group after group instead, such that the rank with the most tokens has as few as possible; then
    a rank may have no rows.
    """
    groups: list[list[int]] = []
    if prompts is not None:
        groups, separate_rows = _sharing(lengths, prompts)
    if not groups or prompts is None:
        rounds = torch.argsort(lengths, descending=True, stable=True).view(-1, ranks)
        rounds[1::2] = rounds[1::2].flip(1)
        return list(rounds.unbind(dim=1))
    filling = _Filling(lengths, prompts)
    groups += [[row] for row in separate_rows.tolist()]
    # bisect for the smallest capacity with which the ranks hold all rows
    low = int(lengths.max())
    high = int(lengths.sum())
    while low < high:
        middle = (low + high) // 2
        if len(filling.fill(groups, middle, divide=True)) <= ranks:
            high = middle
        else:
            low = middle + 1
    rank_rows = filling.fill(groups, low, divide=True)
    rank_rows += (ranks - len(rank_rows)) * [[]]
    return [torch.tensor(rows, dtype=torch.int64, device=lengths.device) for rows in rank_rows]


def sharing_pays(prompt: int, responses: int, tokens: int) -> bool:
    """Whether to run the `prompt` tokens of so many responses once. `tokens`: of their rows, each
    with its prompt."""
    return prompt >= LEAST_TOKENS and (responses - 1) * prompt >= 2 * LEAST_SAVING * tokens


def _sharing(lengths: Tensor, prompts: RowPrompts) -> tuple[list[list[int]], Tensor]:
    """Groups of rows whose prompt is worth sharing, those with the most tokens first, and the other
    rows (k,)."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(prompts.groups.tolist()):
        members.setdefault(group, []).append(row)
    sizes = lengths.tolist()
    prompt_tokens = prompts.tokens.tolist()

    def tokens_of(rows: list[int]) -> int:
        return sum(sizes[row] for row in rows)

    groups = [
        rows
        for rows in members.values()
        if sharing_pays(prompt_tokens[rows[0]], len(rows), tokens_of(rows))
    ]
    groups.sort(key=lambda rows: -tokens_of(rows))
    sharing_rows = set(itertools.chain.from_iterable(groups))
    separate_rows = [row for row in range(len(sizes)) if row not in sharing_rows]
    return groups, torch.tensor(separate_rows, dtype=torch.int64)


class _Filling:
    """Fills bins of a limited capacity (micro-batches, or ranks) with groups of rows that share
    their prompt, one group after another."""

    def __init__(self, lengths: Tensor, prompts: RowPrompts):
        self.prompt: list[int] = prompts.tokens.tolist()
        self.after_prompt: list[int] = (lengths - prompts.tokens).tolist()

    def cost(self, row: int, is_first: bool) -> int:
        """Tokens that a row adds to a bin, as the first one of its prompt or not."""
        if is_first:
            return self.after_prompt[row] + self.prompt[row]
        return self.after_prompt[row] + self.prompt[row] // COPIED

    def fill(self, groups: list[list[int]], capacity: int, divide: bool = False) -> list[list[int]]:
        """Distribute the rows of `groups` over bins.

        Args:
            groups: rows that share their prompt.
            capacity: tokens of a bin. A row above it has a bin by itself.
            divide: divide every group that does not fit into what is left of a bin; else only those
                that do not fit into a bin at all.

        Returns:
            The rows of each bin, none empty.
        """
        bins: list[list[int]] = []
        room = 0
        for rows in groups:
            group_cost = sum(self.cost(row, row == rows[0]) for row in rows)
            if not divide and room < group_cost <= capacity:
                room = 0  # begin the next bin
            is_first = True
            for row in rows:
                if self.cost(row, is_first) > room:
                    bins.append([])
                    room = capacity
                    is_first = True
                bins[-1].append(row)
                room -= self.cost(row, is_first)
                is_first = False
        return bins
