"""Attention of one new token over the KV cache, with the flash attention kernel in PyTorch: CUDA, half precision.

One kernel takes the place of two products and the passes over their fp32 scores. It reads the slots that hold tokens,
not the whole bucket, and keeps scores in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from dschat_ppo.errors import attempt
from dschat_ppo.models.probes import unfit
from dschat_ppo.rollout.attention import decode_attention
from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache, PooledMetadata

_log = logging.getLogger(__name__)

HALF = (torch.float16, torch.bfloat16)
WIDEST_HEAD = 256  # that the kernel supports
TOLERANCE = 0.05  # of outputs of size 1 in half precision, compared with `decode_attention`


# (query, keys, values, numbers, starts, used, longest, scale) -> output, log-sum-exp; see `varlen_kernel`
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]]


def varlen_kernel(
    query: Tensor, keys: Tensor, values: Tensor, numbers: Tensor, starts: Tensor, used: Tensor, longest: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of N queries (N, heads, d), each over its own segment of the keys (S, 1, d) -> (N, heads, d), and the
    logarithm of the sum of the exponentials of the scores, (heads, N) fp32.

    The heads of a query become rows of one product, and a few queries divide their keys among more processors.
    `torch.nn.attention.varlen` wraps the same operator, but adds a kernel to each call. Its pages (`block_table`) need
    another flash attention than the one in PyTorch; with `used`, the operator reads of `starts` only where a segment
    begins, so segments may be anywhere and may overlap.

    Args:
        numbers: (N + 1,) int32, 0, 1, ... N.
        starts: (N + 1,) int32, where each segment begins in `keys`; the last number has no meaning.
        used: (N,) int32, how many keys each query attends to, at least 1; `longest` is not below the largest.
    """
    output, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        query, keys, values, numbers, starts, 1, longest, 0.0, False, False, scale=scale, seqused_k=used
    )
    return output, log_sums


def flash_decode(device: torch.device) -> FlashDecode | None:
    """Flash attention for decode steps on `device`, or None if it has no such kernel."""
    if device.type != "cuda" or torch.version.hip or not torch.backends.cuda.is_flash_attention_available():
        return None
    return FlashDecode(varlen_kernel) if torch.cuda.get_device_capability(device) >= (8, 0) else None


class FlashDecode:
    """Attention of decode steps with `kernel`, for models with heads of `dtypes` that it supports."""

    writes_cache = False

    def __init__(self, kernel: Kernel, dtypes: tuple[torch.dtype, ...] = HALF):
        self._kernel = kernel
        self._dtypes = dtypes

    def supports(self, query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> bool:
        """Whether the kernel can be used for a layer: query (n, heads, L, d), key and value (n, kv_heads, L, d). The
        first time, the kernel is compared with `decode_attention` on random rows of the same shape."""
        width = query.shape[3]
        if softcap or query.dtype not in self._dtypes or width % 8 or width > WIDEST_HEAD or value.shape != key.shape:
            return False
        return _agrees(self._kernel, query.dtype, query.device, query.shape[1], key.shape[1], width)

    def __call__(
        self, batch: DecodeMetadata | PooledMetadata, layer: int, query: Tensor, key: Tensor, value: Tensor,
        scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        """As `decode_attention`: (count, heads, 1, head_dim) -> (count, heads, head_dim). Not for a `SharedPrefix`.

        Rows of a pool may have two segments: own tokens and a prefix. Both are queries of one call, and the parts are
        weighted by the sums of their softmax, which makes them the softmax over all keys. The rows of a prompt are next
        to each other, so the GPU reads its keys from memory about once, and for the other rows from its L2 cache.
        """
        keys, values = batch.cache.keys[layer], batch.cache.values[layer]
        kv_heads, width = keys.shape[-3], keys.shape[-1]
        if ("segments", kv_heads, window) not in batch.kept:
            starts, used = (part.to(torch.int32) for part in batch.segments(kv_heads, window))
            numbers = torch.arange(len(used) + 1, dtype=torch.int32, device=query.device)
            batch.kept["segments", kv_heads, window] = numbers, nn.functional.pad(starts, (0, 1)), used
        numbers, starts, used = batch.kept["segments", kv_heads, window]
        folded = query.reshape(batch.count * kv_heads, -1, width)  # (count * kv_heads, heads / kv_heads, d)
        parts = len(used) // len(folded)
        if parts > 1:
            folded = folded.repeat(parts, 1, 1)
        mixed, log_sums = self._kernel(
            folded, keys.view(-1, 1, width), values.view(-1, 1, width), numbers, starts, used, batch.length, scale
        )
        if parts > 1:
            weights = torch.softmax(log_sums.unflatten(1, (parts, -1)), dim=1)  # (group, parts, count * kv_heads)
            mixed = (mixed.unflatten(0, (parts, -1)) * weights.permute(1, 2, 0).unsqueeze(3)).sum(dim=0).to(query.dtype)
        return mixed.reshape(batch.count, -1, width)


@cache
def _agrees(
    kernel: Kernel, dtype: torch.dtype, device: torch.device, heads: int, kv_heads: int, width: int
) -> bool:  # fmt: skip
    """Whether the kernel and `decode_attention` agree on random rows of a pool, most of them with a prefix."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    pool = KVCache(1, 900)
    pool.keys[0], pool.values[0] = random(1, kv_heads, 900, width), random(1, kv_heads, 900, width)
    query, scale = random(8, heads, 1, width), width**-0.5
    own, starts, prefix_starts, prefix_lengths = torch.tensor(
        [
            [0, 200, 17, 99, 5, 1, 30, 4], [7, 300, 650, 501, 10, 12, 840, 700],
            [0, 0, 20, 600, 20, 20, 600, 20], [0, 0, 250, 2, 250, 3, 40, 9],
        ], device=device,
    )  # fmt: skip
    batch = PooledMetadata(pool, own, starts, prefix_starts, prefix_lengths, 300, True)
    with attempt() as tried:
        found = FlashDecode(kernel)(batch, 0, query, query, query, scale, None)
    if reason := unfit(tried):
        _log.warning(f"rollout: with the flash attention kernel {reason}; decode steps are slower")
        return False
    expected = decode_attention(batch, 0, query, scale, None, None)
    difference = float((found.float() - expected.float()).abs().max())
    if not difference <= TOLERANCE:
        _log.warning(f"rollout: the flash attention kernel is off by {difference:.2g}; decode steps are slower")
        return False
    return True
