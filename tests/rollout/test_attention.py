"""Attention over the KV cache against a plain softmax over each row's own tokens, and how it is installed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dschat_ppo.models.probes import UnsupportedAttentionError
from dschat_ppo.rollout.attention import RolloutAttention, causal_attention
from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache, PooledMetadata, PrefillMetadata
from dschat_ppo.rollout.running_batches import DecodeBatch

HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3
MODULE = SimpleNamespace(layer_idx=0)
KINDS = [(None, None), (3, None), (None, 2.0), (3, 2.0)]  # window, soft cap


def plain_attention(query, keys, values, window, softcap):
    """(heads, d) query of the last token, (kv_heads, n, d) keys and values -> (heads, d), in fp64."""
    output = []
    for head in range(HEADS):
        k, v = keys[head * KV_HEADS // HEADS].double(), values[head * KV_HEADS // HEADS].double()
        scores = k @ query[head].double() * SCALE
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if window:
            scores[: max(0, len(scores) - window)] = float("-inf")
        output.append(torch.softmax(scores, dim=0) @ v)
    return torch.stack(output).float()


def random(*shape, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("window", "softcap"), KINDS)
def test_prefill_is_causal_attention_and_fills_the_cache(window, softcap):
    query, key = random(2, HEADS, 6, WIDTH, seed=0), random(2, KV_HEADS, 6, WIDTH, seed=1)
    value, cache, attention = random(2, KV_HEADS, 6, WIDTH, seed=2), KVCache(3, 9), RolloutAttention()
    rows, places = torch.tensor([2, 0, 1]).repeat_interleave(6), torch.arange(6).repeat(3)
    source = torch.tensor([0, 1, 0]).repeat_interleave(6)
    attention.metadata = PrefillMetadata(cache, rows, places + 2, source, places)
    found, _ = attention(MODULE, query, key, value, None, SCALE, sliding_window=window, softcap=softcap)
    for row in range(2):
        for place in range(6):
            past = slice(0, place + 1)
            expected = plain_attention(query[row, :, place], key[row, :, past], value[row, :, past], window, softcap)
            torch.testing.assert_close(found[row, place], expected, atol=1e-5, rtol=1e-5)
    for row, source in enumerate((1, 0, 0)):
        assert torch.equal(cache.keys[0][row, :, 2:8], key[source])
        assert torch.equal(cache.values[0][row, :, 2:8], value[source])
    assert attention.windows == {0: window}


@pytest.mark.parametrize(("window", "softcap"), KINDS)
@pytest.mark.parametrize("shared", [False, True])
def test_a_decode_step_attends_to_the_tokens_of_each_row(window, softcap, shared):
    """Two batches in one step: rows of 1, 5 and 3 own tokens, which may share two prefixes, and a row of 2 tokens."""
    attention, own, lengths, prefix_rows = RolloutAttention(), [1, 5, 3], [4, 2, 4], [1, 0, 1]
    past = [(random(KV_HEADS, n, WIDTH, seed=n), random(KV_HEADS, n, WIDTH, seed=n + 10)) for n in (*own, 2)]
    prefixes = [(random(KV_HEADS, 4, WIDTH, seed=n), random(KV_HEADS, 4, WIDTH, seed=n + 1)) for n in (30, 40)]
    zeros = np.zeros(3, dtype=np.int64)
    batches = [
        DecodeBatch(filled(KVCache(4, 8), past[:3]), zeros, np.array(own), zeros, zeros),
        DecodeBatch(filled(KVCache(1, 3), past[3:]), zeros[:1], np.array([2]), zeros[:1], zeros[:1]),
    ]
    if shared:
        batches[0].prefix = filled(KVCache(2, 4), prefixes)
        batches[0].prefix_lengths, batches[0].prefix_rows = np.array(lengths), np.array(prefix_rows)
        batches[0].positions = batches[0].positions + lengths
    query, key = random(4, HEADS, 1, WIDTH, seed=3), random(4, KV_HEADS, 1, WIDTH, seed=4)
    value = random(4, KV_HEADS, 1, WIDTH, seed=5)
    attention.metadata = [
        DecodeMetadata(3 * n, b.cache, torch.from_numpy(b.slots), b.shared_prefix(torch.device("cpu")))
        for n, b in enumerate(batches)
    ]
    found, _ = attention(MODULE, query, key, value, None, SCALE, sliding_window=window, softcap=softcap)
    assert found.shape == (4, 1, HEADS, WIDTH)
    for row in range(4):
        parts = [past[row], (key[row], value[row])]
        if shared and row < 3:
            parts.insert(0, tuple(part[:, : lengths[row]] for part in prefixes[prefix_rows[row]]))
        keys, values = (torch.cat([part[kind] for part in parts], dim=1) for kind in (0, 1))
        expected = plain_attention(query[row, :, 0], keys, values, window, softcap)
        torch.testing.assert_close(found[row, 0], expected, atol=1e-5, rtol=1e-5)


class Writes(TorchDispatchMode):
    """Notes the operations that write to a cache: their names and arguments."""

    def __init__(self, cache: KVCache):
        super().__init__()
        self.storages = {part.untyped_storage().data_ptr() for part in (*cache.keys.values(), *cache.values.values())}
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.is_mutable and args[0].untyped_storage().data_ptr() in self.storages:
            self.found.append((function.overloadpacket.__name__, args))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["prefill", "rows", "pool"])
def test_tokens_are_written_as_lines_of_a_matrix(kind):
    """Deterministic kernels of a GPU copy a whole layer if the indexed dimensions are not its first ones. The layers of
    a step share the index."""
    tokens, attention, zeros = torch.tensor([4, 7]), RolloutAttention(), torch.zeros(2, dtype=torch.int64)
    cache, states = KVCache(2, 9), [random(2, heads, 1, WIDTH, seed=0) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    for layer in (0, 1):
        cache.layer(layer, *states[1:])
    attention.metadata = {
        "prefill": PrefillMetadata(cache, torch.arange(2), tokens, torch.arange(2), zeros),
        "rows": [DecodeMetadata(0, cache, tokens)],
        "pool": [PooledMetadata(cache, tokens, zeros, zeros, zeros, 9, False)],
    }[kind]
    with Writes(cache) as writes:
        for layer in (0, 1):
            attention(SimpleNamespace(layer_idx=layer), *states, None, SCALE)
    assert [(name, args[0].shape, args[1]) for name, args in writes.found] == [
        ("index_copy_", (2 * KV_HEADS * 9, WIDTH), 0)
    ] * 4
    assert all(args[0].is_contiguous() and args[2] is writes.found[0][1][2] for _, args in writes.found)


def filled(cache: KVCache, rows) -> KVCache:
    for row, (keys, values) in enumerate(rows):
        for cached, states in zip(cache.layer(0, keys.unsqueeze(0), values.unsqueeze(0)), (keys, values), strict=True):
            cached[row, :, : states.shape[1]] = states
    return cache


@pytest.mark.parametrize(("window", "softcap"), KINDS)
def test_a_decode_step_attends_to_the_tokens_of_each_row_in_a_pool(window, softcap):
    """Rows 0 and 2 share a prompt of 4 tokens in slots 20 to 23; row 3 is idle. The rest of the pool is not finite."""
    own, prefixes, starts = [1, 5, 3, 0], [4, 0, 4, 0], [30, 1, 10, 0]
    pool, attention = KVCache(1, 40), RolloutAttention()
    pool.keys[0], pool.values[0] = (torch.full((1, KV_HEADS, 40, WIDTH), float("nan")) for _ in range(2))
    pasts = [(random(KV_HEADS, n, WIDTH, seed=n), random(KV_HEADS, n, WIDTH, seed=n + 10)) for n in (*own, 4)]
    for start, length, past in zip((*starts, 20), (*own, 4), pasts, strict=True):
        pool.keys[0][0, :, start : start + length], pool.values[0][0, :, start : start + length] = past
    query, key = random(4, HEADS, 1, WIDTH, seed=3), random(4, KV_HEADS, 1, WIDTH, seed=4)
    value = random(4, KV_HEADS, 1, WIDTH, seed=5)
    prefix_starts = torch.tensor([20, 0, 20, 0])
    attention.metadata = [
        PooledMetadata(pool, torch.tensor(own), torch.tensor(starts), prefix_starts, torch.tensor(prefixes), 9, True)
    ]
    found, _ = attention(MODULE, query, key, value, None, SCALE, sliding_window=window, softcap=softcap)
    for row in range(3):
        parts = [pasts[row], (key[row], value[row])]
        if prefixes[row]:
            parts.insert(0, pasts[4])
        keys, values = (torch.cat([part[kind] for part in parts], dim=1) for kind in (0, 1))
        expected = plain_attention(query[row, :, 0], keys, values, window, softcap)
        torch.testing.assert_close(found[row, 0], expected, atol=1e-5, rtol=1e-5)
    assert found.isfinite().all()


def test_causal_attention_in_half_precision_does_not_overflow():
    """Products of 300 x 300 x 8 are beyond fp16, their scaled sums are not."""
    query = torch.full((1, 2, 3, 8), 300.0, dtype=torch.float16)
    found = causal_attention(query, query, torch.ones_like(query), 1 / 1024, None, 50.0)
    assert torch.equal(found, torch.ones_like(found))


IGNORED = ("s_aux", "position_bias", "sinks", "indices", "block_indices")  # as 0 they would change no number


@pytest.mark.parametrize("extra", [{"is_causal": False}, *({name: torch.zeros(1)} for name in IGNORED)], ids=str)
def test_arguments_that_the_engine_would_ignore_are_refused(extra):
    tensors = (random(1, HEADS, 1, WIDTH, seed=0), *(random(1, KV_HEADS, 1, WIDTH, seed=1),) * 2)
    with pytest.raises(UnsupportedAttentionError, match="SimpleNamespace needs"):
        RolloutAttention()(MODULE, *tensors, None, **extra)


def test_masks_and_attention_that_is_not_causal_are_refused():
    tensors = (random(1, HEADS, 1, WIDTH, seed=0), *(random(1, KV_HEADS, 1, WIDTH, seed=1),) * 2)
    with pytest.raises(UnsupportedAttentionError):
        RolloutAttention()(MODULE, *tensors, torch.zeros(1))
    with pytest.raises(UnsupportedAttentionError):
        RolloutAttention()(SimpleNamespace(layer_idx=0, is_causal=False), *tensors, None)
