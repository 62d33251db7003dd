"""Causal attention in bf16 on a CPU by compiled kernels, with a backward pass that computes the weights again.

PyTorch's fused kernel for CPUs works on small tiles, and takes longer for up to `MOST_KEYS` keys (docs/lab-notes.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dschat_ppo.cpu_kernels import operations

MOST_KEYS = 4096  # with more, PyTorch's kernel is as fast or faster


@dataclass(frozen=True)
class Parts:
    """Parts of a row, each of which attends to itself, and what the kernels need to know of them. `lengths`: of the
    parts, which follow one another, none 0. `seen`: for each part, columns (start, end) of earlier parts that all of
    its tokens see too, as if they were right before them; start = end: none. None: no part sees any."""

    lengths: tuple[int, ...]
    seen: tuple[tuple[int, int], ...] | None = None

    @cached_property
    def _columns(self) -> list[tuple[int, int, int, int]]:
        """Start and end of each part, and of what it sees."""
        ends = list(accumulate(self.lengths))
        seen = self.seen or [(0, 0)] * len(ends)
        return [(end - own, end, *before) for end, own, before in zip(ends, self.lengths, seen, strict=True)]

    @cached_property
    def most_keys(self) -> int:
        """The most keys that a query sees if no window hides any."""
        return max(end - start + last - first for start, end, first, last in self._columns)

    @cached_property
    def table(self) -> Tensor:
        """(parts, 4) int64: the start and the end of each part, and of what it sees."""
        return torch.tensor(self._columns)

    @cached_property
    def groups(self) -> Tensor:
        """(groups + 1,) int64: the first part of each group, and the number of parts. No part sees another group."""
        firsts, needed = [len(self.lengths)], sum(self.lengths)  # needed: the first column that later parts see
        for number, (start, _, first, end) in reversed(list(enumerate(self._columns))):
            needed = min(needed, first) if first < end else needed
            if needed >= start:
                firsts.append(number)
        return torch.tensor(firsts[::-1])


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: Parts, window: int | None, scale: float
    ) -> Tensor:
        output, log_sums = operations.causal_attention(query, key, value, parts.table, window, scale)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.parts, ctx.window, ctx.scale = parts, window, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sums = ctx.saved_tensors
        found = operations.causal_attention_backward(
            query, key, value, output, log_sums, gradient, ctx.parts.table, ctx.parts.groups, ctx.window, ctx.scale
        )
        return *found, None, None, None


def blockwise_attention(
    query: Tensor, key: Tensor, value: Tensor, parts: Parts, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Causal attention inside each part of the rows: (b, heads, T, d of the values), in memory (b, T, heads, d).

    `query` (b, heads, T, d) bf16 on a CPU; `key` (b, key heads, T, d), and `value` likewise, of another d or of the
    same; key heads divide the heads. `parts` together are all T columns. `window`: how many keys a query sees, its own
    among them; None: all. `scale` of the logits; None: d ** -0.5.
    """
    assert sum(parts.lengths) == query.shape[2]
    found: Tensor = _BlockwiseAttention.apply(
        query, key, value, parts, window, query.shape[-1] ** -0.5 if scale is None else scale
    )
    return found
