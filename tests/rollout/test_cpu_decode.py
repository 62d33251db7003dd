"""Decode steps by the compiled kernel, inside the attention function of a rollout."""

import pytest
import torch

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.rollout.attention import CPUDecode, RolloutAttention
from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache, PooledMetadata, PrefillMetadata, SharedPrefix


class Layer(torch.nn.Module):
    layer_idx = 0


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def two_batches():
    """Five prompts of eight tokens in two decode batches."""
    return KVCache(3, 32), KVCache(2, 64)


def outputs(attention, window, layout):
    """Of a prefill of each batch, and of two steps of both."""
    caches, found = two_batches(), []
    for number, cache in enumerate(caches):
        rows, places = torch.arange(cache.rows).repeat_interleave(8), torch.arange(8).repeat(cache.rows)
        attention.metadata = PrefillMetadata(cache, rows, places, rows, places)
        states = [
            layout(drawn(cache.rows, heads, 8, 16, seed=10 * number + heads + i)) for i, heads in enumerate((4, 2, 2))
        ]
        found.append(attention(Layer(), *states, None, sliding_window=window)[0])
    for step in range(2):
        slots = torch.tensor([8, 5, 3, 8, 1]) + step
        attention.metadata = [DecodeMetadata(0, caches[0], slots[:3]), DecodeMetadata(3, caches[1], slots[3:])]
        states = [layout(drawn(5, heads, 1, 16, seed=100 + 10 * step + i)) for i, heads in enumerate((4, 2, 2))]
        found.append(attention(Layer(), *states, None, sliding_window=window)[0])
    return found, [cached for cache in caches for cached in (cache.keys[0], cache.values[0])]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    "layout", [lambda x: x, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)], ids=["rows", "columns"]
)
def test_steps_and_caches_are_those_without_the_kernel(window, layout, monkeypatch):
    calls, kernel = [], operations.decode_attention
    monkeypatch.setattr(operations, "decode_attention", lambda *a: calls.append(1) or kernel(*a))
    expected, cached = outputs(RolloutAttention(), window, lambda x: x)
    assert not calls
    found, written = outputs(RolloutAttention(CPUDecode()), window, layout)
    assert len(calls) == 4  # two steps of two batches
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0.03)  # products round to bf16 where the kernel does not
    for ours, plain in zip(written, cached, strict=True):
        assert torch.equal(ours, plain)


def test_what_it_supports():
    kernel, half = CPUDecode(), drawn(1, 2, 1, 16)
    assert kernel.supports(half, half, half, None)
    assert not kernel.supports(half, half, half, 30.0), "a soft cap"
    assert not kernel.supports(half.float(), half.float(), half.float(), None)
    assert not kernel.supports(half, half, half[..., :8], None), "values of another width"
    cache, zero = KVCache(1, 32), torch.zeros(1, dtype=torch.int64)
    assert kernel.can_run(DecodeMetadata(0, cache, zero))
    prefix = SharedPrefix(KVCache(1, 8), zero, zero.unsqueeze(0), zero)
    assert not kernel.can_run(DecodeMetadata(0, cache, zero, prefix)), "products read the prefix once for all rows"
    assert not kernel.can_run(PooledMetadata(KVCache(1, 8), zero, zero, zero, zero, 8, False))
