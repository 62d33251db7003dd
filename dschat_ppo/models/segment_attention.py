"""Causal attention inside each segment of a packed row: by one kernel for all segments, or one
after another.

A segment may also see tokens of another one: the beginning that its row shares
(`micro_batches.py`). PyTorch's variable-length FlashAttention needs the keys of a segment side by
side, so the keys of a shared beginning are copied for each segment that sees them
(docs/decisions.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dschat_ppo.common.exactness import exact_rollouts
from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.models.micro_batches import Segments

# with more, PyTorch's kernel is as fast or faster
MOST_KEYS = {torch.bfloat16: 4096, torch.float32: 256}


def suits_length(keys: int, dtype: torch.dtype) -> bool:
    """Whether a query of so many keys is for the kernel for a CPU: where it is faster, and at every
    length in exact rollouts and the training passes that they equal."""
    return keys <= MOST_KEYS[dtype] or exact_rollouts()


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        window: int | None,
        scale: float,
    ) -> Tensor:
        output, log_sums = operations.causal_attention(
            query, key, value, segments.table, window, scale
        )
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.segments = segments
        ctx.window = window
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sums = ctx.saved_tensors
        gradients = operations.causal_attention_backward(
            (query, key, value),
            (output, log_sums),
            gradient,
            ctx.segments.table,
            ctx.segments.groups,
            ctx.window,
            ctx.scale,
        )
        return *gradients, None, None, None


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention inside each segment of the rows: (b, heads, T, d of the values), in memory
    (b, T, heads, d).

    `query` (b, heads, T, d) bf16 or fp32 on a CPU; `key` (b, key heads, T, d), and `value`
    likewise, of another d or of the same; key heads divide the heads. `segments` together are all T
    columns. `window`: how many keys a query sees, its own among them; None: all. `scale` of the
    logits; None: d ** -0.5.
    """
    assert sum(segments.lengths) == query.shape[2]
    if scale is None:
        scale = query.shape[-1] ** -0.5
    mixed: Tensor = _BlockwiseAttention.apply(query, key, value, segments, window, scale)
    return mixed


LARGEST_FLASH_HEAD = 256
OF_OTHER_KERNELS = ("softcap", "s_aux")  # options that neither FlashAttention nor blocks have here
VARLEN_ARGUMENTS = {"scale", "window_size"}  # that not every version of PyTorch has


# FlashAttention


