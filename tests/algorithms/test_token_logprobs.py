"""Log-probs and entropies of tokens: against numpy in fp64, and fused with the head against whole
logits."""

import math

import numpy as np
import pytest
import torch

from dschat_ppo.algorithms import fused_logprobs
from dschat_ppo.algorithms.fused_logprobs import (
    Forbidden,
    Head,
    OutputLayer,
    fused_token_scores,
    token_entropy,
    token_logprobs,
)


def numpy_log_softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits.astype(np.float64) / temperature
    largest = scaled.max(axis=-1, keepdims=True)
    return scaled - largest - np.log(np.exp(scaled - largest).sum(axis=-1, keepdims=True))


def random_logits(dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_match_numpy_log_softmax(temperature, dtype):
    logits = random_logits(dtype)
    tokens = torch.randint(0, 11, (3, 4), generator=torch.Generator().manual_seed(1))
    table = numpy_log_softmax(logits.float().numpy(), temperature)
    expected = np.take_along_axis(table, tokens.numpy()[..., None], axis=-1)[..., 0]
    result = token_logprobs(logits, tokens, temperature)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_is_minus_sum_p_log_p(temperature, dtype):
    logits = random_logits(dtype)
    table = numpy_log_softmax(logits.float().numpy(), temperature)
    result = token_entropy(logits, temperature)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(
        result.numpy(), -(np.exp(table) * table).sum(axis=-1), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_of_probability_zero_add_nothing(temperature):
    low = -math.inf
    logits = torch.tensor([[low, math.log(1.0), low, math.log(3.0)]], requires_grad=True)
    others = torch.tensor([[math.log(1.0), math.log(3.0)]], requires_grad=True)
    p = 1 / 4 if temperature == 1 else 1 / 10  # at temperature 0.5 the weights are 1 and 9
    entropy = token_entropy(logits, temperature)
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    for score in (token_entropy, lambda x, t: token_logprobs(x, torch.tensor([x.shape[1] - 1]), t)):
        [found], [expected] = (
            torch.autograd.grad(score(x, temperature).sum(), x) for x in (logits, others)
        )
        assert found[0, [0, 2]].tolist() == [0.0, 0.0]
        torch.testing.assert_close(found[0, [1, 3]], expected[0])


# Straight from hidden states


N, H, V = 37, 16, 1000
HEADS = {
    "plain": Head(),
    "softcap": Head(softcap=3.0),
    "scale": Head(scale=0.125),
    "both": Head(scale=2.0, softcap=5.0),
}


def inputs(dtype=torch.float32, with_bias=False, count=N):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, H, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(V, H, generator=generator) / 2).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=generator).to(dtype).requires_grad_() if with_bias else None
    return hidden, weight, bias, torch.randint(0, V, (count,), generator=generator)


