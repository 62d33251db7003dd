"""Attention by kernels on a CPU against whole fp64 attention with an explicit mask, made column by column."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from dschat_ppo.models.segment_attention import Segments, blockwise_attention

LAYOUTS = {
    "one part": Segments([40]),
    "uneven parts": Segments([1, 33, 17]),
    "parts that see others": Segments([20, 9, 31], ((0, 0), (3, 17), (0, 20))),
    "two groups": Segments([20, 9, 31, 12, 8, 5], ((0, 0), (3, 17), (0, 20), (0, 0), (60, 72), (0, 0))),
    "a later part sees less": Segments([20, 9, 7, 6], ((0, 0), (0, 0), (20, 29), (0, 20))),
    "several blocks of queries": Segments([300, 200], ((0, 0), (100, 171))),
}
# Results are rounded to bf16, within 2 ** -9 of their size; between them all is fp32, but for the output, which the
# backward pass reads rounded.
MEAN_ERROR, LARGEST_ERROR = 2e-3, 5e-2


def inputs(rows, columns, heads=4, key_heads=2, width=16, value_width=16):
    generator = torch.Generator().manual_seed(columns)

    def drawn(count, width):
        shape = rows, columns, count, width  # as projections make them: heads after columns in memory
        return torch.randn(shape, generator=generator).to(torch.bfloat16).transpose(1, 2)

    tensors = drawn(heads, width), drawn(key_heads, width), drawn(key_heads, value_width)
    return [x.detach().requires_grad_() for x in tensors], drawn(heads, value_width)


def visible(parts, window):
    """(columns, columns) bool."""
    columns, start = sum(parts.lengths), 0
    found = torch.zeros(columns, columns, dtype=torch.bool)
    for length, seen in zip(parts.lengths, parts.seen or [(0, 0)] * len(parts.lengths), strict=True):
        before = list(range(*seen))
        order = [*before, *range(start, start + length)]
        for place in range(len(before), len(order)):
            for key in order[: place + 1] if window is None else order[max(0, place + 1 - window) : place + 1]:
                found[order[place], key] = True
        start += length
    return found


@pytest.mark.parametrize(
    ("layout", "firsts"),
    [
        ("one part", [0, 1]),
        ("uneven parts", [0, 1, 2, 3]),
        ("parts that see others", [0, 3]),
        ("two groups", [0, 3, 5, 6]),
        ("a later part sees less", [0, 4]),
    ],
)
def test_a_group_holds_the_parts_that_see_one_another(layout, firsts):
    assert LAYOUTS[layout].groups.tolist() == firsts


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("rows", [3])
@pytest.mark.parametrize(("width", "value_width"), [(16, 16), (24, 40)], ids=["16", "24 and 40"])
def test_output_and_gradients_are_those_of_whole_attention(layout, rows, window, width, value_width):
    parts = LAYOUTS[layout]
    columns = sum(parts.lengths)
    given, gradient = inputs(rows, columns, width=width, value_width=value_width)
    exact = [x.detach().double().requires_grad_() for x in given]
    mask = visible(parts, window)
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


def test_it_is_as_close_to_exact_attention_as_the_fused_kernel():
    given, gradient = inputs(2, 200)
    exact = [x.detach().double().requires_grad_() for x in given]
    whole = scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    expected = torch.autograd.grad(whole, exact, gradient.double())

    def errors(output):
        found = torch.autograd.grad(output, given, gradient)
        return [float((x - y).abs().mean()) for x, y in zip(found, expected, strict=True)]

    ours = errors(blockwise_attention(*given, Segments([200])))
    fused = errors(scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True))
    assert all(own < 1.5 * other for own, other in zip(ours, fused, strict=True))


@pytest.mark.parametrize("parts", [Segments([20, 20]), Segments([40])], ids=["another part", "later in the part"])
def test_a_large_logit_of_a_hidden_key_changes_nothing(parts):
    """The weight of a hidden key is 0 and not a small number."""
    given, gradient = inputs(1, 40)
    before = blockwise_attention(*given, parts)
    changed = [x.detach().clone() for x in given]
    changed[1][:, :, 20:] *= 1000
    changed[2][:, :, 20:] *= 1000
    after = blockwise_attention(*[x.requires_grad_() for x in changed], parts)
    assert torch.equal(before[:, :, :20], after[:, :, :20])
    own = torch.autograd.grad(after[:, :, :20], changed, gradient[:, :, :20])
    assert all(bool((x[:, :, 20:] == 0).all()) for x in own)
