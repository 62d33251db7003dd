"""Ulysses sequence parallelism (Jacobs et al. 2023): ranks that share their rows each hold a part
of the columns.

All layers but attention treat each token by itself. Attention exchanges columns for heads: each
rank receives all columns of its share of the heads, attends, and gives the columns back. The
outputs of the model are gathered, so that every rank computes the loss of whole rows. The backward
pass of a rank keeps the gradient of the rank's columns, and the gradients of all ranks add up to
that of the rows.

DeepSpeed's `UlyssesSPAttentionHF` fixes the number of rows, knows neither packed rows nor sliding
windows, and needs `position_ids` in the call of every attention, which not every architecture
passes; hence the exchange here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from dschat_ppo.common.dist import rank_in_row, ranks_of_row, row_group

OF_HEADS = ("s_aux",)  # attention options with one entry for each head


def columns_of_rank(rows: Tensor) -> Tensor:
    """(b, ranks x n, ...) -> (b, n, ...): the columns of this rank."""
    return rows.chunk(ranks_of_row(), dim=1)[rank_in_row()]


def gathered_columns(shard: Tensor) -> Tensor:
    """(b, n, ...) -> (b, ranks x n, ...): those of all ranks; the backward pass keeps this rank's.
    Collective."""
    columns: Tensor = _GatherColumns.apply(shard)
    return columns


class _GatherColumns(torch.autograd.Function):
    """Every rank computes the same loss of the gathered columns: the gradient of its shard needs no
    sum over ranks."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        shards = [torch.empty_like(shard) for _ in range(ranks_of_row())]
        torch_dist.all_gather(shards, shard.contiguous(), group=row_group())
        return torch.cat(shards, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return columns_of_rank(grad).contiguous()


class _Exchange(torch.autograd.Function):
    """Give each rank its share of dimension `divided`, and join what all ranks have along dimension
    `joined`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, divided: int, joined: int) -> Tensor:
        ctx.divided = divided
        ctx.joined = joined
        return _exchanged(value, divided, joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grad, ctx.joined, ctx.divided), None, None


def _exchanged(value: Tensor, divided: int, joined: int) -> Tensor:
    """The chunks that all ranks send to this one: each rank sends its chunk of dimension `divided`
    to each other rank, and joins what it receives along dimension `joined`."""
    sent = torch.stack(value.chunk(ranks_of_row(), dim=divided))  # (ranks, ...)
    received = torch.empty_like(sent)
    torch_dist.all_to_all_single(received, sent, group=row_group())
    return torch.cat(received.unbind(), dim=joined)


@contextmanager
def rotary_of_whole_rows(model: nn.Module, positions: Tensor) -> Iterator[None]:
    """Give rotary embeddings the `positions` (b, ranks x n) of whole rows, and keep this rank's
    part of their outputs. Some of them (longrope, dynamic) choose their frequencies by the largest
    position."""

    def see_all(
        _module: nn.Module, arguments: Any, named: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if "position_ids" in named:
            return arguments, {**named, "position_ids": positions}
        return (arguments[0], positions, *arguments[2:]), named

    def keep_columns_of_rank(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        return torch.utils._pytree.tree_map(columns_of_rank, output)

    rotary = [module for module in model.modules() if hasattr(module, "rope_type")]
    hooks = [module.register_forward_pre_hook(see_all, with_kwargs=True) for module in rotary]
    hooks += [module.register_forward_hook(keep_columns_of_rank) for module in rotary]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def exchanged(value: Tensor) -> Tensor:
    """(b, heads, n, d) of this rank's n columns -> (b, heads / ranks, ranks x n, d) of its heads;
    and (b, ranks x n, heads / ranks, d) of its heads -> (b, n, heads, d) of its columns.
    Collective."""
    received: Tensor = _Exchange.apply(value, 1, 2)
    return received


def heads_of_rank(
    module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
    """The arguments with which an attention function computes the heads of this rank over all
    columns. Collective.

    Key and value heads that the ranks do not divide are repeated first. With `lcm(key heads,
    ranks)` of them, each rank has those that its queries read, and the fewest.

    Args:
        module: the layer.
        query: (b, heads, n, d) of this rank's n columns; `key` and `value` likewise.
        options: of transformers' attention functions.

    Returns:
        The attributes of the layer that the function reads; `exchanged` query, key and value; the
        options, with this rank's share of those that have an entry for each head.
    """
    repeats = math.lcm(key.shape[1], ranks_of_row()) // key.shape[1]
    if repeats > 1:
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    query = exchanged(query)
    key = exchanged(key)
    value = exchanged(value)
    layer = SimpleNamespace(
        num_key_value_groups=query.shape[1] // key.shape[1],
        is_causal=getattr(module, "is_causal", True),
        training=module.training,
    )
    of_heads = {
        name: options[name].chunk(ranks_of_row())[rank_in_row()]
        for name in OF_HEADS
        if options.get(name) is not None
    }
    return layer, query, key, value, {**options, **of_heads}