def whole(hidden, weight, bias, tokens, temperature, head):
    """The same by logits as a whole."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return token_logprobs(logits, tokens, temperature), token_entropy(logits, temperature)


def gradients(scores, leaves):
    """Of a sum of both outputs with uneven weights."""
    logprobs, entropy = scores
    weights = torch.linspace(-1, 2, len(logprobs))
    total = (weights * logprobs).sum() + (weights.flip(0) * entropy).sum()
    return torch.autograd.grad(total, leaves)


def require_equal(found, expected, leaves) -> None:
    """The same values, in fp32, and the same gradients."""
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    for a, b in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@pytest.fixture
def narrow(monkeypatch):
    """Blocks so narrow that the vocabulary falls into many, the last of them short."""
    monkeypatch.setattr(fused_logprobs, "SMALLEST_BLOCK", 1)
    return 4 * N * 300


@pytest.mark.parametrize("rows", [N, 3])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_forbidden_tokens_have_no_probability_where_they_are_forbidden(narrow, head, rows):
    """Against whole logits with -inf there; the forbidden tokens are in two blocks, and one of them
    is very likely. Token 12 is forbidden everywhere."""
    hidden, weight, _, tokens = inputs()
    with torch.no_grad():
        weight[5] *= 8
    ids, places = (5, 290), torch.arange(N) % 3 == 0
    tokens = torch.where(tokens == 5, 6, tokens)
    mask = torch.zeros(N, V, dtype=torch.bool)
    mask[:, list(ids)] = places.unsqueeze(1)
    mask[:, 12] = True
    tokens = torch.where(tokens == 12, 13, tokens)
    logits = torch.nn.functional.linear(hidden, weight) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logits = logits.masked_fill(mask, -torch.inf)
    expected = token_logprobs(logits, tokens, 0.7), token_entropy(logits, 0.7)
    layer = OutputLayer(hidden, weight, None, head)
    forbidden = Forbidden(places, ids, (12,))
    found = fused_token_scores(layer, tokens, 0.7, True, 4 * 101 * rows, forbidden)
    require_equal(found, expected, [hidden, weight])
    free_places = Forbidden(torch.zeros_like(places), (), (12,))
    free = fused_token_scores(layer, tokens, 0.7, True, 4 * 101 * rows, free_places)
    assert (found[0] - free[0])[places].max() > 1e-3 and torch.equal(
        found[0][~places], free[0][~places]
    )


# columns of a block, rows of a piece, with a bias
WAYS = [
    (300, N, True),
    (300, N, False),
    (300, 1, True),
    (300, N - 1, True),
    (37, N, False),
    (V, N, False),
]


@pytest.mark.parametrize(("columns", "rows", "with_bias"), WAYS)
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_values_and_gradients_are_those_of_whole_logits(
    monkeypatch, head, columns, rows, with_bias
):
    """In blocks of the vocabulary, the last of them short, and with rows in pieces."""
    monkeypatch.setattr(fused_logprobs, "SMALLEST_BLOCK", columns if rows < N else 1)
    hidden, weight, bias, tokens = inputs(with_bias=with_bias)
    for temperature in (1.0, 0.7):
        layer = OutputLayer(hidden, weight, bias, head)
        found = fused_token_scores(layer, tokens, temperature, True, 4 * columns * rows)
        blocks = found[0].grad_fn.blocks
        assert (blocks.columns, blocks.pieces[0].stop) == (columns, rows)
        expected = whole(hidden, weight, bias, tokens, temperature, head)
        require_equal(found, expected, [hidden, weight] + [bias] * with_bias)


def test_what_asks_for_no_gradient_gets_none_and_no_rows_give_zeros():
    hidden, weight, bias, tokens = inputs(with_bias=True)
    logprobs, entropy = fused_token_scores(OutputLayer(hidden, weight.detach(), bias), tokens)
    logprobs.sum().backward()
    assert not entropy.requires_grad and hidden.grad.abs().max() > 0 and weight.grad is None
    hidden, weight, bias, tokens = inputs(with_bias=True, count=0)
    layer = OutputLayer(hidden, weight, bias)
    logprobs, entropy = fused_token_scores(layer, tokens, entropy_grad=True)
    grads = torch.autograd.grad(logprobs.sum() + entropy.sum(), [hidden, weight, bias])
    assert logprobs.shape == entropy.shape == (0,) and [g.shape for g in grads] == [
        (0, H),
        (V, H),
        (V,),
    ]
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_gradients_are_finite_differences(monkeypatch, head):
    monkeypatch.setattr(fused_logprobs, "SMALLEST_BLOCK", 1)
    generator = torch.Generator().manual_seed(3)
    shapes = ((5, 4), (11, 4), (11,))
    leaves = [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]
    tokens = torch.tensor([0, 10, 4, 3, 4])
    assert torch.autograd.gradcheck(
        lambda *x: fused_token_scores(OutputLayer(*x, head), tokens, 0.8, True, 4 * 5 * 4), leaves
    )


def test_in_bf16_gradients_are_as_near_to_the_exact_ones_as_the_plain_way(narrow):
    exact = [x.detach().double().requires_grad_() for x in inputs(torch.bfloat16)[:2]]
    hidden, weight, _, tokens = inputs(torch.bfloat16)
    targets = gradients(whole(*exact, None, tokens, 1.0, Head()), exact)
    plain = gradients(whole(hidden, weight, None, tokens, 1.0, Head()), [hidden, weight])
    found = gradients(
        fused_token_scores(
            OutputLayer(hidden, weight), tokens, entropy_grad=True, block_bytes=narrow
        ),
        [hidden, weight],
    )
    for target, a, b in zip(targets, found, plain, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - target).norm() < 1.1 * (b - target).norm()


def test_large_logits_stay_finite():
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[3e4], [0.0], [-3e4]])
    layer = OutputLayer(hidden.expand(2, 1), weight)
    logprobs, entropy = fused_token_scores(layer, torch.tensor([0, 2]))
    assert logprobs.tolist() == [0.0, -6e4]
    assert entropy.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("columns", [7, V], ids="columns{}".format)
@pytest.mark.parametrize("head", [HEADS["plain"], HEADS["scale"]], ids=["plain", "scale"])
def test_tokens_that_cannot_be_drawn_add_nothing(monkeypatch, head, columns):
    """A bias of -inf, as padded vocabularies have it, also on whole blocks, the first among
    them."""
    monkeypatch.setattr(fused_logprobs, "SMALLEST_BLOCK", 1)
    hidden, weight, bias, tokens = inputs(with_bias=True)
    out = torch.zeros(V, dtype=torch.bool)
    out[:11] = out[500:530] = out[-40:] = True
    tokens = torch.where(out[tokens], 100, tokens)
    masked = bias.detach().masked_fill(out, -torch.inf).requires_grad_()
    layer = OutputLayer(hidden, weight, masked, head)
    found = fused_token_scores(layer, tokens, 0.7, True, 4 * N * columns)
    small = [x.detach()[~out].requires_grad_() for x in (weight, bias)]
    places = (~out).cumsum(0)[tokens] - 1
    expected = whole(hidden, *small, places, 0.7, head)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    grads, others = (
        gradients(found, [hidden, weight, masked]),
        gradients(expected, [hidden, *small]),
    )
    torch.testing.assert_close(grads[0], others[0], rtol=1e-5, atol=1e-5)
    for a, b in zip(grads[1:], others[1:], strict=True):
        torch.testing.assert_close(a[~out], b, rtol=1e-5, atol=1e-5)
        assert not a[out].any()
    plain = whole(hidden, weight, masked, tokens, 0.7, head)
    for a, b in zip(grads, gradients(plain, [hidden, weight, masked]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_nan_stays_nan():
    hidden, weight, bias, tokens = inputs(with_bias=True)
    with torch.no_grad():
        bias[3] = torch.nan
    layer = OutputLayer(hidden, weight, bias)
    assert all(scores.isnan().all() for scores in fused_token_scores(layer, tokens))


@pytest.mark.parametrize(("count", "block"), [(2000, 2000 * 256), (3000, 250 * 256)])
def test_whole_logits_are_never_made(count, block):
    """The largest tensor that either pass makes is a block, for any number of rows."""
    hidden, weight, _, tokens = inputs(count=count)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(
                t.numel()
                for t in torch.utils._pytree.tree_leaves(out)
                if isinstance(t, torch.Tensor)
            )
            return out

    with Watch():
        logprobs, _ = fused_token_scores(OutputLayer(hidden, weight), tokens, block_bytes=4 * block)
        logprobs.sum().backward()
    assert len(sizes) > 20
    assert max(sizes) <= block


def test_in_bf16_sums_over_pieces_are_rounded_once(monkeypatch):
    """Sums in bf16 over so many pieces would be several times less exact than one product."""
    monkeypatch.setattr(fused_logprobs, "SMALLEST_BLOCK", 300)
    hidden, weight, _, tokens = inputs(torch.bfloat16, count=512)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    target, plain, found = (
        gradients(scores, leaves)[1].double()
        for scores, leaves in (
            (whole(*exact, None, tokens, 1.0, Head()), exact),
            (whole(hidden, weight, None, tokens, 1.0, Head()), [hidden, weight]),
            (
                fused_token_scores(
                    OutputLayer(hidden, weight), tokens, entropy_grad=True, block_bytes=4 * 300 * 4
                ),
                [hidden, weight],
            ),
        )
    )
    assert (found - target).norm() < 1.5 * (plain - target).norm()


class BlockBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of blocks of `size` logits that operations read and write."""

    VIEWS = ("view", "t", "transpose", "slice", "expand", "detach", "empty_like", "unsqueeze")

    def __init__(self, size):
        super().__init__()
        self.size, self.bytes = size, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        if function._schema.name.split("::")[1] not in self.VIEWS:
            tensors = torch.utils._pytree.tree_leaves((args, kwargs, outputs))
            self.count(*[x for x in tensors if isinstance(x, torch.Tensor)])
        return outputs

    def count(self, *tensors):
        self.bytes += sum(x.nbytes for x in tensors if x.numel() == self.size)


