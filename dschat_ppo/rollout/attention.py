"""Attention for generation: causal over a prefill, or of one new token over the stored rows.

Installed through transformers' attention interface under a name of its own. The name is not in transformers' registry
of masks, so models build none; which slots are real is known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from dschat_ppo.rollout.kv_cache import KVCache

NAME = "dschat_rollout"


class UnsupportedAttentionError(Exception):
    """The model asks its attention for something that this engine does not do."""


@dataclass
class SharedPrefix:
    """The keys and values of prompts that several rows of a bank have in common.

    `store` holds one row per prompt. `length` (n,) int64 is the prefix length of each row of the bank. `grid` (prompts,
    width) int64 lists the rows of each prompt (any row in unused cells); `cell` (n,) int64 is each row's place in the
    flattened grid.
    """

    store: KVCache
    length: Tensor
    grid: Tensor
    cell: Tensor


@dataclass
class Span:
    """Rows `first .. first + count - 1` of a decode step, which live in the first rows of `store`.

    `slots` (count,) int64 is where the new token of each row goes; it attends to slots up to and including that one, of
    which the first `reach` are looked at.
    """

    first: int
    count: int
    store: KVCache
    slots: Tensor
    reach: int
    prefix: SharedPrefix | None


@dataclass
class Block:
    """A prefill: row `source[i]` of the forward pass is written to row `rows[i]` of `store`."""

    store: KVCache
    rows: Tensor
    source: Tensor


class RolloutCache(Cache):
    """Hands the new keys and values through to the attention function, which stores them itself."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The same tensors."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are always given explicitly."""
        return 0


class RolloutAttention:
    """The attention function. `work` says what the next forward pass is: a `Block` to prefill, or decode `Span`s;
    `windows` which sliding window each layer has asked for."""

    def __init__(self) -> None:
        self.work: Block | list[Span] = []
        self.windows: dict[int, int | None] = {}
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._lines: dict[tuple[int, int], Tensor] = {}

    def begin(self, work: Block | list[Span]) -> None:
        """Announce the next forward pass."""
        self.work = work
        self._masks = {}
        self._lines = {}

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
        """Store `key` and `value` (n, kv_heads, L, head_dim) and attend with `query` (n, heads, L, head_dim).

        Returns:
            ((n, L, heads, head_dim), None).

        Raises:
            UnsupportedAttentionError: sinks, a bias, a mask of the model's own, or attention that is not causal.
        """
        _refuse_unknown(module, attention_mask, others)
        layer: Any = module.layer_idx
        self.windows[layer] = sliding_window
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        if isinstance(self.work, Block):
            self.work.store.put_block(layer, self.work.rows, self.work.source, key, value)
            return causal_attention(query, key, value, scale, sliding_window, softcap).transpose(1, 2), None
        parts = []
        for number, span in enumerate(self.work):
            mine = slice(span.first, span.first + span.count)
            span.store.put_token(layer, self._lines_of(number, span, key.shape[1]), key[mine], value[mine])
            parts.append(self._attend(number, span, layer, query[mine], scale, sliding_window, softcap))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(1), None

    def _lines_of(self, number: int, span: Span, heads: int) -> Tensor:
        if (number, heads) not in self._lines:
            self._lines[number, heads] = span.store.lines(span.slots, heads)
        return self._lines[number, heads]

    def _attend(
        self,
        number: int,
        span: Span,
        layer: int,
        query: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """(count, heads, 1, head_dim) -> (count, heads, head_dim).

        The query heads of one key head are the rows of one matrix product, so keys are read once and never expanded; a
        product over contiguous keys runs at memory speed, where attention with one query does not.
        """
        count, heads, _, width = query.shape
        keys = span.store.keys[layer][:count, :, : span.reach]
        values = span.store.values[layer][:count, :, : span.reach]
        query, scale = _scaled(query, scale)
        folded = query.reshape(count * keys.shape[1], -1, width)
        scores = torch.bmm(folded, keys.flatten(0, 1).transpose(1, 2)).view(count, heads, -1)
        if span.prefix is not None:
            scores = torch.cat([scores, _prefix_scores(span.prefix, layer, query)], dim=2)
        scores = scores.float().mul_(scale)
        if softcap:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        mask = self._mask(number, span, window)
        if mask is not None:
            scores = scores.add_(mask)
        weights = torch.softmax(scores, dim=2).to(values.dtype)
        own = weights[:, :, : span.reach].reshape(count * keys.shape[1], -1, span.reach)
        mixed = torch.bmm(own, values.flatten(0, 1)).view(count, heads, -1)
        if span.prefix is not None:
            mixed += _prefix_values(span.prefix, layer, weights[:, :, span.reach :])
        return mixed

    def _mask(self, number: int, span: Span, window: int | None) -> Tensor:
        """(count, 1, slots) fp32, -inf on slots that hold nothing, later tokens, or tokens beyond the window."""
        key = (number, window)
        if key not in self._masks:
            slots = span.slots.unsqueeze(1)
            behind = slots - torch.arange(span.reach, device=slots.device)
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            if span.prefix is not None:
                lengths = span.prefix.length.unsqueeze(1)
                place = torch.arange(span.prefix.store.capacity, device=slots.device)
                before = place < lengths
                if window is not None:
                    before &= lengths + slots - place < window
                seen = torch.cat([seen, before], dim=1)
            self._masks[key] = (
                torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, float("-inf")).unsqueeze(1)
            )
        return self._masks[key]


def _scaled(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The query times the power of two nearest to `scale`, which is exact, and what is left of `scale`.

    So products in half precision stay in range.
    """
    power = 2.0 ** round(math.log2(scale))
    return query * power, scale / power


