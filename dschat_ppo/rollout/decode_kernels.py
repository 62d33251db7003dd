"""Attention of decode steps over a KV cache: by matrix products, by a compiled kernel on a CPU, or
by flash attention on a GPU."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dschat_ppo.algorithms.fused_logprobs import HALF
from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.errors import attempt
from dschat_ppo.models.backbone import unfit
from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache, PooledMetadata, SharedPrefix

_log = logging.getLogger(__name__)

WIDEST_HEAD = 256  # that the flash attention kernel supports
TOLERANCE = 0.05  # of its outputs of size 1 in half precision, compared with `products_attention`

StepMetadata = DecodeMetadata | PooledMetadata


class AttentionCall(NamedTuple):
    """What a layer asks of its attention in a forward pass over n rows.

    A token sees itself and the `window - 1` tokens before it; None: all. With `softcap`, scores
    become `softcap * tanh(scores / softcap)` (Gemma 2). `sinks` (heads,) are one more score of
    every softmax, for nothing to read (GPT-OSS).
    """

    layer: int
    query: Tensor  # (n, heads, L, d); in a decode step L is 1
    key: Tensor  # (n, kv_heads, L, d), of the same tokens
    value: Tensor  # likewise
    scale: float  # of the scores
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class KeySegments(NamedTuple):
    """The segment of keys that each of N queries attends to, for `flash_segments`. Segments may be
    anywhere and may overlap."""

    query_starts: Tensor  # (N + 1,) int32: 0, 1, ... N
    key_starts: Tensor  # (N + 1,) int32, where each begins in the keys; the last has no meaning
    used: Tensor  # (N,) int32, how many keys each has, at least 1
    longest: int  # not below any of `used`


# (query, keys, values, segments, scale) -> output, log-sum-exp; see `flash_segments`
Kernel = Callable[[Tensor, Tensor, Tensor, KeySegments, float], tuple[Tensor, Tensor]]


def products_attention(batch: StepMetadata, call: AttentionCall) -> Tensor:
    """Attention of one new token of each row of a decode batch, which is `count` of the n rows of
    the forward pass: queries (n, heads, 1, d) -> (count, heads, d).

    The keys and values of the new tokens are in the cache already; those of `call` are not read.
    The mask (count, 1, slots) is added to the scores; `batch` keeps it for the next layers.

    The query heads of one key head are the rows of one matrix product, so keys are read once and
    never expanded. A product over contiguous keys runs at memory speed; attention kernels with one
    query do not.
    """
    window = call.window
    sinks = call.sinks
    if ("mask", window) not in batch.step_cache:
        batch.step_cache["mask", window] = _mask(batch, window)
    query = call.query[batch.step_rows]
    count, heads, _, width = query.shape
    keys, values = batch.read(call.layer)
    kv_heads = keys.shape[1]
    # exact in any precision, and keeps products in half precision in range
    power = 2.0 ** round(math.log2(call.scale))
    query = query * power
    scale = call.scale / power
    # (count * kv_heads, heads / kv_heads, d)
    folded = query.reshape(count * kv_heads, -1, width)
    scores = _products(folded, keys.flatten(0, 1)).view(count, heads, -1)
    if batch.prefix is not None:
        prefix_keys = batch.prefix.cache.keys[call.layer]
        prefix_scores = by_prompt(batch.prefix, query.squeeze(2), prefix_keys, _products)
        scores = torch.cat([scores, prefix_scores], dim=2)
    scores = scores.float()
    if scale != 1:  # what is left of a scale that is no power of two
        scores = scores.mul_(scale)
    if call.softcap:
        scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
    scores.add_(batch.step_cache["mask", window])
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(-1, 1).expand(count, heads, 1)], dim=2)
    weights = torch.softmax(scores, dim=2).to(values.dtype)
    if sinks is not None:
        weights = weights[:, :, :-1]
    row_weights = weights[:, :, : batch.length].reshape(count * kv_heads, -1, batch.length)
    mixed = torch.bmm(row_weights, values.flatten(0, 1)).view(count, heads, -1)
    if batch.prefix is not None:
        prefix_weights = weights[:, :, batch.length :]
        prefix_values = batch.prefix.cache.values[call.layer]
        mixed += by_prompt(batch.prefix, prefix_weights, prefix_values, torch.bmm)
    return mixed


def _mask(batch: StepMetadata, window: int | None) -> Tensor:
    """(count, 1, slots) fp32, minus infinity for empty slots, later tokens, and those beyond the
    window; with a prefix its slots follow."""
    newest = batch.newest.unsqueeze(1)
    distance = newest - torch.arange(batch.length, device=newest.device)
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    if batch.prefix is not None:
        lengths = batch.prefix.lengths.unsqueeze(1)
        position = torch.arange(batch.prefix.cache.capacity, device=newest.device)
        in_prefix = position < lengths
        if window is not None:
            in_prefix &= lengths + newest - position < window
        visible = torch.cat([visible, in_prefix], dim=1)
    mask = torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, float("-inf"))
    return mask.unsqueeze(1)


def _products(query: Tensor, keys: Tensor) -> Tensor:
    """(n, q, d) and (n, k, d) -> (n, q, k) products; on a GPU in fp32, because bf16 rounds a score
    of 16 by 0.06."""
    if query.is_cuda and query.dtype != torch.float32 and torch.version.hip is None:
        return torch.bmm(query, keys.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(query, keys.transpose(1, 2))


def by_prompt(
    prefix: SharedPrefix, rows: Tensor, cached: Tensor, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """(n, heads, a) -> (n, heads, b): one product with `cached` (prompts, kv_heads, P, d) for all
    rows of a prompt."""
    prompts, kv_heads = cached.shape[:2]
    grid = rows.unflatten(1, (kv_heads, -1))[prefix.grid]  # prompts, row, kv_heads, group, a
    folded = grid.transpose(1, 2).reshape(prompts * kv_heads, -1, rows.shape[2])
    outputs = product(folded, cached.flatten(0, 1))
    width = outputs.shape[2]  # b
    cells = outputs.view(prompts, kv_heads, prefix.grid.shape[1], -1, width).transpose(1, 2)
    return cells.reshape(-1, rows.shape[1], width)[prefix.cells]


class CPUDecode:
    """Attention of decode steps over a `KVCache` by one kernel, which also writes the new keys and
    values there."""

    writes_cache = True

    def supports(self, call: AttentionCall) -> bool:
        """Whether the kernel can be used for a layer, by its call in a prefill."""
        has_plain_scores = not call.softcap and call.sinks is None
        is_alike = call.value.shape == call.key.shape
        return has_plain_scores and is_alike and can_run(call.query, call.key, call.value)

    def __call__(self, batch: StepMetadata, call: AttentionCall) -> Tensor:
        """As `products_attention`: (n, heads, 1, d) -> (count, heads, d)."""
        keys, values = batch.cache.layer(call.layer, call.key, call.value)
        heads = keys.shape[1]
        if ("token_offsets", heads) not in batch.step_cache:
            batch.step_cache["token_offsets", heads] = batch.token_offsets(heads)
        rows = batch.step_rows
        return operations.decode_attention(
            _contiguous_heads(call.query[rows]),
            _contiguous_heads(call.key[rows]),
            _contiguous_heads(call.value[rows]),
            keys,
            values,
            batch.step_cache["token_offsets", heads],
            call.scale,
            call.window,
        )


def _contiguous_heads(heads: Tensor) -> Tensor:
    """(n, heads, 1, d) with the heads of each row side by side in memory."""
    _, count, _, width = heads.shape
    if heads.stride(3) == 1 and (count == 1 or heads.stride(1) == width):
        return heads
    return heads.contiguous()


def flash_segments(
    query: Tensor, keys: Tensor, values: Tensor, segments: KeySegments, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of N queries (N, heads, d), each over its own segment of the keys (S, 1, d) -> (N,
    heads, d), and the logarithm of the sum of the exponentials of the scores, (heads, N) fp32.

    The heads of a query become rows of one product, and a few queries divide their keys among more
    processors. `torch.nn.attention.varlen` wraps the same operator, but adds a kernel to each call.
    Its pages (`block_table`) need another flash attention than the one in PyTorch; with `used`, the
    operator reads of `key_starts` only where a segment begins, so segments may be anywhere and may
    overlap.
    """
    output, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        segments.query_starts,
        segments.key_starts,
        1,  # tokens of the longest query
        segments.longest,
        0.0,  # dropout
        False,  # is_causal
        False,  # return_debug_mask
        scale=scale,
        seqused_k=segments.used,
    )
    return output, log_sums