def test_kernels_read_and_write_22_bytes_a_logit(monkeypatch):
    """8 forward and 14 backward, at any temperature, with those of the products: the product of a
    block writes 4 and a kernel reads them; in the backward pass, it also writes 2, which two
    products read."""
    hidden, weight, _, tokens = inputs(torch.bfloat16)
    mode = BlockBytes(N * V)

    class Counted:
        def add_scores_(self, logits, tokens, sums, first, factor):
            mode.count(logits)

        def scores_backward(self, logits, tokens, terms, first, factor, dtype):
            gradient = torch.empty_like(logits, dtype=dtype)
            mode.count(logits, gradient)
            return gradient

    # as a GPU's, whose product in fp32 needs one
    monkeypatch.setattr(fused_logprobs, "fp32_product", lambda *_: torch.zeros(N, V))
    with mode:
        logprobs, _ = fused_token_scores(
            OutputLayer(hidden, weight), tokens, 0.7, kernels=Counted(), block_bytes=4 * N * 1024
        )
        forward = mode.bytes
        logprobs.sum().backward()
    assert forward == 8 * N * V and mode.bytes == 22 * N * V


def test_products_of_a_gpu_are_not_rounded_before_they_are_fp32(monkeypatch):
    """On tensors that claim to be on one; `torch.mm` with another dtype of the result needs one."""
    asked = []

    def mm(a, b, out_dtype):
        asked.append(out_dtype)
        return a.float() @ b.float()

    class Claims(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch, "mm", mm)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).bfloat16() for n in (3, 5))
    on_gpu, bias = hidden.as_subclass(Claims), torch.zeros(5).bfloat16()
    found = fused_logprobs.fp32_product(on_gpu, weight, None).as_subclass(torch.Tensor)
    torch.testing.assert_close(found, hidden.float() @ weight.float().t())
    assert asked == [torch.float32]
    for inputs_ in (
        (hidden, weight, None),
        (on_gpu, weight, bias),
        (on_gpu.float(), weight.float(), None),
    ):
        assert fused_logprobs.fp32_product(*inputs_).dtype == torch.float32
    monkeypatch.setattr(fused_logprobs, "FP32_PRODUCTS", False)
    assert fused_logprobs.fp32_product(on_gpu, weight, None).dtype == torch.float32
    assert asked == [torch.float32]
