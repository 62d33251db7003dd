"""Attention in blocks of logits against whole fp64 attention with an explicit mask, made column by column."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from dschat_ppo.models import blockwise_attention as module
from dschat_ppo.models.blockwise_attention import Part, blockwise_attention

NOTHING = slice(0, 0)
LAYOUTS = {
    "one part": [Part(slice(0, 40), NOTHING)],
    "uneven parts": [Part(slice(0, 1), NOTHING), Part(slice(1, 34), NOTHING), Part(slice(34, 51), NOTHING)],
    "parts that see others": [
        Part(slice(0, 20), NOTHING), Part(slice(20, 29), slice(3, 17)), Part(slice(29, 60), slice(0, 20)),
    ],
    "several blocks of queries": [Part(slice(0, 300), NOTHING), Part(slice(300, 500), slice(100, 171))],
}  # fmt: skip
# Rounding to bf16 of attention weights, of their gradients, and of the results: each within 2 ** -8
MEAN_ERROR, LARGEST_ERROR = 3e-3, 8e-2


def inputs(rows, columns, heads=4, key_heads=2, width=16):
    generator = torch.Generator().manual_seed(columns)

    def drawn(count):
        shape = rows, columns, count, width  # as projections make them: heads after columns in memory
        return torch.randn(shape, generator=generator).to(torch.bfloat16).transpose(1, 2)

    tensors = drawn(heads), drawn(key_heads), drawn(key_heads)
    return [x.detach().requires_grad_() for x in tensors], drawn(heads)


def visible(parts, columns, window):
    """(columns, columns) bool."""
    seen = torch.zeros(columns, columns, dtype=torch.bool)
    for part in parts:
        order = [*range(part.seen.start, part.seen.stop), *range(part.own.start, part.own.stop)]
        for place, query in enumerate(order[part.seen.stop - part.seen.start :], part.seen.stop - part.seen.start):
            for key in order[: place + 1] if window is None else order[max(0, place + 1 - window) : place + 1]:
                seen[query, key] = True
    return seen


@pytest.mark.parametrize("window", [None, 1, 7, 130])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("rows", [1, 3])
def test_output_and_gradients_are_those_of_whole_attention(layout, rows, window, monkeypatch):
    monkeypatch.setattr(module, "LOGITS", 2**14)  # rows are in several blocks too
    parts = LAYOUTS[layout]
    columns = parts[-1].own.stop
    given, gradient = inputs(rows, columns)
    exact = [x.detach().double().requires_grad_() for x in given]
    mask = visible(parts, columns, window)
    expected = scaled_dot_product_attention(*exact, mask, scale=0.3, enable_gqa=True)
    found = blockwise_attention(*given, parts, window, 0.3)
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    pairs = zip(
        (found, *torch.autograd.grad(found, given, gradient)),
        (expected, *torch.autograd.grad(expected, exact, gradient.double())),
        strict=True,
    )  # fmt: skip
    for ours, whole in pairs:
        error = (ours - whole).abs()
        assert error.mean() < MEAN_ERROR and error.max() < LARGEST_ERROR


def test_the_scale_is_that_of_the_width_by_default():
    given, _ = inputs(1, 12)
    expected = blockwise_attention(*given, [Part(slice(0, 12), NOTHING)], None, 0.25)
    assert torch.equal(blockwise_attention(*given, [Part(slice(0, 12), NOTHING)]), expected)


def test_it_is_as_close_to_exact_attention_as_the_fused_kernel():
    given, gradient = inputs(2, 200)
    exact = [x.detach().double().requires_grad_() for x in given]
    whole = scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    expected = torch.autograd.grad(whole, exact, gradient.double())

    def errors(output):
        found = torch.autograd.grad(output, given, gradient)
        return [float((x - y).abs().mean()) for x, y in zip(found, expected, strict=True)]

    ours = errors(blockwise_attention(*given, [Part(slice(0, 200), NOTHING)]))
    fused = errors(scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True))
    assert all(own < 1.5 * other for own, other in zip(ours, fused, strict=True))


def test_a_large_logit_of_a_hidden_key_changes_nothing():
    """The weight of a hidden key is 0 and not a small number."""
    given, gradient = inputs(1, 40)
    parts = [Part(slice(0, 20), NOTHING), Part(slice(20, 40), NOTHING)]
    before = blockwise_attention(*given, parts)
    changed = [x.detach().clone() for x in given]
    changed[1][:, :, 20:] *= 1000
    changed[2][:, :, 20:] *= 1000
    after = blockwise_attention(*[x.requires_grad_() for x in changed], parts)
    assert torch.equal(before[:, :, :20], after[:, :, :20])
    own = torch.autograd.grad(after[:, :, :20], changed, gradient[:, :, :20])
    assert all(bool((x[:, :, 20:] == 0).all()) for x in own)
