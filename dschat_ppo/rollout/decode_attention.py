"""Attention of one new token of each row over the KV cache, by matrix products and a softmax."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from dschat_ppo.rollout.attention_metadata import DecodeMetadata, PooledMetadata, SharedPrefix


def decode_mask(batch: DecodeMetadata | PooledMetadata, window: int | None) -> Tensor:
    """(count, 1, slots) fp32: -inf on empty slots, later tokens and tokens beyond the window; the prefix comes last."""
    slots = batch.newest.unsqueeze(1)
    distance = slots - torch.arange(batch.length, device=slots.device)
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if batch.prefix is not None:
        lengths = batch.prefix.lengths.unsqueeze(1)
        place = torch.arange(batch.prefix.cache.capacity, device=slots.device)
        in_prefix = place < lengths
        if window is not None:
            in_prefix &= lengths + slots - place < window
        visible = torch.cat([visible, in_prefix], dim=1)
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, float("-inf")).unsqueeze(1)


def decode_attention(
    batch: DecodeMetadata | PooledMetadata, layer: int, query: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """(count, heads, 1, head_dim) -> (count, heads, head_dim). The query heads of one key head are the rows of one
    matrix product, so keys are read once and never expanded. A product over contiguous keys runs at memory speed;
    attention kernels with one query do not."""
    count, heads, _, width = query.shape
    keys, values = batch.read(layer)
    query, scale = scaled(query, scale)
    folded = query.reshape(count * keys.shape[1], -1, width)  # (count * kv_heads, heads / kv_heads, d)
    scores = _products(folded, keys.flatten(0, 1)).view(count, heads, -1)
    if batch.prefix is not None:
        scores = torch.cat([scores, prefix_scores(batch.prefix, layer, query)], dim=2)
    scores = scores.float()
    if scale != 1:  # else the scale was a power of two, which is in the query
        scores = scores.mul_(scale)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    weights = torch.softmax(scores.add_(mask), dim=2).to(values.dtype)
    own = weights[:, :, : batch.length].reshape(count * keys.shape[1], -1, batch.length)
    mixed = torch.bmm(own, values.flatten(0, 1)).view(count, heads, -1)
    if batch.prefix is not None:
        mixed += prefix_values(batch.prefix, layer, weights[:, :, batch.length :])
    return mixed


@cache
def _has_wide_products() -> bool:
    """Whether a product of half-precision matrices on a GPU can give fp32 (PyTorch 2.8)."""
    return "dtype" in torch.ops.aten.bmm.overloads() and torch.version.hip is None


def _products(query: Tensor, keys: Tensor) -> Tensor:
    """(n, q, d) and (n, k, d) -> (n, q, k) products; on a GPU in fp32, because bf16 rounds a score of 16 by 0.06."""
    if query.is_cuda and query.dtype != torch.float32 and _has_wide_products():
        return torch.bmm(query, keys.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(query, keys.transpose(1, 2))


def scaled(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The query times the power of two nearest to `scale`, which is exact, and the remaining factor of `scale`. This
    keeps products in half precision in range."""
    power = 2.0 ** round(math.log2(scale))
    return query * power, scale / power


def prefix_scores(prefix: SharedPrefix, layer: int, query: Tensor) -> Tensor:
    """(n, heads, 1, d) -> (n, heads, P): one product for all rows of a prompt."""
    keys = prefix.cache.keys[layer]
    prompts, kv_heads, length, width = keys.shape
    grid = query.squeeze(2).unflatten(1, (kv_heads, -1))[prefix.grid]  # prompts, row, kv_heads, group, d
    folded = grid.transpose(1, 2).reshape(prompts * kv_heads, -1, width)
    scores = _products(folded, keys.flatten(0, 1))
    cells = scores.view(prompts, kv_heads, prefix.grid.shape[1], -1, length).transpose(1, 2)
    return cells.reshape(-1, query.shape[1], length)[prefix.cells]


def prefix_values(prefix: SharedPrefix, layer: int, weights: Tensor) -> Tensor:
    """(n, heads, P) -> (n, heads, d)."""
    values = prefix.cache.values[layer]
    prompts, kv_heads, length, width = values.shape
    grid = weights.unflatten(1, (kv_heads, -1))[prefix.grid]  # prompts, row, kv_heads, group, P
    folded = grid.transpose(1, 2).reshape(prompts * kv_heads, -1, length)
    mixed = torch.bmm(folded, values.flatten(0, 1))
    cells = mixed.view(prompts, kv_heads, prefix.grid.shape[1], -1, width).transpose(1, 2)
    return cells.reshape(-1, weights.shape[1], width)[prefix.cells]
