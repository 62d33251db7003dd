"""Attention for generation: causal over a prefill, or of one new token over the KV cache.

It is registered with transformers' attention interface under the name `dschat_rollout`.
transformers has no mask function for that name, so models build no mask; the metadata of a step
says which slots hold tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.models.backbone import UnsupportedAttentionError, check_attention_call
from dschat_ppo.models.segment_attention import MOST_KEYS
from dschat_ppo.rollout.decode_kernels import (
    CPUDecode,
    FlashDecode,
    StepMetadata,
    products_attention,
)
from dschat_ppo.rollout.kv_cache import PrefillMetadata

NAME = "dschat_rollout"


class RolloutAttention:
    """The attention function of one generation. `metadata` describes the next forward pass:
    `PrefillMetadata`, or the metadata of each decode batch. `windows` records the sliding window
    that each layer asks for. `kernel` is used for decode steps in the layers that it supports;
    None: products and a softmax."""

    def __init__(self, kernel: CPUDecode | FlashDecode | None = None) -> None:
        self.metadata: PrefillMetadata | Sequence[StepMetadata] = []
        self.windows: dict[int, int | None] = {}
        self._kernel = kernel
        self._kernel_layers: set[int] = set()

    @property
    def reads_all_slots(self) -> bool:
        """Whether a decode step reads all slots up to `length` of its metadata in some layer. Known
        after a prefill."""
        return len(self._kernel_layers) < max(1, len(self.windows))

    def __call__(  # noqa: PLR0913
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
        """Write `key` and `value` (n, kv_heads, L, head_dim) to the cache; attend with `query` (n,
        heads, L, head_dim). Returns ((n, L, heads, head_dim), None). For errors see
        `check_attention_call`."""
        sinks = others.pop("s_aux", None)  # (heads,), as GPT-OSS names them
        check_attention_call(module, attention_mask, others)
        is_causal = others.get("is_causal")  # which counts before the attribute
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if not is_causal:
            raise UnsupportedAttentionError(f"{type(module).__name__} needs keys of later tokens")
        layer: Any = module.layer_idx
        self.windows[layer] = sliding_window
        scale = scaling
        if scale is None:
            scale = query.shape[3] ** -0.5
        if isinstance(self.metadata, PrefillMetadata):
            if (
                self._kernel is not None
                and sinks is None
                and self._kernel.supports(query, key, value, softcap)
            ):
                self._kernel_layers.add(layer)
            mixed = _prefill(
                self.metadata, layer, query, key, value, scale, sliding_window, softcap, sinks
            )
            return mixed.transpose(1, 2), None
        outputs = []
        for batch in self.metadata:
            rows = slice(batch.first, batch.first + batch.count)
            kernel = None
            # products read a prefix that several rows share once for all of them
            if layer in self._kernel_layers and batch.prefix is None:
                kernel = self._kernel
            if kernel is None or not kernel.writes_cache:
                keys, values = batch.cache.layer(layer, key, value)
                _write_to_cache(batch, keys, key[rows, :, 0])
                _write_to_cache(batch, values, value[rows, :, 0])
            if kernel is not None:
                output = kernel(
                    batch, layer, query[rows], key[rows], value[rows], scale, sliding_window
                )
            else:
                output = products_attention(
                    batch, layer, query[rows], scale, sliding_window, softcap, sinks
                )
            outputs.append(output)
        if len(outputs) == 1:
            return outputs[0].unsqueeze(1), None
        return torch.cat(outputs).unsqueeze(1), None


def _prefill(  # noqa: PLR0913  an attention function's arguments
    step: PrefillMetadata,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Write `key` and `value` (n, kv_heads, L, d) of a prefill to the cache, and attend with
    `query` (n, heads, L, d) -> (n, heads, L, d)."""
    keys, values = step.cache.layer(layer, key, value)
    _write_to_cache(step, keys, key[step.source, :, step.columns])
    _write_to_cache(step, values, value[step.source, :, step.columns])
    query = step.to_the_left(query)
    key = step.to_the_left(key)
    value = step.to_the_left(value)
    newest = None
    if step.history is not None:
        key, value = step.history.read(layer)
        newest = step.history.newest
    mixed = prefill_attention(query, key, value, scale, window, softcap, sinks, newest)
    return step.to_the_right(mixed)


