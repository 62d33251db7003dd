"""Attention of one new token over the KV cache by one compiled kernel: CPU, bfloat16.

It takes the place of a write, two products, a softmax and the conversions between them. It reads the slots that hold
tokens, not the whole cache, and keeps scores and weights in fp32.
"""

from __future__ import annotations

from torch import Tensor

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.rollout.attention_metadata import DecodeMetadata, PooledMetadata


class CPUDecode:
    """Attention of decode steps over a `KVCache`."""

    writes_cache = True

    def begin(self) -> None:
        """Nothing is kept from one step to the next."""

    def supports(self, query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> bool:
        """Whether the kernel can be used for a layer."""
        return not softcap and value.shape == key.shape and can_run(query, key, value)

    def can_run(self, batch: DecodeMetadata | PooledMetadata) -> bool:
        """Whether it can be used for a step. Products read a prefix that several rows share once for all of them."""
        return isinstance(batch, DecodeMetadata) and batch.prefix is None

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
