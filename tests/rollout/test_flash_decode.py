"""Flash attention for decode steps, with a loop over the rows in place of the GPU's kernel."""

import logging

import pytest
import torch
from generation import assert_same, run
from looping_kernel import LoopingKernel, flash_with
from tiny_models import LENGTHS
from torch import Tensor

from dschat_ppo.rollout import continuous_batching, decode_kernels
from dschat_ppo.rollout.decode_kernels import (
    AttentionCall,
    CPUDecode,
    KeySegments,
    flash_segments,
    products_attention,
)
from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache, PooledMetadata
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria


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
    places = [[2, 11, 0, 0], [20, 1, 50, 0], [40, 0, 40, 0], [7, 0, 7, 0]]
    own, starts, prefix_starts, prefix_lengths = torch.tensor(places)
    if not shares:
        prefix_starts, prefix_lengths = torch.zeros_like(starts), torch.zeros_like(starts)
    return PooledMetadata(
        pool, own, starts, prefix_starts, prefix_lengths, length=12, shares=shares
    ), query


@pytest.mark.parametrize(
    ("window", "starts", "used"),  # of each row and head
    [
        (None, [0, 16, 32, 48, 64, 80], [1, 1, 12, 12, 6, 6]),
        (4, [0, 16, 40, 56, 66, 82], [1, 1, 4, 4, 4, 4]),
    ],
)
def test_it_equals_products_and_a_softmax_over_the_rows_own_slots(window, starts, used):
    batch, query = decode_batch()
    assert check(batch, query, window) == (starts, used, 16)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 9, 10])
def test_it_equals_products_over_own_tokens_and_a_shared_prompt(window, shares):
    starts, used, _ = check(*pooled_batch(shares), window)
    assert len(used) == 4 * 2 * (1 + shares)
    # of each row and head: own tokens, then the prompt, or own tokens again
    if shares and window is None:
        assert starts == [20, 80, 1, 61, 50, 110, 0, 60, 40, 100, 1, 61, 40, 100, 0, 60]
        assert used == [3, 3, 12, 12, 1, 1, 1, 1, 7, 7, 12, 12, 7, 7, 1, 1]
    if shares and window == 5:  # row 0 sees 2 tokens of the prompt, row 2 sees 4
        assert starts[8:] == [45, 105, 8, 68, 43, 103, 0, 60]
        assert used[8:] == [2, 2, 5, 5, 4, 4, 1, 1]


def check(batch, query: Tensor, window: int | None) -> tuple[list[int], list[int], int]:
    """Compare it and the kernel of a CPU with `products_attention`; returns what the kernel was
    asked for."""
    kernel, call = LoopingKernel(), AttentionCall(3, query, query, query, 0.3, window)
    expected = products_attention(batch, call)
    found = flash_with(kernel)(batch, call)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # which it writes again
    key, value = (part[range(batch.count), :, batch.newest, None] for part in batch.read(3))
    compiled = CPUDecode()(batch, call._replace(key=key, value=value))
    torch.testing.assert_close(compiled, expected, atol=1e-5, rtol=1e-5)
    (asked,) = kernel.calls
    return asked


# Which layers use it


def call_of(count=4, kv_heads=2, width=8, dtype=torch.float32, **others) -> AttentionCall:
    key = torch.zeros(1, kv_heads, 3, width, dtype=dtype)
    query = torch.zeros(1, count, 3, width, dtype=dtype)
    return AttentionCall(0, query, key, key, 0.3, **others)


def test_layers_that_the_kernel_supports():
    attention = flash_with(LoopingKernel())
    assert attention.supports(call_of()) and attention.supports(call_of(kv_heads=4))
    for others in ({"softcap": 2.0}, {"sinks": torch.zeros(4)}):
        assert not attention.supports(call_of(**others))
    for shape in ({"width": 12}, {"width": 264}, {"dtype": torch.float16}):
        assert not attention.supports(call_of(**shape))


def ignores_used(query, keys, values, segments, scale):
    longer = segments._replace(used=segments.used.clamp_min(40))
    return LoopingKernel()(query, keys, values, longer, scale)


def sums_of_base_2(*arguments):
    output, log_sums = LoopingKernel()(*arguments)
    return output, log_sums / 0.6931


def fails(*arguments):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


@pytest.mark.parametrize(
    ("kernel", "words"), [(ignores_used, "off by"), (sums_of_base_2, "off by"), (fails, "Ampere")]
)
def test_a_kernel_that_fails_or_gives_other_numbers_is_not_used(kernel, words, caplog):
    for _ in range(2):
        assert not flash_with(kernel).supports(call_of())
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert words in record.getMessage()


def test_a_cpu_and_an_old_gpu_have_no_kernel(monkeypatch):
    assert decode_kernels.flash_decode(torch.device("cpu")) is None
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for capability, expected in (((7, 5), False), ((8, 0), True), ((12, 0), True)):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, answer=capability: answer
        )
        assert (decode_kernels.flash_decode(torch.device("cuda")) is not None) is expected


def test_the_operator_of_this_torch_takes_the_arguments():
    numbers, keys = (
        torch.zeros(7, dtype=torch.int32, device="meta"),
        torch.empty(60, 1, 8, device="meta").bfloat16(),
    )
    query = torch.empty(6, 2, 8, dtype=torch.bfloat16, device="meta")
    segments = KeySegments(numbers, numbers, numbers[:6], 10)
    output, log_sums = flash_segments(query, keys, keys, segments, 0.3)
    assert output.shape == query.shape
    assert (log_sums.shape, log_sums.dtype) == ((2, 6), torch.float32)


# Generation


@pytest.mark.parametrize(
    "how", [{"static": True}, {"static": True, "samples": 3}, {"static": False, "samples": 3}]
)
@pytest.mark.parametrize(
    ("name", "flash"),
    [
        ("mistral-window", True),
        *(
            pytest.param(*case, marks=pytest.mark.release)
            for case in (("llama", True), ("gemma2", False))
        ),
    ],
)
def test_answers_are_those_of_products(name, flash, how, monkeypatch):
    """Gemma 2 caps its scores, which the kernel does not. Without static steps, a shared prompt is
    read by products."""
    monkeypatch.setattr(continuous_batching, "MIN_SHARED_TOKENS", 8)
    settings = {
        "sampling": SamplingParameters(1.3),
        "stopping": StoppingCriteria(10, eos_ids=(3, 9)),
        **how,
    }
    kernel, expected = LoopingKernel(), run(name, rows=5, **settings)
    monkeypatch.setattr(continuous_batching, "flash_decode", lambda device: flash_with(kernel))
    decode_kernels._agrees.cache_clear()
    assert_same(run(name, rows=5, **settings), expected)
    assert (len(kernel.calls) > 10) is flash
    if how["static"] and flash:  # lengths are no buckets: one graph for each number of rows
        width = max(LENGTHS) + 10 + 8 + 1
        assert {longest for _, _, longest in kernel.calls if longest != 300} == {width}
        # 4 or 5 rows, 2 heads, own and prompt
        doubled = {len(used) for _, used, _ in kernel.calls[2:]} & {16, 20}
        assert bool(doubled) is ("samples" in how)
