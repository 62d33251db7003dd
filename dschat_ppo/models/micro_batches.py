"""Divide rows of uneven lengths among ranks and into micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat_ppo.common import dist


def split_by_tokens(lengths: Tensor, budget: int) -> list[Tensor]:
    """Row numbers of micro-batches, longest rows first, each micro-batch with `rows x longest <= budget`.

    A row longer than the budget is a micro-batch by itself.

    Args:
        lengths: (n,) int64, tokens of each row.
        budget: largest number of tokens of a micro-batch, padding included.

    Returns:
        Parts that together contain each of 0 .. n-1 once.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    parts, start, ordered = [], 0, lengths[order].tolist()
    while start < len(ordered):
        size = max(1, budget // max(1, ordered[start]))
        parts.append(order[start : start + size])
        start += size
    return parts


def even_passes(lengths: Tensor, budget: int) -> tuple[list[Tensor], int]:
    """`split_by_tokens`, with the last part repeated so that every rank has the same number of parts. Collective.

    Returns:
        (parts, number of them without the repetitions).
    """
    parts = split_by_tokens(lengths, budget)
    passes = int(dist.all_reduce(torch.tensor(len(parts), device=lengths.device), "max"))
    return parts + (passes - len(parts)) * parts[-1:], len(parts)


def deal(lengths: Tensor, ranks: int) -> list[Tensor]:
    """Row numbers for each rank: the same number of rows and nearly the same number of tokens.

    Rows are dealt from the longest to the shortest, alternately forwards and backwards over the ranks.

    Args:
        lengths: (n,) int64, tokens of each row; n a multiple of `ranks`.
        ranks: number of ranks.
    """
    rounds = torch.argsort(lengths, descending=True, stable=True).view(-1, ranks)
    rounds[1::2] = rounds[1::2].flip(1)
    return list(rounds.unbind(dim=1))
