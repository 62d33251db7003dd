"""Attention for generation: causal over a prefill, or of one new token over the KV cache.

It is registered with transformers' attention interface under the name `dschat_rollout`. transformers has no mask
function for that name, so models build no mask; the metadata of a step says which slots hold tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.models.backbone import has_states
from dschat_ppo.models.probes import UnsupportedAttentionError, check_attention_call
from dschat_ppo.rollout.kv_cache import DecodeMetadata, PooledMetadata, PrefillMetadata, SharedPrefix


def decode_attention(
    batch: DecodeMetadata | PooledMetadata, layer: int, query: Tensor, scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(count, heads, 1, head_dim) -> (count, heads, head_dim). The query heads of one key head are the rows of one
    matrix product, so keys are read once and never expanded. A product over contiguous keys runs at memory speed;
    attention kernels with one query do not."""
    if ("mask", window) not in batch.kept:  # (count, slots): empty slots, later tokens, those beyond the window
        newest = batch.newest.unsqueeze(1)
        distance = newest - torch.arange(batch.length, device=newest.device)
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        if batch.prefix is not None:
            lengths = batch.prefix.lengths.unsqueeze(1)
            place = torch.arange(batch.prefix.cache.capacity, device=newest.device)
            in_prefix = place < lengths
            if window is not None:
                in_prefix &= lengths + newest - place < window
            visible = torch.cat([visible, in_prefix], dim=1)
        mask = torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, float("-inf"))
        batch.kept["mask", window] = mask.unsqueeze(1)
    count, heads, _, width = query.shape
    keys, values = batch.read(layer)
    power = 2.0 ** round(math.log2(scale))  # exact in any precision, and keeps products in half precision in range
    query, scale = query * power, scale / power
    folded = query.reshape(count * keys.shape[1], -1, width)  # (count * kv_heads, heads / kv_heads, d)
    scores = _products(folded, keys.flatten(0, 1)).view(count, heads, -1)
    if batch.prefix is not None:
        scores = torch.cat([scores, prefix_scores(batch.prefix, layer, query)], dim=2)
    scores = scores.float()
    if scale != 1:  # what is left of a scale that is no power of two
        scores = scores.mul_(scale)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores.add_(batch.kept["mask", window])
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(-1, 1).expand(count, heads, 1)], dim=2)
    weights = torch.softmax(scores, dim=2).to(values.dtype)
    if sinks is not None:
        weights = weights[:, :, :-1]
    own = weights[:, :, : batch.length].reshape(count * keys.shape[1], -1, batch.length)
    mixed = torch.bmm(own, values.flatten(0, 1)).view(count, heads, -1)
    if batch.prefix is not None:
        mixed += prefix_values(batch.prefix, layer, weights[:, :, batch.length :])
    return mixed