def flash_decode(device: torch.device) -> FlashDecode | None:
    """Flash attention for decode steps on `device`, or None if it has no such kernel."""
    if (
        device.type != "cuda"
        or torch.version.hip
        or not torch.backends.cuda.is_flash_attention_available()
    ):
        return None
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return FlashDecode(flash_segments)
    return None


class FlashDecode:
    """Attention of decode steps with the flash attention kernel in PyTorch, for heads of `dtypes`
    that it supports. It takes the place of two products and the passes over their scores, which it
    keeps in fp32 too, and reads the slots that hold tokens, not the whole bucket."""

    writes_cache = False

    def __init__(self, kernel: Kernel, dtypes: tuple[torch.dtype, ...] = HALF):
        self._kernel = kernel
        self._dtypes = dtypes

    def supports(self, call: AttentionCall) -> bool:
        """Whether the kernel can be used for a layer, by its call in a prefill. The first time, the
        kernel is compared with `products_attention` on random rows of the same shape."""
        query = call.query
        width = query.shape[3]
        if (
            call.softcap
            or call.sinks is not None
            or query.dtype not in self._dtypes
            or width % 8
            or width > WIDEST_HEAD
            or call.value.shape != call.key.shape
        ):
            return False
        kv_heads = call.key.shape[1]
        return _agrees(self._kernel, query.dtype, query.device, query.shape[1], kv_heads, width)

    def __call__(self, batch: StepMetadata, call: AttentionCall) -> Tensor:
        """As `products_attention`: (n, heads, 1, d) -> (count, heads, d). Not for a `SharedPrefix`.

        Rows of a pool may have two segments: own tokens and a prefix. Both are queries of one call,
        and their results are weighted by the sums of their softmax, which makes them the softmax
        over all keys. The rows of a prompt are next to each other, so the GPU reads its keys from
        memory about once, and for the other rows from its L2 cache.
        """
        keys = batch.cache.keys[call.layer]
        values = batch.cache.values[call.layer]
        kv_heads = keys.shape[-3]
        width = keys.shape[-1]
        key = ("segments", kv_heads, call.window)
        if key not in batch.step_cache:
            batch.step_cache[key] = _key_segments(batch, kv_heads, call.window)
        segments = batch.step_cache[key]
        # (count * kv_heads, heads / kv_heads, d)
        folded = call.query[batch.step_rows].reshape(batch.count * kv_heads, -1, width)
        segments_per_query = len(segments.used) // len(folded)
        if segments_per_query > 1:
            folded = folded.repeat(segments_per_query, 1, 1)
        mixed, log_sums = self._kernel(
            folded, keys.view(-1, 1, width), values.view(-1, 1, width), segments, call.scale
        )
        if segments_per_query > 1:
            # (group, segments_per_query, count * kv_heads)
            weights = torch.softmax(log_sums.unflatten(1, (segments_per_query, -1)), dim=1)
            weights = weights.permute(1, 2, 0).unsqueeze(3)
            weighted = mixed.unflatten(0, (segments_per_query, -1)) * weights
            mixed = weighted.sum(dim=0).to(folded.dtype)
        return mixed.reshape(batch.count, -1, width)


