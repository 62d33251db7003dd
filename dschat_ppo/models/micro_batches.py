"""Divide rows of uneven lengths among ranks and into micro-batches. Models that share prompts (`shared_prompts.py`) run
the prompt of several answers once. So answers to one prompt stay together, and their prompt counts once."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.models.backbone import Layout, unwrap
from dschat_ppo.models.shared_prompts import LEAST_SAVING, LEAST_TOKENS, RowPrompts
from dschat_ppo.types import Model

# Each answer but the first copies the keys and values of its prompt, which take about this fraction of the memory that
# all activations of the same tokens take.
COPIED = 8


def share_prompts(*engines: Model | None) -> bool:
    """Whether all of these models that are not None run the prompt of several rows once."""
    layouts: list[Layout] = [
        getattr(unwrap(engine), "layout", Layout())  # a plain language model has none
        for engine in engines if engine is not None
    ]  # fmt: skip
    return all(layout.shares for layout in layouts)


def split_by_tokens(lengths: Tensor, budget: int, prompts: RowPrompts | None = None) -> list[Tensor]:
    """Row numbers of micro-batches, longest rows first, each micro-batch with `rows x longest <= budget`.

    `lengths` (n,) int64 are the tokens of each row. A row longer than the budget is a micro-batch by itself. Rows that
    share their prompt come first, in micro-batches without padding, which hold at most `budget` tokens and copies of
    prompts. The parts together contain each of 0 .. n-1 once.
    """
    groups, rows = ([], torch.arange(len(lengths))) if prompts is None else _sharing(lengths, prompts)
    parts = []
    if groups and prompts is not None:
        parts = [torch.tensor(part, device=lengths.device) for part in _Filling(lengths, prompts).parts(groups, budget)]
    rows = rows.to(lengths.device)
    order = rows[torch.argsort(lengths[rows], descending=True, stable=True)]
    start, ordered = 0, lengths[order].tolist()
    while start < len(ordered):
        size = max(1, budget // max(1, ordered[start]))
        parts.append(order[start : start + size])
        start += size
    return parts


def even_passes(lengths: Tensor, budget: int, prompts: RowPrompts | None = None) -> tuple[list[Tensor], int]:
    """`split_by_tokens`, with the last part repeated so that every rank has the same number of parts. Collective.
    Returns (parts, number of them without the repetitions)."""
    parts = split_by_tokens(lengths, budget, prompts)
    passes = int(dist.all_reduce(torch.tensor(len(parts), device=lengths.device), "max"))
    return parts + (passes - len(parts)) * parts[-1:], len(parts)


def deal(lengths: Tensor, ranks: int, prompts: RowPrompts | None = None) -> list[Tensor]:
    """Row numbers for each rank, with nearly the same number of tokens.

    Rows, a multiple of `ranks`, are dealt from the longest to the shortest, alternately forwards and backwards over the
    ranks, the same number to each. If rows share prompts, they are divided group after group instead, such that the
    rank with the most tokens has as few as possible; then a rank may have no rows.
    """
    groups, rest = ([], torch.empty(0)) if prompts is None else _sharing(lengths, prompts)
    if not groups or prompts is None:
        rounds = torch.argsort(lengths, descending=True, stable=True).view(-1, ranks)
        rounds[1::2] = rounds[1::2].flip(1)
        return list(rounds.unbind(dim=1))
    filling = _Filling(lengths, prompts)
    groups += [[row] for row in rest.tolist()]
    low, high = int(lengths.max()), int(lengths.sum())
    while low < high:  # bisect for the smallest capacity with which the ranks hold all rows
        middle = (low + high) // 2
        enough = len(filling.parts(groups, middle, divide=True)) <= ranks
        low, high = (low, middle) if enough else (middle + 1, high)
    parts = filling.parts(groups, low, divide=True)
    parts += (ranks - len(parts)) * [[]]
    return [torch.tensor(part, dtype=torch.int64, device=lengths.device) for part in parts]


def sharing_pays(prompt: int, answers: int, tokens: int) -> bool:
    """Whether to run the `prompt` tokens of so many answers once. `tokens`: of their rows, each with its prompt."""
    return prompt >= LEAST_TOKENS and (answers - 1) * prompt >= 2 * LEAST_SAVING * tokens


def _sharing(lengths: Tensor, prompts: RowPrompts) -> tuple[list[list[int]], Tensor]:
    """Groups of rows whose prompt is worth sharing, those with the most tokens first, and the other rows (k,)."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(prompts.groups.tolist()):
        members.setdefault(group, []).append(row)
    sizes, shared = lengths.tolist(), prompts.tokens.tolist()
    groups = [
        rows for rows in members.values()
        if sharing_pays(shared[rows[0]], len(rows), sum(sizes[row] for row in rows))
    ]  # fmt: skip
    groups.sort(key=lambda rows: -sum(sizes[row] for row in rows))
    together = {row for rows in groups for row in rows}
    return groups, torch.tensor([row for row in range(len(sizes)) if row not in together], dtype=torch.int64)


class _Filling:
    """Fills parts of a limited capacity with groups of rows that share their prompt, one after another."""

    def __init__(self, lengths: Tensor, prompts: RowPrompts):
        self.prompt: list[int] = prompts.tokens.tolist()
        self.own: list[int] = (lengths - prompts.tokens).tolist()  # tokens after the prompt

    def cost(self, row: int, is_first: bool) -> int:
        """Tokens that a row adds to a part, as the first one of its prompt or not."""
        return self.own[row] + (self.prompt[row] if is_first else self.prompt[row] // COPIED)

    def parts(self, groups: list[list[int]], capacity: int, divide: bool = False) -> list[list[int]]:
        """Rows of each part of `capacity`, none empty. A row above the capacity is a part by itself. `divide` every
        group that does not fit into what is left of a part; else only those that do not fit into a part at all."""
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