def _products(query: Tensor, keys: Tensor) -> Tensor:
    """(n, q, d) and (n, k, d) -> (n, q, k) products; on a GPU in fp32, because bf16 rounds a score of 16 by 0.06."""
    if query.is_cuda and query.dtype != torch.float32 and torch.version.hip is None:
        return torch.bmm(query, keys.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(query, keys.transpose(1, 2))


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


NAME = "dschat_rollout"


class RolloutCache(Cache):
    """Passes new keys and values through to the attention function, which writes them to the KV cache itself. Layers
    that carry a state have transformers' own cache layer for it: empty, so the next forward pass is a prefill."""

    def __init__(self, config: PreTrainedConfig | None = None) -> None:
        super().__init__(layers=DynamicCache(config=config).layers if config and has_states(config) else [])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the same tensors."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are always given explicitly."""
        return 0


class DecodeKernel(Protocol):
    """Attention of decode steps by one kernel: `FlashDecode` or `CPUDecode`. It gets the query (n, heads, 1, head_dim),
    and the new key and value (n, kv_heads, 1, head_dim) of the rows of a decode batch, and returns (n, heads,
    head_dim). Where it `writes_cache`, it also puts key and value there."""

    writes_cache: bool

    def supports(self, query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> bool: ...

    def __call__(
        self, batch: DecodeMetadata | PooledMetadata, layer: int, query: Tensor, key: Tensor, value: Tensor,
        scale: float, window: int | None,
    ) -> Tensor: ...  # fmt: skip


class RolloutAttention:
    """The attention function of one generation. `metadata` describes the next forward pass: `PrefillMetadata`, or the
    metadata of each decode batch. `windows` records the sliding window that each layer asks for. `kernel` is used for
    decode steps in the layers that it supports; None: products and a softmax."""

    def __init__(self, kernel: DecodeKernel | None = None) -> None:
        self.metadata: PrefillMetadata | Sequence[DecodeMetadata | PooledMetadata] = []
        self.windows: dict[int, int | None] = {}
        self._kernel = kernel
        self._kernel_layers: set[int] = set()

    @property
    def reads_all_slots(self) -> bool:
        """Whether a decode step reads all slots up to `length` of its metadata in some layer. Known after a prefill."""
        return len(self._kernel_layers) < max(1, len(self.windows))

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
        Returns ((n, L, heads, head_dim), None). For errors see `check_attention_call`."""
        sinks = others.pop("s_aux", None)  # (heads,), as GPT-OSS names them
        check_attention_call(module, attention_mask, others)
        causal = others.get("is_causal")  # which counts before the attribute
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise UnsupportedAttentionError(f"{type(module).__name__} needs keys of later tokens")
        layer: Any = module.layer_idx
        self.windows[layer] = sliding_window
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        if isinstance(self.metadata, PrefillMetadata):
            if self._kernel is not None and sinks is None and self._kernel.supports(query, key, value, softcap):
                self._kernel_layers.add(layer)
            step = self.metadata
            for cached, new in zip(step.cache.layer(layer, key, value), (key, value), strict=True):
                _write(step, cached, new[step.source, :, step.columns])
            query, key, value = (step.to_the_left(part) for part in (query, key, value))
            mixed = causal_attention(query, key, value, scale, sliding_window, softcap, sinks)
            return step.to_the_right(mixed).transpose(1, 2), None
        outputs = []
        for batch in self.metadata:
            rows = slice(batch.first, batch.first + batch.count)
            # products read a prefix that several rows share once for all of them
            kernel = self._kernel if layer in self._kernel_layers and batch.prefix is None else None
            if kernel is None or not kernel.writes_cache:
                for cached, new in zip(batch.cache.layer(layer, key, value), (key, value), strict=True):
                    _write(batch, cached, new[rows, :, 0])
            if kernel is not None:
                outputs.append(kernel(batch, layer, query[rows], key[rows], value[rows], scale, sliding_window))
            else:
                outputs.append(decode_attention(batch, layer, query[rows], scale, sliding_window, softcap, sinks))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(1), None


def _write(step: PrefillMetadata | DecodeMetadata | PooledMetadata, cached: Tensor, new: Tensor) -> None:
    """Put the keys or values `new` (m, kv_heads, d) of m tokens to slots `step.slots` of rows `step.rows` of a layer,
    (rows, kv_heads, capacity, d). Indices of two dimensions that are not the first ones would make the deterministic
    kernel of a GPU copy the whole layer."""
    _, heads, capacity, width = cached.shape
    if ("written", heads) not in step.kept:  # (m * kv_heads,): lines of the layer as a matrix of d columns
        planes = step.rows.unsqueeze(1) * heads + torch.arange(heads, device=cached.device)
        step.kept["written", heads] = (planes * capacity + step.slots.unsqueeze(1)).flatten()
    cached.view(-1, width).index_copy_(0, step.kept["written", heads], new.reshape(-1, width))


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of right-padded rows, whose padding comes after all real tokens and needs no mask: `query` (n,
    heads, L, d), `key` and `value` (n, kv_heads, L, d) -> (n, heads, L, d). A token sees itself and the `window - 1`
    tokens before it; None: all. With `softcap`, scores become `softcap * tanh(scores / softcap)` (Gemma 2). `sinks`
    (heads,): one more score of every softmax, for nothing to read (GPT-OSS)."""
    length = query.shape[2]
    if not softcap and can_run(query, key, value) and not query.requires_grad:
        parts = torch.tensor([[0, length, 0, 0]])
        mixed, log_sums = operations.causal_attention(query, key, value, parts, window, scale)
        if sinks is None:
            return mixed
        return mixed * torch.sigmoid(log_sums - sinks.float().view(-1, 1)).unsqueeze(3).to(mixed.dtype)
    if sinks is not None:
        return _with_sinks(query, key, value, scale, window, sinks)
    reach = length if window is None else min(window, length)
    if reach == length and not softcap:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=length > 1, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    visible = _visible(length, reach, query.device)
    if not softcap:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    power = 2.0 ** round(math.log2(scale))  # as in `decode_attention`
    query, scale = query * power, scale / power
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * scale
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=3).to(value.dtype) @ value


def _visible(length: int, reach: int, device: torch.device) -> Tensor:
    """(L, L) bool: the tokens that each token sees, itself and the `reach - 1` ones before it."""
    distance = torch.arange(length, device=device).unsqueeze(1) - torch.arange(length, device=device)
    return (distance >= 0) & (distance < reach)


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, sinks: Tensor) -> Tensor:
    """A token comes before the others: each head scores it with its sink, by a column of its own, and reads zeros."""
    width = value.shape[3]
    query, key, value = (nn.functional.pad(part, (0, 8, 1, 0)) for part in (query, key, value))  # 8: for GPU kernels
    query[..., -1], key[:, :, 0, -1] = (sinks / scale).view(-1, 1), 1
    visible = None
    if window is not None and window < query.shape[2]:
        visible = _visible(query.shape[2], window, query.device)
        visible[:, 0] = True
    mixed = nn.functional.scaled_dot_product_attention(
        query, key, value, visible, is_causal=visible is None, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return mixed[:, :, 1:, :width]


AttentionFunction = Callable[..., tuple[Tensor, None]]

_active: list[AttentionFunction] = []


def _dispatch(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _active[-1](module, *args, **kwargs)


AttentionInterface.register(NAME, _dispatch)


@contextmanager
def installed(model: PreTrainedModel, attention: AttentionFunction) -> Iterator[None]:
    """Make every attention layer of `model` call `attention`; restore the previous attention on exit. Linear layers
    call PyTorch's own product: ZeRO-3's, which a backward pass needs, adds the bias separately and costs a Python
    function for each call."""
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


class CPUDecode:
    """Attention of decode steps over a `KVCache`."""

    writes_cache = True

    def supports(self, query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> bool:
        """Whether the kernel can be used for a layer."""
        return not softcap and value.shape == key.shape and can_run(query, key, value)

    def __call__(
        self, batch: DecodeMetadata | PooledMetadata, layer: int, query: Tensor, key: Tensor, value: Tensor,
        scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        """Write and attend; see `DecodeKernel`."""
        assert isinstance(batch, DecodeMetadata)
        keys, values = batch.cache.layer(layer, key, value)
        query, key, value = (_side_by_side(part) for part in (query, key, value))
        return operations.decode_attention(query, key, value, keys, values, batch.slots, scale, window)


def _side_by_side(part: Tensor) -> Tensor:
    """(n, heads, 1, d) with the heads of each row side by side in memory."""
    _, heads, _, width = part.shape
    fits = part.stride(3) == 1 and (heads == 1 or part.stride(1) == width)
    return part if fits else part.contiguous()