def _key_segments(batch: StepMetadata, kv_heads: int, window: int | None) -> KeySegments:
    """The segments that the rows and key heads of a batch attend to, see `segments` there."""
    starts, used = batch.segments(kv_heads, window)
    query_starts = torch.arange(len(used) + 1, dtype=torch.int32, device=used.device)
    key_starts = nn.functional.pad(starts.to(torch.int32), (0, 1))
    return KeySegments(query_starts, key_starts, used.to(torch.int32), batch.length)


@cache
def _agrees(
    kernel: Kernel, dtype: torch.dtype, device: torch.device, heads: int, kv_heads: int, width: int
) -> bool:
    """Whether the kernel and `products_attention` agree on random rows of a pool, most of them with
    a prefix."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    pool = KVCache(1, 900)
    pool.keys[0] = random(1, kv_heads, 900, width)
    pool.values[0] = random(1, kv_heads, 900, width)
    query = random(8, heads, 1, width)
    offsets, starts, prefix_starts, prefix_lengths = torch.tensor(
        [
            [0, 200, 17, 99, 5, 1, 30, 4],
            [7, 300, 650, 501, 10, 12, 840, 700],
            [0, 0, 20, 600, 20, 20, 600, 20],
            [0, 0, 250, 2, 250, 3, 40, 9],
        ],
        device=device,
    )
    batch = PooledMetadata(
        pool, offsets, starts, prefix_starts, prefix_lengths, length=300, shares=True
    )
    call = AttentionCall(0, query, query, query, width**-0.5)
    with attempt() as tried:
        output = FlashDecode(kernel)(batch, call)
    reason = unfit(tried)
    if reason:
        _log.warning(f"rollout: with the flash attention kernel {reason}; decode steps are slower")
        return False
    expected = products_attention(batch, call)
    difference = float((output.float() - expected.float()).abs().max())
    if not difference <= TOLERANCE:
        _log.warning(
            f"rollout: the flash attention kernel is off by {difference:.2g}; decode steps are"
            " slower"
        )
        return False
    return True
