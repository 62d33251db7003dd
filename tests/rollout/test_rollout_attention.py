"""What the attention of a rollout refuses, and decode steps by the compiled kernel. Its numbers are
those of whole rows for each architecture (`test_rollout_architectures.py`)."""

from types import SimpleNamespace

import pytest
import torch

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.models.backbone import UnsupportedAttentionError
from dschat_ppo.rollout.attention import RolloutAttention, prefill_attention
from dschat_ppo.rollout.decode_kernels import AttentionCall, CPUDecode
from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache, PrefillMetadata

MODULE = SimpleNamespace(layer_idx=0)


def random(*shape, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_causal_attention_in_half_precision_does_not_overflow():
    """Products of 300 x 300 x 8 are beyond fp16, their scaled sums are not."""
    query = torch.full((1, 2, 3, 8), 300.0, dtype=torch.float16)
    call = AttentionCall(0, query, query, torch.ones_like(query), 1 / 1024, softcap=50.0)
    found = prefill_attention(call)
    assert torch.equal(found, torch.ones_like(found))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("window", [None, 4, 9])
def test_a_sink_is_one_more_score_of_each_softmax(window, dtype, atol):
    """GPT-OSS; on a CPU in bf16 by the compiled kernel."""
    query, sinks = random(2, 4, 9, 8, seed=0).to(dtype), random(4, seed=3).to(dtype)
    key, value = (random(2, 2, 9, 8, seed=seed).to(dtype) for seed in (1, 2))
    found = prefill_attention(AttentionCall(0, query, key, value, 0.3, window, sinks=sinks))
    scores = query.double() @ key.double().repeat_interleave(2, dim=1).transpose(2, 3) * 0.3
    for row in range(9):
        for column in range(9):
            if not 0 <= row - column < (window or 9):
                scores[:, :, row, column] = -torch.inf
    scores = torch.cat([scores, sinks.double().view(1, 4, 1, 1).expand(2, 4, 9, 1)], dim=3)
    expected = scores.softmax(dim=3)[..., :-1] @ value.double().repeat_interleave(2, dim=1)
    torch.testing.assert_close(found.double(), expected, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"),
    [
        (None, None, False),
        (3, None, False),
        (None, 2.0, False),
        (3, 2.0, False),
        (None, None, True),
        (3, None, True),
    ],
)
def test_tokens_after_others_see_what_they_see_in_a_whole_row(window, softcap, has_sinks):
    """`newest`: here three tokens of two rows, the second of which has one after two; keys after
    them are not seen."""
    query, sinks = random(2, 4, 9, 8, seed=0), random(4, seed=3) if has_sinks else None
    key, value = (random(2, 2, 9, 8, seed=seed) for seed in (1, 2))
    call = AttentionCall(0, query, key, value, 0.3, window, softcap, sinks)
    whole = prefill_attention(call)
    newest = torch.tensor([[5, 6, 7], [2, 2, 2]])
    chosen = newest.view(2, 1, 3, 1).expand(2, 4, 3, 8)
    found = prefill_attention(call._replace(query=query.gather(2, chosen)), newest)
    torch.testing.assert_close(found, whole.gather(2, chosen), atol=2e-6, rtol=0)


NOT_CAUSAL = SimpleNamespace(layer_idx=0, is_causal=False)
IGNORED = ("position_bias", "sinks", "indices", "block_indices")  # as 0 they would change no number


@pytest.mark.parametrize(
    ("module", "mask", "extra"),
    [
        (MODULE, None, {"is_causal": False}),
        (NOT_CAUSAL, None, {}),
        (MODULE, torch.zeros(1), {}),
        *((MODULE, None, {name: torch.zeros(1)}) for name in IGNORED),
    ],
)
def test_arguments_that_the_engine_would_ignore_are_refused(module, mask, extra):
    tensors = (random(1, 4, 1, 8, seed=0), *(random(1, 2, 1, 8, seed=1),) * 2)
    with pytest.raises(UnsupportedAttentionError, match="SimpleNamespace needs"):
        RolloutAttention()(module, *tensors, mask, **extra)


# The compiled kernel


def halves(*shape, seed=0):
    return random(*shape, seed=seed).bfloat16()


def outputs(attention, window, layout):
    """Of a prefill of five prompts of eight tokens in two batches, and of two steps of both; and
    the caches."""
    caches, found = (KVCache(3, 32), KVCache(2, 64)), []
    for number, cache in enumerate(caches):
        rows, places = (
            torch.arange(cache.rows).repeat_interleave(8),
            torch.arange(8).repeat(cache.rows),
        )
        attention.metadata = PrefillMetadata(cache, rows, places, rows, places)
        states = [
            layout(halves(cache.rows, n, 8, 16, seed=10 * number + n + i))
            for i, n in enumerate((4, 2, 2))
        ]
        found.append(attention(MODULE, *states, None, sliding_window=window)[0])
    for step in range(2):
        slots = torch.tensor([8, 5, 3, 8, 1]) + step
        attention.metadata = [
            DecodeMetadata(0, caches[0], slots[:3]),
            DecodeMetadata(3, caches[1], slots[3:]),
        ]
        states = [
            layout(halves(5, n, 1, 16, seed=100 + 10 * step + i)) for i, n in enumerate((4, 2, 2))
        ]
        found.append(attention(MODULE, *states, None, sliding_window=window)[0])
    return found, [cached for cache in caches for cached in (cache.keys[0], cache.values[0])]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    "layout",
    [lambda x: x, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)],
    ids=["rows", "columns"],
)
def test_steps_and_caches_of_the_compiled_kernel_are_those_without_it(window, layout, monkeypatch):
    calls, kernel = [], operations.decode_attention
    monkeypatch.setattr(operations, "decode_attention", lambda *a: calls.append(1) or kernel(*a))
    expected, cached = outputs(RolloutAttention(), window, lambda x: x)
    assert not calls
    found, written = outputs(RolloutAttention(CPUDecode()), window, layout)
    assert len(calls) == 4  # two steps of two batches
    for ours, plain in zip(found, expected, strict=True):
        # products round to bf16 where the kernel does not
        torch.testing.assert_close(ours, plain, rtol=0, atol=0.03)
    assert all(map(torch.equal, written, cached))


def test_what_the_compiled_kernel_supports():
    kernel, half = CPUDecode(), halves(1, 2, 1, 16)
    call = AttentionCall(0, half, half, half, 0.25)
    assert kernel.supports(call)
    assert not kernel.supports(call._replace(softcap=30.0))
    assert not kernel.supports(call._replace(sinks=half[0, :, 0, 0]))
    assert not kernel.supports(AttentionCall(0, half.half(), half.half(), half.half(), 0.25))
    assert not kernel.supports(call._replace(value=half[..., :8])), "values of another width"
