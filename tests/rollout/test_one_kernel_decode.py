"""Attention of decode steps by one kernel: that of a CPU, and which layers that of a GPU runs. The
latter's numbers: `tests/models/test_gpu_kernels.py`."""

import pytest
import torch
from pretended_gpu import on_gpu, pretended_gpu
from torch import Tensor

from dschat_ppo.rollout import decode_kernels
from dschat_ppo.rollout.decode_kernels import (
    AttentionCall,
    CPUDecode,
    GPUDecode,
    decode_kernel_for,
    products_attention,
)
from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache, PooledMetadata


def decode_batch() -> tuple[DecodeMetadata, Tensor]:
    """3 of the 5 rows of a cache of 16 slots, 4 heads over 2 of 8 numbers; the query."""
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(5, 16)
    cache.keys[3], cache.values[3] = (
        torch.randn(5, 2, 16, 8, generator=generator) for _ in range(2)
    )
    query = torch.randn(3, 4, 1, 8, generator=generator)
    return DecodeMetadata(0, cache, torch.tensor([0, 11, 5])), query


def pooled_batch(shares: bool = True) -> tuple[PooledMetadata, Tensor]:
    """4 rows in a pool of 60 slots: 0 and 2 share 7 tokens in slots 40 to 46; the last one is
    idle."""
    generator = torch.Generator().manual_seed(0)
    pool = KVCache(1, 60)
    pool.keys[3], pool.values[3] = (torch.randn(1, 2, 60, 8, generator=generator) for _ in range(2))
    query = torch.randn(4, 4, 1, 8, generator=generator)
    token_offsets = [[2, 11, 0, 0], [20, 1, 50, 0], [40, 0, 40, 0], [7, 0, 7, 0]]
    own, starts, prefix_starts, prefix_lengths = torch.tensor(token_offsets)
    if not shares:
        prefix_starts, prefix_lengths = torch.zeros_like(starts), torch.zeros_like(starts)
    return PooledMetadata(
        pool, own, starts, prefix_starts, prefix_lengths, length=12, shares=shares
    ), query


@pytest.mark.parametrize("window", [None, 4])
def test_it_equals_products_and_a_softmax_over_the_rows_own_slots(window):
    require_products(*decode_batch(), window)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 9, 10])
def test_it_equals_products_over_own_tokens_and_a_shared_prompt(window, shares):
    require_products(*pooled_batch(shares), window)


def require_products(batch, query: Tensor, window: int | None) -> None:
    """Compare the kernel of a CPU with `products_attention`."""
    call = AttentionCall(3, query, query, query, 0.3, window)
    expected = products_attention(batch, call)
    # which it writes again
    key, value = (cached[range(batch.count), :, batch.newest, None] for cached in batch.read(3))
    compiled = CPUDecode()(batch, call._replace(key=key, value=value))
    torch.testing.assert_close(compiled, expected, atol=1e-5, rtol=1e-5)


def call_of(kv_heads=2, width=8, dtype=torch.bfloat16, **others) -> AttentionCall:
    """Four heads over some, of a GPU."""
    key = on_gpu(torch.zeros(1, kv_heads, 3, width, dtype=dtype))
    query = on_gpu(torch.zeros(1, 4, 3, width, dtype=dtype))
    return AttentionCall(0, query, key, key, 0.3, **others)


def test_layers_that_the_kernel_of_a_gpu_supports(monkeypatch):
    compared = []

    def agree(device, dtype, heads, kv_heads, width):
        compared.append((dtype, heads, kv_heads, width))
        return object() if width != 16 else None

    monkeypatch.setattr(decode_kernels, "_triton_decode_kernels", agree)
    with pretended_gpu():
        supports = GPUDecode().supports
        assert supports(call_of()) and supports(call_of(kv_heads=4, width=12, dtype=torch.float16))
        assert not supports(call_of(width=16)), "its numbers are others"
        assert compared == [
            (torch.bfloat16, 4, 2, 8),
            (torch.float16, 4, 4, 12),
            (torch.bfloat16, 4, 2, 16),
        ]
        for others in ({"softcap": 2.0}, {"sinks": torch.zeros(4)}):
            assert not supports(call_of(**others))
        for shape in ({"width": 264}, {"dtype": torch.float32}):
            assert not supports(call_of(**shape))
        wide = on_gpu(torch.zeros(1, 2, 3, 16).bfloat16())
        assert not supports(call_of()._replace(value=wide))
        assert len(compared) == 3
    on_a_cpu = torch.zeros(1, 2, 3, 8).bfloat16()
    assert not GPUDecode().supports(AttentionCall(0, on_a_cpu, on_a_cpu, on_a_cpu, 0.3))


def test_which_kernel_a_device_has():
    assert isinstance(decode_kernel_for(torch.device("cpu")), CPUDecode)
    assert isinstance(decode_kernel_for(torch.device("cuda")), GPUDecode)