def _prefix_scores(prefix: SharedPrefix, layer: int, query: Tensor) -> Tensor:
    """(n, heads, 1, d) -> (n, heads, P): all rows of a prompt meet its keys in one product."""
    keys = prefix.store.keys[layer]
    prompts, kv_heads, length, width = keys.shape
    grid = query.squeeze(2).unflatten(1, (kv_heads, -1))[prefix.grid]  # prompts, row, kv_heads, group, d
    folded = grid.transpose(1, 2).reshape(prompts * kv_heads, -1, width)
    scores = torch.bmm(folded, keys.flatten(0, 1).transpose(1, 2))
    cells = scores.view(prompts, kv_heads, prefix.grid.shape[1], -1, length).transpose(1, 2)
    return cells.reshape(-1, query.shape[1], length)[prefix.cell]


def _prefix_values(prefix: SharedPrefix, layer: int, weights: Tensor) -> Tensor:
    """(n, heads, P) -> (n, heads, d)."""
    values = prefix.store.values[layer]
    prompts, kv_heads, length, width = values.shape
    grid = weights.unflatten(1, (kv_heads, -1))[prefix.grid]
    folded = grid.transpose(1, 2).reshape(prompts * kv_heads, -1, length)
    mixed = torch.bmm(folded, values.flatten(0, 1))
    cells = mixed.view(prompts, kv_heads, prefix.grid.shape[1], -1, width).transpose(1, 2)
    return cells.reshape(-1, weights.shape[1], width)[prefix.cell]


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Causal attention of right-padded rows; padding comes after all real tokens, so it needs no mask.

    Args:
        query: (n, heads, L, d); key and value: (n, kv_heads, L, d).
        scale: of the scores.
        window: a token sees itself and `window - 1` before it; None: all before it.
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
    behind = torch.arange(length, device=query.device).unsqueeze(1) - torch.arange(length, device=query.device)
    seen = (behind >= 0) & (behind < reach)
    if not softcap:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    query, scale = _scaled(query, scale)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * scale
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, dim=3).to(value.dtype) @ value


def _refuse_unknown(module: Any, attention_mask: Tensor | None, others: dict[str, Any]) -> None:
    sinks = others.get("s_aux") is not None or others.get("position_bias") is not None
    if attention_mask is not None or sinks or not getattr(module, "is_causal", True):
        raise UnsupportedAttentionError(f"{type(module).__name__} needs a mask, a bias or sinks of its own")


_active: list[RolloutAttention] = []


def _dispatch(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _active[-1](module, *args, **kwargs)


AttentionInterface.register(NAME, _dispatch)


@contextmanager
def installed(model: PreTrainedModel, attention: RolloutAttention) -> Iterator[None]:
    """Inside, every attention layer of `model` calls `attention`; after it, what was there before."""
    config: Any = model.config
    parts = [config, *(getattr(config, name) for name in config.sub_configs if getattr(config, name) is not None)]
    before = [part._attn_implementation for part in parts]
    config._attn_implementation = NAME  # reaches the parts too
    _active.append(attention)
    try:
        yield
    finally:
        _active.pop()
        for part, implementation in zip(parts, before, strict=True):
            part._attn_implementation = implementation
