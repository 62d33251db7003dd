"""Attention for generation: causal over a prefill, or of one new token over the KV cache.

It is registered with transformers' attention interface under the name `dschat_rollout`. transformers has no mask
function for that name, so models build no mask; the metadata of a step says which slots hold tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from dschat_ppo.rollout.kv_cache import KVCache

NAME = "dschat_rollout"


class UnsupportedAttentionError(Exception):
    """The model's attention needs something that this engine does not implement."""


@dataclass
class SharedPrefix:
    """Keys and values of prompts that several rows of a decode batch share.

    `cache` holds one row per prompt. `lengths` (n,) int64 is the prefix length of each row of the batch. `grid`
    (prompts, width) int64 lists the rows of each prompt (any row in unused cells); `cells` (n,) int64 is the index of
    each row in the flattened grid.
    """

    cache: KVCache
    lengths: Tensor
    grid: Tensor
    cells: Tensor


@dataclass
class PrefillMetadata:
    """A prefill: row `source[i]` of the forward pass is written to row `rows[i]` of `cache`; both (m,) int64."""

    cache: KVCache
    rows: Tensor
    source: Tensor


@dataclass
class DecodeMetadata:
    """Rows `first .. first + count - 1` of a decode step; their KV cache is the first `count` rows of `cache`.

    `slots` (count,) int64 is where the new token of each row goes. Attention covers the first `length` slots; a row
    attends to slots up to and including its own. The outputs of `idle` (count,) bool rows are not used.
    """

    first: int
    count: int
    cache: KVCache
    slots: Tensor
    length: int
    prefix: SharedPrefix | None
    idle: Tensor | None = None


class RolloutCache(Cache):
    """Passes new keys and values through to the attention function, which writes them to the KV cache itself."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the same tensors."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are always given explicitly."""
        return 0


class DecodeKernel(Protocol):
    """Attention of decode steps by one kernel; see `FlashDecode`."""

    def begin(self) -> None: ...

    def supports(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float | None
    ) -> bool: ...

    def __call__(
        self, batch: DecodeMetadata, layer: int, query: Tensor, scale: float, window: int | None
    ) -> Tensor: ...


