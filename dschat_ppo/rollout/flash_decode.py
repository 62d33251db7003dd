"""Attention of one new token over the KV cache, with the flash attention kernel in PyTorch: CUDA, half precision.

One kernel takes the place of two products and the passes over their fp32 scores. It reads the slots that hold tokens,
not the whole bucket, and keeps scores in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from dschat_ppo.rollout.attention import DecodeMetadata, decode_attention, decode_mask
from dschat_ppo.rollout.kv_cache import KVCache

_log = logging.getLogger(__name__)

HALF = (torch.float16, torch.bfloat16)
WIDEST_HEAD = 256  # that the kernel supports
TOLERANCE = 0.05  # of outputs of size 1 in half precision, compared with `decode_attention`


# (query, keys, values, numbers, starts, used, longest, scale, window) -> output; see `varlen_kernel`
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, float, int | None], Tensor]


def varlen_kernel(
    query: Tensor, keys: Tensor, values: Tensor, numbers: Tensor, starts: Tensor, used: Tensor, longest: int,
    scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """Attention of N queries, each over its own segment of the keys.

    Without a window, the heads of a query become rows of one product, and a few queries divide their keys among more
    processors. `torch.nn.attention.varlen` wraps the same operator, but adds a kernel to each call.

    Args:
        query: (N, heads, d).
        keys, values: (S, 1, d).
        numbers: (N + 1,) int32, 0, 1, ... N.
        starts: (N + 1,) int32, where each segment begins in `keys`.
        used: (N,) int32, how many keys of each segment take part, from its first one on.
        longest: at least the largest of `used`.
        scale: factor of the scores.
        window: only the last `window` of the used keys take part; None: all.

    Returns:
        (N, heads, d).
    """
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query, keys, values, numbers, starts, 1, longest, 0.0, False, False, scale=scale, seqused_k=used, **sides
    )[0]
    return output


def flash_decode(device: torch.device) -> FlashDecode | None:
    """Flash attention for decode steps on `device`, or None if it has no such kernel."""
    if device.type != "cuda" or torch.version.hip or not torch.backends.cuda.is_flash_attention_available():
        return None
    arguments = torch.ops.aten._flash_attention_forward.default._schema.arguments
    if torch.cuda.get_device_capability(device) < (8, 0) or "seqused_k" not in [a.name for a in arguments]:
        return None
    return FlashDecode(varlen_kernel)


class FlashDecode:
    """Attention of decode steps with `kernel`, for models with heads of `dtypes` that it supports."""

    def __init__(self, kernel: Kernel, dtypes: tuple[torch.dtype, ...] = HALF):
        self._kernel = kernel
        self._dtypes = dtypes
        self._segments: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}  # shared by the layers of a step

    def begin(self) -> None:
        """Forget the rows of the last step."""
        self._segments = {}

    def supports(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float | None) -> bool:
        """Whether the kernel can be used for a layer: query (n, heads, L, d), key and value (n, kv_heads, L, d).

        The first time, the kernel is compared with `decode_attention` on random rows of the same shape.
        """
        width = query.shape[3]
        if softcap or query.dtype not in self._dtypes or width % 8 or width > WIDEST_HEAD or value.shape != key.shape:
            return False
        return _agrees(self._kernel, query.dtype, query.device, query.shape[1], key.shape[1], width, window)

    def __call__(self, batch: DecodeMetadata, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """As `decode_attention`: (count, heads, 1, head_dim) -> (count, heads, head_dim). Not for a shared prefix."""
        keys, values = batch.cache.keys[layer][: batch.count], batch.cache.values[layer][: batch.count]
        count, kv_heads, capacity, width = keys.shape
        if (batch.first, kv_heads) not in self._segments:
            numbers = torch.arange(count * kv_heads + 1, dtype=torch.int32, device=query.device)
            used = batch.slots + 1 if batch.idle is None else (batch.slots + 1).masked_fill(batch.idle, 1)
            segments = numbers, numbers * capacity, used.to(torch.int32).repeat_interleave(kv_heads)
            self._segments[batch.first, kv_heads] = segments
        mixed = self._kernel(
            query.reshape(count * kv_heads, -1, width),  # (count * kv_heads, heads / kv_heads, d)
            keys.view(-1, 1, width),
            values.view(-1, 1, width),
            *self._segments[batch.first, kv_heads],
            batch.length,
            scale,
            None if window is None or window >= batch.length else window,
        )
        return mixed.reshape(count, -1, width)


@cache
def _agrees(
    kernel: Kernel, dtype: torch.dtype, device: torch.device, heads: int, kv_heads: int, width: int, window: int | None
) -> bool:
    """Whether the kernel and `decode_attention` agree on four random rows."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    slots = torch.tensor([0, 200, 17, 99], device=device)
    store = KVCache(4, 256)
    store.keys[0], store.values[0] = random(4, kv_heads, 256, width), random(4, kv_heads, 256, width)
    query, scale = random(4, heads, 1, width), width**-0.5
    batch = DecodeMetadata(0, 4, store, slots, 256, None)
    try:
        found = FlashDecode(kernel)(batch, 0, query, scale, window)
    except RuntimeError as problem:
        _log.warning(f"rollout: the flash attention kernel does not run ({problem}); decode steps are slower")
        return False
    expected = decode_attention(batch, 0, query, decode_mask(batch, window), scale, None)
    difference = float((found.float() - expected.float()).abs().max())
    if not difference <= TOLERANCE:
        _log.warning(f"rollout: the flash attention kernel is off by {difference:.2g}; decode steps are slower")
        return False
    return True
