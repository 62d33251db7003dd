"""Causal attention in bf16 on a CPU: products of whole blocks of logits, and a backward pass that computes them again.

PyTorch's fused kernel for CPUs works on small tiles, and takes about twice as long for up to `MOST_KEYS` keys
(docs/lab-notes.md). Here one product makes the fp32 logits of up to `QUERIES` queries of all heads, which stay in the
processor's cache.
The backward pass is that of FlashAttention (Dao et al. 2022, appendix B.2):

    P = softmax(scale Q K^T)    dV = P^T dO    dS = P * (dO V^T - rowsum(dO * O))
    dQ = scale dS K             dK = scale dS^T Q
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

QUERIES = 128  # of a block, about
LOGITS = 2**19  # of a block, about: 2 MiB
MOST_KEYS = 768  # with more, the fused kernel is as fast or faster


@dataclass(frozen=True)
class Part:
    """Columns of a row that attend to themselves.

    Attributes:
        own: the columns.
        seen: columns that all of them see too, as if they were right before them; empty: none.
    """

    own: slice
    seen: slice

    def visible(self, values: Tensor) -> Tensor:
        """(b, heads, T, d) -> (b, heads, seen + own columns, d)."""
        own = values[:, :, self.own]
        return torch.cat([values[:, :, self.seen], own], dim=2) if self.seen.stop > self.seen.start else own

    def add(self, total: Tensor, rows: slice, first: int, values: Tensor) -> None:
        """Add `values` (rows, heads, n, d), of the n visible columns from `first` on, to `total` (b, heads, T, d)."""
        seen = self.seen.stop - self.seen.start
        before, start = max(seen - first, 0), self.own.start + max(first - seen, 0)
        if before:
            total[rows, :, self.seen.start + first : self.seen.stop] += values[:, :, :before]
        total[rows, :, start : start + values.shape[2] - before] += values[:, :, before:]


@dataclass(frozen=True)
class _Block:
    """Some queries of some rows, and the keys that they see.

    Attributes:
        rows: of the batch.
        queries: columns among those of the part.
        keys: columns among the visible ones; the last is the own key of the last query.
    """

    rows: slice
    queries: slice
    keys: slice

    @classmethod
    def all(cls, rows: int, heads: int, queries: int, keys: int, window: int | None) -> Iterator[_Block]:
        """The blocks of `queries` columns that see `keys` columns, which end with their own."""
        most = min(QUERIES, max(16, LOGITS // (heads * keys)))
        size = -(-queries // max(1, round(queries / most)))  # blocks of nearly the same size
        for start in range(0, queries, size):
            end = min(start + size, queries)
            last = keys - queries + end
            first = 0 if window is None else max(0, last - (end - start) - window + 1)
            step = max(1, LOGITS // (heads * (end - start) * (last - first)))
            for row in range(0, rows, step):
                yield cls(slice(row, min(row + step, rows)), slice(start, end), slice(first, last))


@lru_cache(maxsize=64)
def _hidden(queries: int, keys: int, window: int | None) -> Tensor:
    """(queries, keys) fp32: 0 where a query sees a key, else -inf; the last key is the last query's own."""
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if window is not None:
        seen = seen.triu(keys - queries + 1 - window)
    return torch.zeros(queries, keys).masked_fill_(~seen, -torch.inf)


def _folded(values: Tensor, rows: slice, columns: slice, key_heads: int) -> Tensor:
    """(b, heads, T, d) -> (r x key heads, group x n, d): the heads that share keys become rows of one matrix."""
    part = values[rows, :, columns]
    return part.reshape(len(part) * key_heads, -1, part.shape[-1])


def _weights(query: Tensor, key: Tensor, columns: int, window: int | None) -> Tensor:
    """Attention weights (r, group x n, m) fp32 of scaled queries (r, group x n, d) fp32, for keys (r, m, d) fp32."""
    logits = torch.bmm(query, key.transpose(1, 2))
    by_head = logits.unflatten(1, (-1, columns))
    if window is None:  # all but the last keys are before every query
        by_head[..., -columns:].add_(_hidden(columns, columns, None))
    else:
        by_head.add_(_hidden(columns, logits.shape[-1], window))
    return torch.softmax(logits, dim=-1)


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: list[Part], window: int | None, scale: float
    ) -> Tensor:
        (rows, heads, length, _), key_heads = query.shape, key.shape[1]
        output = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
        for part in parts:
            k, v, q, found = part.visible(key), part.visible(value), query[:, :, part.own], output[:, :, part.own]
            for block in _Block.all(rows, heads, q.shape[2], k.shape[2], window):
                scaled = _folded(q, block.rows, block.queries, key_heads).float().mul_(scale)
                keys = _folded(k, block.rows, block.keys, key_heads).float()
                weights = _weights(scaled, keys, block.queries.stop - block.queries.start, window).to(value.dtype)
                answer = torch.bmm(weights, _folded(v, block.rows, block.keys, key_heads))
                found[block.rows, :, block.queries] = answer.view_as(found[block.rows, :, block.queries])
        ctx.save_for_backward(query, key, value, output)
        ctx.parts, ctx.window, ctx.scale = parts, window, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output = ctx.saved_tensors
        (rows, heads, _, _), key_heads = query.shape, key.shape[1]
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
        for part in ctx.parts:
            k, v = part.visible(key), part.visible(value)
            q, o, do, dq = (x[:, :, part.own] for x in (query, output, gradient, of_query))
            for block in _Block.all(rows, heads, q.shape[2], k.shape[2], ctx.window):
                q_, o_, do_ = (_folded(x, block.rows, block.queries, key_heads) for x in (q, o, do))
                k_, v_ = (_folded(x, block.rows, block.keys, key_heads) for x in (k, v))
                columns = block.queries.stop - block.queries.start
                weights = _weights(q_.float().mul_(ctx.scale), k_.float(), columns, ctx.window)
                inner = do_.float().mul_(o_).sum(dim=-1, keepdim=True)
                of_logits = torch.bmm(do_, v_.transpose(1, 2)).float().sub_(inner).mul_(weights).to(query.dtype)
                found = torch.bmm(of_logits, k_).mul_(ctx.scale)
                dq[block.rows, :, block.queries] = found.view_as(q[block.rows, :, block.queries])
                for total, left, right in ((of_key, of_logits, q_), (of_value, weights.to(value.dtype), do_)):
                    found = torch.bmm(left.transpose(1, 2), right).unflatten(0, (-1, key_heads))
                    part.add(total, block.rows, block.keys.start, found)
        return of_query, of_key.mul_(ctx.scale).to(key.dtype), of_value.to(value.dtype), None, None, None


def blockwise_attention(
    query: Tensor, key: Tensor, value: Tensor, parts: list[Part], window: int | None = None,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention inside each part of the rows.

    Args:
        query: (b, heads, T, d) bf16 on a CPU.
        key: (b, key heads, T, d), and `value` likewise, of another d or of the same; key heads divide the heads.
        parts: of the T columns, the same in each row; together they are all columns.
        window: how many keys a query sees, its own among them; None: all.
        scale: of the logits; None: d ** -0.5.

    Returns:
        (b, heads, T, d of the values), laid out in memory as (b, T, heads, d).
    """
    found: Tensor = _BlockwiseAttention.apply(
        query, key, value, parts, window, query.shape[-1] ** -0.5 if scale is None else scale
    )
    return found