class RolloutAttention:
    """The attention function of one generation.

    `metadata` describes the next forward pass: `PrefillMetadata`, or one `DecodeMetadata` per decode batch. `windows`
    records the sliding window that each layer asks for.

    Args:
        flash: one kernel for decode steps, used in the layers that it supports; None: products and a softmax.
    """

    def __init__(self, flash: DecodeKernel | None = None) -> None:
        self.metadata: PrefillMetadata | list[DecodeMetadata] = []
        self.windows: dict[int, int | None] = {}
        self._flash = flash
        self._flash_layers: set[int] = set()
        self._masks: dict[tuple[int, int | None], Tensor] = {}  # shared by the layers of a forward pass
        self._slot_mappings: dict[tuple[int, int], Tensor] = {}

    def begin(self, metadata: PrefillMetadata | list[DecodeMetadata]) -> None:
        """Set the metadata of the next forward pass."""
        self.metadata = metadata
        self._masks = {}
        self._slot_mappings = {}
        if self._flash is not None:
            self._flash.begin()

    @property
    def reads_all_slots(self) -> bool:
        """Whether a decode step reads all slots up to `length` of its metadata in some layer. Known after a prefill."""
        return len(self._flash_layers) < max(1, len(self.windows))

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Write `key` and `value` (n, kv_heads, L, head_dim) to the cache; attend with `query` (n, heads, L, head_dim).

        Returns:
            ((n, L, heads, head_dim), None).

        Raises:
            UnsupportedAttentionError: sinks, a bias, a mask made by the model, or attention that is not causal.
        """
        sinks = others.get("s_aux") is not None or others.get("position_bias") is not None
        if attention_mask is not None or sinks or not getattr(module, "is_causal", True):
            raise UnsupportedAttentionError(f"{type(module).__name__} needs a mask, a bias or sinks")
        layer: Any = module.layer_idx
        self.windows[layer] = sliding_window
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        if isinstance(self.metadata, PrefillMetadata):
            if self._flash is not None and self._flash.supports(query, key, value, sliding_window, softcap):
                self._flash_layers.add(layer)
            self.metadata.cache.write_prefill(layer, self.metadata.rows, self.metadata.source, key, value)
            return causal_attention(query, key, value, scale, sliding_window, softcap).transpose(1, 2), None
        outputs, heads = [], key.shape[1]
        for number, batch in enumerate(self.metadata):
            rows = slice(batch.first, batch.first + batch.count)
            if (number, heads) not in self._slot_mappings:
                self._slot_mappings[number, heads] = batch.cache.slot_mapping(batch.slots, heads)
            batch.cache.write_decode(layer, self._slot_mappings[number, heads], key[rows], value[rows])
            if self._flash is not None and layer in self._flash_layers and batch.prefix is None:
                outputs.append(self._flash(batch, layer, query[rows], scale, sliding_window))
                continue
            if (number, sliding_window) not in self._masks:
                self._masks[number, sliding_window] = decode_mask(batch, sliding_window)
            mask = self._masks[number, sliding_window]
            outputs.append(decode_attention(batch, layer, query[rows], mask, scale, softcap))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(1), None


def decode_mask(batch: DecodeMetadata, window: int | None) -> Tensor:
    """(count, 1, slots) fp32: -inf on empty slots, later tokens and tokens beyond the window; the prefix comes last."""
    slots = batch.slots.unsqueeze(1)
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
    batch: DecodeMetadata, layer: int, query: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """(count, heads, 1, head_dim) -> (count, heads, head_dim).

    The query heads of one key head are the rows of one matrix product, so keys are read once and never expanded. A
    product over contiguous keys runs at memory speed; attention kernels with one query do not.
    """
    count, heads, _, width = query.shape
    keys = batch.cache.keys[layer][:count, :, : batch.length]
    values = batch.cache.values[layer][:count, :, : batch.length]
    query, scale = _scaled(query, scale)
    folded = query.reshape(count * keys.shape[1], -1, width)  # (count * kv_heads, heads / kv_heads, d)
    scores = _products(folded, keys.flatten(0, 1)).view(count, heads, -1)
    if batch.prefix is not None:
        scores = torch.cat([scores, prefix_scores(batch.prefix, layer, query)], dim=2)
    scores = scores.float().mul_(scale)
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


def _scaled(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The query times the power of two nearest to `scale`, which is exact, and the remaining factor of `scale`.

    This keeps products in half precision in range.
    """
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


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Causal attention of right-padded rows. Padding comes after all real tokens, so it needs no mask.

    Args:
        query: (n, heads, L, d); key and value: (n, kv_heads, L, d).
        scale: factor of the scores.
        window: a token sees itself and the `window - 1` tokens before it; None: all before it.
        softcap: scores become `softcap * tanh(scores / softcap)`. (Gemma 2)

    Returns:
        (n, heads, L, d).
    """
    length = query.shape[2]
    reach = length if window is None else min(window, length)
    if reach == length and not softcap:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=length > 1, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    distance = torch.arange(length, device=query.device).unsqueeze(1) - torch.arange(length, device=query.device)
    visible = (distance >= 0) & (distance < reach)  # (L, L)
    if not softcap:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    query, scale = _scaled(query, scale)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * scale
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=3).to(value.dtype) @ value


_active: list[RolloutAttention] = []


def _dispatch(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _active[-1](module, *args, **kwargs)


AttentionInterface.register(NAME, _dispatch)


@contextmanager
def installed(model: PreTrainedModel, attention: RolloutAttention) -> Iterator[None]:
    """Make every attention layer of `model` call `attention`; restore the previous attention on exit.

    Linear layers call PyTorch's own product: ZeRO-3 replaces it by one that a backward needs, with a separate addition
    of the bias and a Python function for each call.
    """
    config: Any = model.config
    parts = [config, *(getattr(config, name) for name in config.sub_configs if getattr(config, name) is not None)]
    before, linear = [part._attn_implementation for part in parts], nn.functional.linear
    config._attn_implementation = NAME  # transformers sets it on the parts too
    nn.functional.linear = torch._C._nn.linear
    _active.append(attention)
    try:
        yield
    finally:
        _active.pop()
        nn.functional.linear = linear
        for part, implementation in zip(parts, before, strict=True):
            part._attn_implementation = implementation