def varlen_flash_kernel() -> Callable[..., Any] | None:
    """PyTorch's variable-length FlashAttention; None where PyTorch is too old for it or for an
    argument used here."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if not set(known) >= VARLEN_ARGUMENTS:
        return None
    if "enable_gqa" in known:
        return varlen_attn

    def without_gqa(*arguments: Any, enable_gqa: bool, **options: Any) -> Any:
        """PyTorch 2.11 takes fewer key heads without being asked."""
        return varlen_attn(*arguments, **options)

    return without_gqa


_VARLEN = varlen_flash_kernel()


def suits_varlen(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether PyTorch's variable-length FlashAttention computes this attention: its GPU, dtype,
    head size, options."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    head = query.shape[-1]
    return (
        _VARLEN is not None
        and torch.version.hip is None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and head == key.shape[-1] == value.shape[-1]
        and head % 8 == 0
        and head <= LARGEST_FLASH_HEAD
        and not options.get("dropout")
        and options.get("is_causal") is not False
        and all(options.get(name) is None for name in OF_OTHER_KERNELS)
    )


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """PyTorch's variable-length FlashAttention over the segments of one row: (1, heads, T, d) ->
    (1, T, heads, d)."""
    bounds = segments.varlen(query.device)
    # Not `query[0]`: the gradient of an index is a tensor of zeros and a copy into it.
    queries = query.squeeze(0).transpose(0, 1).contiguous()  # (T, heads, d)
    keys = key.squeeze(0).transpose(0, 1).contiguous()
    values = value.squeeze(0).transpose(0, 1).contiguous()
    if bounds.columns is not None:
        # a shared key's gradients add up in fp32, always in one order
        keys = keys[bounds.columns]
        values = values[bounds.columns]
    assert _VARLEN is not None
    # its window ends at the last query and the last key of a segment; -1: it hides no key
    keys_before = -1
    if window is not None:
        keys_before = window - 1
    mixed: Tensor = _VARLEN(
        queries,
        keys,
        values,
        bounds.query_bounds,
        bounds.key_bounds,
        bounds.most_queries,
        bounds.most_keys,
        scale=scale,
        window_size=(keys_before, 0),
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return mixed.unsqueeze(0)


# Kernels for a CPU


def suits_blocks(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    options: dict[str, Any],
) -> bool:
    """Whether kernels for a CPU compute this layer faster: its device, dtype, heads, lengths and
    options."""
    return (
        can_run(query, key, value)
        and suits_length(segments.most_keys, query.dtype)
        and query.shape[1] % key.shape[1] == 0
        and not options.get("dropout")
        and options.get("is_causal", getattr(module, "is_causal", True)) is not False
        and all(options.get(name) is None for name in OF_OTHER_KERNELS)
    )


# Segment by segment


def segment_by_segment(
    module: Any,
    projections: tuple[Tensor, Tensor, Tensor],
    segments: Segments | None,
    window: int | None,
    options: dict[str, Any],
    eager: bool = False,
) -> Tensor:
    """One segment after another by PyTorch's scaled dot product attention.

    Args:
        module: the layer.
        projections: query, key and value, (b, heads, T, d), rotated; the latter two may have fewer
            heads.
        segments: of the only row; None: each of the b rows is a segment.
        window: how many keys a query sees, its own among them; None: all.
        options: those of transformers' attention functions.
        eager: compute products and softmax as operations of their own.

    Returns:
        (b, T, heads, d).
    """
    query, key, value = projections
    is_eager = eager or any(options.get(name) is not None for name in OF_OTHER_KERNELS)
    seen = None
    chunks = [projections]
    if segments is not None:
        seen = segments.seen
        query_chunks = query.split(segments.lengths, dim=2)
        key_chunks = key.split(segments.lengths, dim=2)
        value_chunks = value.split(segments.lengths, dim=2)
        chunks = list(zip(query_chunks, key_chunks, value_chunks, strict=True))
    outputs = []
    for segment, (queries, keys, values) in enumerate(chunks):
        if seen is not None and seen[segment][0] < seen[segment][1]:
            before = slice(*seen[segment])
            keys = torch.cat([key[:, :, before], keys], dim=2)
            values = torch.cat([value[:, :, before], values], dim=2)
        band = _band(queries.shape[2], keys.shape[2], window, queries.device)
        if is_eager:
            output = _eager_attention(module, queries, keys, values, band, options)
        elif queries.shape[2] < keys.shape[2]:
            output = _grouped_attention(queries, keys, values, band, options.get("scaling"))
        else:
            output, _ = sdpa_attention_forward(module, queries, keys, values, band, **options)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def _band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """(1, 1, queries, keys) bool, True on the keys that each query sees: its own, the last query's
    being the last key, and the `window - 1` before it (None: all before it). None: every query sees
    every key, or a kernel that is causal by itself does as well."""
    if (window is None or keys <= window) and queries in (1, keys):
        return None
    band = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if window is not None:
        band = band.triu(keys - queries + 1 - window)
    return band[None, None]


def _grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, band: Tensor | None, scale: float | None
) -> Tensor:
    """`sdpa_attention_forward` without dropout, and without the copies that it makes with a mask:
    of the keys, for each head of their group. (b, heads, T, d) -> (b, T, heads, d)."""
    enable_gqa = query.shape[1] != key.shape[1]
    mixed = functional.scaled_dot_product_attention(
        query, key, value, band, scale=scale, enable_gqa=enable_gqa
    )
    return mixed.transpose(1, 2)


def _eager_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    band: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention as products and a softmax. PyTorch has no other one with a soft cap of its logits
    (Gemma 2), or with one more logit for each head that no value belongs to (the sinks of GPT-OSS,
    `s_aux` (heads,)). (b, heads, T, d) -> (b, T, heads, d)."""
    scale = options.get("scaling")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    softcap = options.get("softcap")
    sinks = options.get("s_aux")
    groups = query.shape[1] // key.shape[1]
    length = query.shape[2]
    keys = key.shape[2]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    logits = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if band is None:
        band = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
    logits = logits.masked_fill(~band, -torch.inf)
    if sinks is not None:
        sink_logits = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(len(logits), -1, length, 1)
        logits = torch.cat([logits, sink_logits], dim=-1)
    probabilities = torch.softmax(logits.float(), dim=-1)[..., :keys].to(value.dtype)
    dropout = options.get("dropout", 0.0)
    probabilities = functional.dropout(probabilities, dropout, module.training)
    return (probabilities @ value).transpose(1, 2)
