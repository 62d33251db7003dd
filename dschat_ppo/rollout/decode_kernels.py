"""Attention of decode steps over a KV cache: by matrix products, or by one kernel, compiled for a
CPU or Triton's on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dschat_ppo.algorithms.fused_logprobs import HALF
from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.models.fast_layers import LARGEST_HEAD, compared_kernels
from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache, PooledMetadata, SharedPrefix

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
    if query.is_cuda and query.dtype in HALF and torch.version.hip is None:
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
    """Attention of decode steps over a `KVCache` by one kernel for a CPU, which also writes the new
    keys and values there."""

    def supports(self, call: AttentionCall) -> bool:
        """Whether the kernel can be used for a layer, by its call in a prefill."""
        return _is_plain(call) and can_run(call.query, call.key, call.value)

    def __call__(self, batch: StepMetadata, call: AttentionCall) -> Tensor:
        """As `products_attention`: (n, heads, 1, d) -> (count, heads, d)."""
        return _by_kernel(operations.decode_attention, batch, call)


class GPUDecode:
    """`CPUDecode` on a GPU in half precision, by a kernel of `gpu_kernels`. It takes the place of
    two products, the passes over their scores and the writes to the cache, sums in fp32, and reads
    the slots that hold tokens, not the whole bucket, those of a shared prompt too."""

    def supports(self, call: AttentionCall) -> bool:
        """Whether the kernel can be used for a layer, by its call in a prefill. The first time, it
        is compared with `products_attention` on random rows of the same heads."""
        query = call.query
        if not (_is_plain(call) and query.is_cuda and query.dtype in HALF):
            return False
        if query.shape[3] > LARGEST_HEAD:
            return False
        kernels = _triton_decode_kernels(
            query.device, query.dtype, query.shape[1], call.key.shape[1], query.shape[3]
        )
        return kernels is not None

    def __call__(self, batch: StepMetadata, call: AttentionCall) -> Tensor:
        """As `products_attention`: (n, heads, 1, d) -> (count, heads, d). Not for a `SharedPrefix`.

        The rows of a prompt are next to each other, so the GPU reads its keys from memory about
        once, and for the other rows from its L2 cache."""
        from dschat_ppo import gpu_kernels  # builds of PyTorch for CPUs have no Triton

        return _by_kernel(gpu_kernels.decode_step_attention, batch, call)


def decode_kernel_for(device: torch.device) -> CPUDecode | GPUDecode:
    """The kernel for decode steps on `device`, for the layers that it supports."""
    if device.type == "cuda":
        return GPUDecode()
    return CPUDecode()


def _is_plain(call: AttentionCall) -> bool:
    """Whether the kernels can compute it: no soft cap, no sinks, and values as wide as keys."""
    return not call.softcap and call.sinks is None and call.value.shape == call.key.shape


def _by_kernel(kernel: Callable[..., Tensor], batch: StepMetadata, call: AttentionCall) -> Tensor:
    """Attention of a decode step by `operations.decode_attention`, or another with its
    arguments."""
    keys, values = batch.cache.layer(call.layer, call.key, call.value)
    heads = keys.shape[1]
    if ("token_offsets", heads) not in batch.step_cache:
        batch.step_cache["token_offsets", heads] = batch.token_offsets(heads)
    rows = batch.step_rows
    return kernel(
        _contiguous_heads(call.query[rows]),
        _contiguous_heads(call.key[rows]),
        _contiguous_heads(call.value[rows]),
        (keys, values),
        batch.step_cache["token_offsets", heads],
        call.scale,
        call.window,
    )


def attend_token_by_token(history: PooledMetadata, call: AttentionCall) -> Tensor:
    """Attention of L new tokens of each of n rows of a pool by `CPUDecode`, as if each were a step:
    queries (n, heads, L, d) -> the same shape. The keys and values of the new tokens are in the
    pool already, and are written there again."""
    rows, _, length, width = call.query.shape

    def as_steps(states: Tensor) -> Tensor:
        """(n, heads, L, d) -> (n * L, heads, 1, d)."""
        return states.transpose(1, 2).reshape(rows * length, -1, 1, width)

    def of_steps(numbers: Tensor) -> Tensor:
        """(n, 1) or (n, L) -> (n * L,)."""
        return numbers.expand(rows, length).flatten()

    steps = PooledMetadata(
        history.cache,
        of_steps(history.offsets),
        of_steps(history.starts),
        of_steps(history.prefix_starts),
        of_steps(history.prefix_lengths),
        length=history.length,
        shares=history.shares,
    )
    step_call = call._replace(
        query=as_steps(call.query), key=as_steps(call.key), value=as_steps(call.value)
    )
    mixed = CPUDecode()(steps, step_call)
    return mixed.view(rows, length, -1, width).transpose(1, 2)


def _contiguous_heads(heads: Tensor) -> Tensor:
    """(n, heads, 1, d) with the heads of each row side by side in memory."""
    _, count, _, width = heads.shape
    if heads.stride(3) == 1 and (count == 1 or heads.stride(1) == width):
        return heads
    return heads.contiguous()


@cache
def _triton_decode_kernels(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> Any:
    """Triton's kernels, if their attention of decode steps is `products_attention` in fp64 on this
    GPU, for heads of this number and width; else None, with a warning."""
    return compared_kernels(
        f"decode steps of {heads} heads over {kv_heads} of {width}",
        lambda kernels: decode_outputs(kernels, device, dtype, heads, kv_heads, width),
        "rollouts are slower",
    )


def decode_outputs(
    kernels: Any, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What the kernel of decode steps computes and writes for random rows of a pool, most of them
    with a prefix, and the same by products in fp64: (name, output, expected). The kernel divides
    the tokens of a row among programs if the rows are few: 8 rows are compared, and so many that
    none is divided."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    pool = KVCache(1, 900)
    pool.keys[0] = random(1, kv_heads, 900, width)
    pool.values[0] = random(1, kv_heads, 900, width)
    token_offsets = torch.tensor(  # of 8 rows, as `PooledMetadata` names them
        [
            [0, 200, 17, 99, 5, 1, 30, 4],  # offsets
            [7, 300, 650, 502, 10, 16, 840, 700],  # starts
            [0, 0, 20, 100, 20, 20, 100, 20],  # prefix_starts
            [0, 0, 250, 2, 250, 3, 40, 9],  # prefix_lengths
        ],
        device=device,
    )
    undivided = -(-kernels.DECODE_PROGRAMS // (8 * kv_heads))
    for repeats, window in ((1, None), (1, 37), (undivided, None)):
        offsets = token_offsets.repeat(1, repeats)
        rows = offsets.shape[1]
        slots = offsets[1] + offsets[0]  # of the new tokens, which no other row reads
        key = pool.keys[0][0][:, slots].transpose(0, 1).unsqueeze(2).contiguous()
        value = pool.values[0][0][:, slots].transpose(0, 1).unsqueeze(2).contiguous()
        query = random(rows, heads, 1, width)
        keys = pool.keys[0].index_fill(2, slots, 0)
        values = pool.values[0].index_fill(2, slots, 0)
        scale = width**-0.5
        output = kernels.decode_step_attention(
            query, key, value, (keys, values), offsets, scale, window
        )
        exact = KVCache(1, 900)
        exact.keys[0] = pool.keys[0].double()
        exact.values[0] = pool.values[0].double()
        batch = PooledMetadata(exact, *offsets, length=300, shares=True)
        call = AttentionCall(0, query.double(), key, value, scale, window)
        yield "the attention of a decode step", output, products_attention(batch, call)
        yield "a key of a decode step", keys, exact.keys[0]
        yield "a value of a decode step", values, exact.values[0]
