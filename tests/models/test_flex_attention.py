"""The keys that flex attention sees, and its numbers. On a CPU, PyTorch runs it with products and a softmax."""

import threading

import pytest
import torch
from torch.nn.attention import flex_attention as of_torch

from dschat_ppo.models import flex_attention as flex
from dschat_ppo.models.flex_attention import BlockMasks, blocks_of_keys, flex_attention, visible_keys
from dschat_ppo.models.segment_attention import Segments, _eager_attention, segment_by_segment

CPU = torch.device("cpu")


@pytest.fixture
def with_gradients(monkeypatch):
    """PyTorch's own operations for a CPU have gradients, which it does not offer there."""
    monkeypatch.setattr(of_torch, "_validate_device", lambda *_: None, raising=False)


def seen_by(lengths, seen, window) -> torch.Tensor:
    """(N, N) bool, by loops: a query sees its segment up to itself after the shared beginning, `window` keys in all."""
    total = sum(lengths)
    sees = torch.zeros(total, total, dtype=torch.bool)
    start = 0
    for length, (first, last) in zip(lengths, seen or [(0, 0)] * len(lengths), strict=True):
        for token in range(start, start + length):
            keys = [*range(first, last), *range(start, token + 1)]
            for key in keys[-window:] if window else keys:
                sees[token, key] = True
        start += length
    return sees


LAYOUTS = {
    "one": ([9], None),
    "separate": ([9, 1, 6], None),
    "shared": ([9, 4, 3, 5, 1], [(0, 0), (0, 6), (0, 6), (9, 9), (16, 18)]),
    "long": ([300, 40, 130, 90, 200], [(0, 0), (0, 250), (0, 250), (470, 470), (470, 510)]),
}


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_query_sees_its_keys_and_no_other(name, window):
    lengths, seen = LAYOUTS[name]
    expected = seen_by(lengths, seen, window)
    mask = BlockMasks(lengths, seen, CPU).of(window)
    token = torch.arange(sum(lengths))
    found = mask.mask_mod(torch.tensor(0), torch.tensor(0), token.unsqueeze(1), token)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_that_a_kernel_leaves_out_or_takes_whole(name, window):
    lengths, seen = LAYOUTS[name]
    expected, total = seen_by(lengths, seen, window), sum(lengths)
    of_tokens = BlockMasks(lengths, seen, CPU)._of_tokens
    some, whole = blocks_of_keys(*visible_keys(*of_tokens, window))
    blocks = -(-total // flex.BLOCK)
    for row in range(blocks):
        for column in range(blocks):
            queries, keys = (slice(n * flex.BLOCK, (n + 1) * flex.BLOCK) for n in (row, column))
            part = expected[queries, keys]
            whole_part = bool(part.all()) and part.shape[1] == flex.BLOCK
            assert bool(some[row, column] | whole[row, column]) is bool(part.any())
            assert not whole[row, column] or whole_part
            if whole_part and name == "one":
                assert whole[row, column]
    mask = BlockMasks(lengths, seen, CPU).of(window)
    assert mask.shape == (1, 1, total, total)
    assert mask.kv_num_blocks[0, 0].tolist() == some.sum(dim=1).tolist()
    for row, count in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
        assert mask.full_kv_indices[0, 0, row, :count].tolist() == whole[row].nonzero().flatten().tolist()


def heads(total, count=4, kv_heads=2, width=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, total, width, generator=generator, requires_grad=True)
            for n in (count, kv_heads, kv_heads)]  # fmt: skip


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (1.5, False), (None, True), (1.5, True)])
def test_numbers_and_gradients_are_those_of_products_and_a_softmax(with_gradients, softcap, sinks, kv_heads):
    lengths, seen = LAYOUTS["shared"]
    query, key, value = heads(sum(lengths), kv_heads=kv_heads)
    extra = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True) if sinks else None
    inputs = [query, key, value, *([] if extra is None else [extra])]
    found = flex_attention(query, key, value, BlockMasks(lengths, seen, CPU).of(3), 0.4, softcap, extra)
    module = torch.nn.Module().eval()
    options = {"scaling": 0.4, "softcap": softcap, "s_aux": extra}
    expected = segment_by_segment(module, query, key, value, Segments(lengths, seen), 3, options, eager=True)
    expected = expected.transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    weights = torch.linspace(-1, 1, found.numel()).view(found.shape)
    gradients = [torch.autograd.grad((weights * part).sum(), inputs) for part in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_models_with_other_soft_caps_and_scalings_in_one_process(with_gradients):
    """PyTorch compiles the function that changes scores; it must not hold such a number."""
    lengths, module = [9, 4], torch.nn.Module().eval()
    query, key, value = heads(sum(lengths))
    for scaling, softcap in ((0.4, 1.5), (0.3, 50.0), (None, 3.0), (8**-0.5, None), (0.2, None), (0.1, 7.0)):
        found = flex_attention(query, key, value, BlockMasks(lengths, None, CPU).of(None), scaling, softcap)
        options = {"scaling": scaling, "softcap": softcap}
        expected = segment_by_segment(module, query, key, value, Segments(lengths), None, options, eager=True)
        torch.testing.assert_close(found, expected.transpose(1, 2), rtol=0, atol=1e-5)


def test_the_eager_oracle_itself_by_hand():
    """Two keys with logits 0 and ln 3, so shares of 1/4 and 3/4; with a sink of ln 4: 1/8 and 3/8."""
    query, key = torch.ones(1, 1, 1, 1), torch.tensor([0.0, torch.log(torch.tensor(3.0))]).view(1, 1, 2, 1)
    value = torch.tensor([8.0, 16.0]).view(1, 1, 2, 1)
    module = torch.nn.Module().eval()
    for sink, expected in ((None, 14.0), (torch.log(torch.tensor([4.0])), 7.0)):
        found = _eager_attention(module, query, key, value, None, 1.0, s_aux=sink)
        torch.testing.assert_close(found, torch.full((1, 1, 1, 1), expected))


def test_a_gpu_runs_a_compiled_kernel_in_every_thread(monkeypatch):
    """Its limit of kernels is a setting of each thread."""
    compiled, limits = [], []
    monkeypatch.setattr(torch, "compile", lambda function, fullgraph: compiled.append((function, fullgraph)) or "it")
    flex._compiled.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=8):

        def use():
            assert flex._kernel(on_gpu=True) == "it"
            limits.append(torch._dynamo.config.recompile_limit)

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        use()
    flex._compiled.cache_clear()
    assert limits == [flex.MOST_KERNELS] * 2
    assert compiled == [(of_torch.flex_attention, True)]
    assert flex._kernel(on_gpu=False) is of_torch.flex_attention