def _write_to_cache(step: PrefillMetadata | StepMetadata, cached: Tensor, new: Tensor) -> None:
    """Put the keys or values `new` (m, kv_heads, d) of m tokens to slots `step.slots` of rows
    `step.rows` of a layer, (rows, kv_heads, capacity, d). Indices of two dimensions that are not
    the first ones would make the deterministic kernel of a GPU copy the whole layer."""
    _, heads, capacity, width = cached.shape
    # (m * kv_heads,): lines of the layer as a matrix of d columns
    if ("written", heads) not in step.step_cache:
        planes = step.rows.unsqueeze(1) * heads + torch.arange(heads, device=cached.device)
        step.step_cache["written", heads] = (planes * capacity + step.slots.unsqueeze(1)).flatten()
    cached.view(-1, width).index_copy_(0, step.step_cache["written", heads], new.reshape(-1, width))


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    newest: Tensor | None = None,
) -> Tensor:
    """Causal attention of right-padded rows, whose padding comes after all real tokens and needs no
    mask: `query` (n, heads, L, d), `key` and `value` (n, kv_heads, K, d) -> (n, heads, L, d). A
    token sees itself and the `window - 1` tokens before it; None: all. With `softcap`, scores
    become `softcap * tanh(scores / softcap)` (Gemma 2). `sinks` (heads,): one more score of every
    softmax, for nothing to read (GPT-OSS). `newest` (n, L) int64: the key of each token, where more
    keys than these are given; None: L = K, and they are in order."""
    length = query.shape[2]
    if (
        newest is None
        and not softcap
        and can_run(query, key, value)
        and length <= MOST_KEYS[query.dtype]
        and not query.requires_grad
    ):
        segments = torch.tensor([[0, length, 0, 0]])
        mixed, log_sums = operations.causal_attention(query, key, value, segments, window, scale)
        if sinks is None:
            return mixed
        read_share = torch.sigmoid(log_sums - sinks.float().view(-1, 1))  # the sink takes the rest
        return mixed * read_share.unsqueeze(3).to(mixed.dtype)
    if softcap and sinks is None:
        return _softcapped(query, key, value, scale, _visible(key, window, newest), softcap)
    width = value.shape[3]
    first = 0  # column of the first real token
    if sinks is not None:
        # Before the others comes a token that each head scores with its sink, and whose value is 0.
        # GPU kernels need widths that are multiples of 8.
        first = 1
        query = nn.functional.pad(query, (0, 8, 1, 0))
        key = nn.functional.pad(key, (0, 8, 1, 0))
        value = nn.functional.pad(value, (0, 8, 1, 0))
        query[..., -1] = (sinks / scale).view(-1, 1)
        key[:, :, 0, -1] = 1
        if newest is not None:
            newest = nn.functional.pad(newest + 1, (1, 0))
    visible = None
    if newest is not None or (window is not None and window < length + first):
        visible = _visible(key, window, newest)
        visible[..., :first] = True
    mixed = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        visible,
        is_causal=visible is None and query.shape[2] > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed[:, :, first:, :width]


def _visible(key: Tensor, window: int | None, newest: Tensor | None) -> Tensor:
    """(n or 1, 1, L, K) bool: which of the keys (n, kv_heads, K, d) each token of
    `prefill_attention` sees."""
    key_positions = torch.arange(key.shape[2], device=key.device)
    if newest is None:
        newest = key_positions
    distance = newest.unsqueeze(-1) - key_positions
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    return visible.view(-1, 1, *distance.shape[-2:])


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor, softcap: float
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    power = 2.0 ** round(math.log2(scale))  # as in `products_attention`
    query = query * power
    scale = scale / power
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * scale
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=3).to(value.dtype) @ value


AttentionFunction = Callable[..., tuple[Tensor, None]]

_active: list[AttentionFunction] = []


def _dispatch(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _active[-1](module, *args, **kwargs)


AttentionInterface.register(NAME, _dispatch)


@contextmanager
def attention_replaced(model: PreTrainedModel, attention: AttentionFunction) -> Iterator[None]:
    """Make every attention layer of `model` call `attention`; restore the previous attention on
    exit. Linear layers call PyTorch's own product: ZeRO-3's, which a backward pass needs, adds the
    bias separately and costs a Python function for each call."""
    config: Any = model.config
    configs = [config]
    for name in config.sub_configs:
        if getattr(config, name) is not None:
            configs.append(getattr(config, name))
    before = [each._attn_implementation for each in configs]
    linear = nn.functional.linear
    config._attn_implementation = NAME  # transformers sets it on the others too
    nn.functional.linear = torch._C._nn.linear
    _active.append(attention)
    try:
        yield
    finally:
        _active.pop()
        nn.functional.linear = linear
        for each, implementation in zip(configs, before, strict=True):
            each._attn_implementation = implementation
