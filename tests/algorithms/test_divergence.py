"""Divergences against numpy, dense computation in fp64 and finite differences."""

import numpy as np
import pytest
import torch

from dschat_ppo.algorithms.divergence import Divergence, dense_divergence, fused_divergence
from dschat_ppo.algorithms.fused_logprobs import NEVER, Forbidden, Head, OutputLayer

N, H, V, TEMPERATURE = 7, 5, 600, 0.7
KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1)]
CAPPED = Head(1.3, 4.0)


def layers(seed=0, width=V, teacher_width=V, bias=True):
    """Hidden states, weight and bias of a student (with gradients) and a teacher of another size,
    fp64."""
    made = torch.Generator().manual_seed(seed)
    shapes = [(N, H), (width, H), (width,), (N, H + 2), (teacher_width, H + 2), (teacher_width,)]
    numbers = [torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes]
    student = [each.requires_grad_() for each in numbers[:3]]
    return (student, numbers[3:]) if bias else ([*student[:2], None], [*numbers[3:5], None])


def log_probs(hidden, weight, bias, head=Head(), width=V, forbidden=None):  # noqa: B008
    """(N, width) fp64, from whole logits."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = (
        head.scale * logits
        if head.softcap is None
        else head.softcap * torch.tanh(head.scale * logits / head.softcap)
    )
    logits = logits[:, :width] / TEMPERATURE
    if forbidden is not None:
        for token in forbidden.ids:
            logits = logits.index_put(
                (forbidden.positions.nonzero().squeeze(1), torch.tensor(token)),
                torch.tensor(-1e4).double(),
            )
    return torch.log_softmax(logits, dim=1)


def by_numpy(log_p, log_q, kind, beta):
    p, q = np.exp(log_p.detach().numpy()), np.exp(log_q.detach().numpy())
    kl = lambda a, b: (a * np.log(a / b)).sum(axis=-1)  # noqa: E731
    mixture = beta * q + (1 - beta) * p
    return {
        "reverse_kl": kl(p, q),
        "forward_kl": kl(q, p),
        "jsd": beta * kl(q, mixture) + (1 - beta) * kl(p, mixture),
    }[kind]


@pytest.mark.parametrize("head", [Head(), CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_blocks_give_the_dense_divergence_and_its_gradients(kind, beta, head):
    student, teacher = layers()
    log_p, log_q = log_probs(*student, head), log_probs(*teacher, head)
    dense = dense_divergence(log_p, log_q, kind, beta)
    np.testing.assert_allclose(
        dense.detach().numpy(), by_numpy(log_p, log_q, kind, beta), rtol=1e-10
    )
    weights = torch.arange(1.0, N + 1, dtype=torch.float64)
    expected = torch.autograd.grad((weights * dense).sum(), student)
    for block_bytes in (10 * 256 * 8, 2 * 256 * 8):  # blocks of all rows, and of a part of them
        fused = fused_divergence(
            OutputLayer(*student, head),
            OutputLayer(*teacher, head),
            Divergence(kind, beta),
            TEMPERATURE,
            block_bytes,
        )
        torch.testing.assert_close(fused, dense, rtol=1e-9, atol=1e-12)
        found = torch.autograd.grad((weights * fused).sum(), student)
        for name, a, b in zip(("hidden", "weight", "bias"), found, expected, strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-7, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
            )


def buckets_of(log_p, log_q, top_k):
    """Log-probs (N, K + 1) of the teacher's most likely tokens and of all others together, by a
    loop over rows."""
    rows = []
    for p, q in zip(log_p, log_q, strict=True):
        order = q.argsort(descending=True)
        top, rest = order[:top_k], order[top_k:]
        least = torch.tensor([-1e4]).double()  # of probability 0
        rows.append(
            [
                torch.cat([x[top], x[rest].logsumexp(0, keepdim=True) if len(rest) else least])
                for x in (p, q)
            ]
        )
    return [torch.stack(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("top_k", [1, 3, 300, V + 9])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_top_tokens_and_their_tail_are_the_divergence_of_buckets(kind, beta, top_k):
    """The buckets are made by a loop over rows from whole distributions, with autograd."""
    student, teacher = layers(1)
    log_p, log_q = log_probs(*student), log_probs(*teacher)
    dense = dense_divergence(*buckets_of(log_p, log_q, top_k), kind, beta)
    fused = fused_divergence(
        OutputLayer(*student),
        OutputLayer(*teacher),
        Divergence(kind, beta, top_k),
        TEMPERATURE,
        block_bytes=4 * 256 * 8,
    )
    torch.testing.assert_close(fused, dense, rtol=1e-6, atol=1e-9)
    for a, b in zip(
        *(torch.autograd.grad((each**2).sum(), student) for each in (fused, dense)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)
    if top_k < V:
        whole = by_numpy(log_p, log_q, kind, beta)
        assert (fused.detach().numpy() <= whole + 1e-9).all(), (
            "merging tokens never adds to a divergence"
        )


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_the_tail_of_a_very_sure_teacher_is_as_small_as_it_is(kind, beta, dtype, top_k):
    """By hand: token 2 has the logit 40 and the 599 others 0, so the teacher's tail has less than
    599 e^-40 = 2.5e-15, which fp32 cannot tell from 0 beside 1. The student is uniform, or has its
    own weight on token 5, of the tail."""
    hidden = torch.eye(2, dtype=dtype)
    teacher = torch.zeros(V, 2, dtype=dtype)
    teacher[2] = 40.0
    student = torch.zeros(V, 2, dtype=dtype)
    student[5, 1] = 30.0
    student.requires_grad_()
    log_q = torch.log_softmax(teacher.detach().double().T, dim=1)
    exact = student.detach().double().requires_grad_()
    buckets = buckets_of(torch.log_softmax(exact.T, dim=1), log_q, top_k)
    expected = dense_divergence(*buckets, kind, beta)
    layer = OutputLayer(hidden, teacher, None)
    divergence = Divergence(kind, beta, top_k)
    found = fused_divergence(
        OutputLayer(hidden, student), layer, divergence, block_bytes=2 * 256 * 8
    )
    if kind == "reverse_kl" and top_k == 1:
        share = 599 / 600  # of the tail, under a uniform student
        by_hand = share * (np.log(share) - (np.log(599) - 40)) + np.log(1 / 600) / 600
        assert float(found[0]) == pytest.approx(by_hand, rel=1e-6) and by_hand > 30
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    [slope] = torch.autograd.grad(found.sum(), student)
    [wanted] = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(slope.double(), wanted, rtol=1e-4, atol=1e-6)


def test_gradients_are_finite_differences():
    student, teacher = layers(2, 270, 270)
    for divergence in (
        Divergence("reverse_kl"),
        Divergence("forward_kl"),
        Divergence("jsd", 0.3),
        Divergence("jsd", 0.3, 4),
    ):

        def of(hidden, bias, divergence=divergence):
            layer = OutputLayer(hidden, student[1], bias, CAPPED)
            of_teacher = OutputLayer(*teacher, CAPPED)
            return fused_divergence(layer, of_teacher, divergence, TEMPERATURE, 4 * 256 * 8)

        assert torch.autograd.gradcheck(of, (student[0], student[2]), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize(("width", "teacher_width"), [(V + 8, V), (V, V + 300)])
def test_rows_that_one_vocabulary_lacks_are_in_neither_distribution(width, teacher_width):
    student, teacher = layers(3, width, teacher_width)
    dense = dense_divergence(log_probs(*student), log_probs(*teacher), "reverse_kl")
    fused = fused_divergence(
        OutputLayer(*student), OutputLayer(*teacher), Divergence("reverse_kl"), TEMPERATURE
    )
    torch.testing.assert_close(fused, dense)
    for a, b in zip(
        *(torch.autograd.grad(each.sum(), student) for each in (fused, dense)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("block_bytes", [None, 2 * 256 * 8], ids=["one block", "three blocks"])
def test_tokens_that_cannot_be_drawn_and_logits_of_minus_infinity_add_nothing(
    kind, beta, top_k, block_bytes
):
    """Tokens 7 and 599 are in the first and in the last block."""
    student, teacher = layers(4)
    with torch.no_grad():
        student[2][3] = teacher[2][3] = -torch.inf
    forbidden = Forbidden(torch.arange(N) % 2 == 0, (0, 7, 599))
    fused = fused_divergence(
        OutputLayer(*student),
        OutputLayer(*teacher),
        Divergence(kind, beta, top_k),
        TEMPERATURE,
        block_bytes=block_bytes,
        forbidden=forbidden,
    )
    log_p, log_q = (
        log_probs(*each, forbidden=forbidden).clamp_min(-1e4) for each in (student, teacher)
    )
    if top_k:
        log_p, log_q = buckets_of(log_p, log_q, top_k)
    dense = dense_divergence(log_p, log_q, kind, beta)
    torch.testing.assert_close(fused, dense, rtol=1e-6 if top_k else 1e-9, atol=1e-9)
    expected = torch.autograd.grad(dense.sum(), student[:2])
    gradients = torch.autograd.grad(fused.sum(), student)
    for found, wanted in zip(gradients, expected, strict=False):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)
    assert all(each.isfinite().all() for each in gradients) and NEVER < -1e4
    assert gradients[1][3].abs().max() == 0 and gradients[1][8].abs().max() > 0


def test_equal_models_have_no_divergence_and_no_gradient_in_fp32():
    student, _ = layers(5, bias=False)
    hidden, weight = (each.detach().float().requires_grad_() for each in student[:2])
    teacher = OutputLayer(hidden.detach(), weight.detach())
    for kind, beta in KINDS:
        layer = OutputLayer(hidden, weight)
        found = fused_divergence(layer, teacher, Divergence(kind, beta), TEMPERATURE)
        gradients = torch.autograd.grad(found.sum(), (hidden, weight))
        assert found.abs().max() < 1e-6 and max(each.abs().max() for each in gradients) < 1e-6


def test_no_rows_and_the_context_of_a_partitioned_weight():
    opened = []

    class Whole:
        def __enter__(self):
            opened.append(True)

        def __exit__(self, *_):
            opened.append(False)

    student, teacher = layers(6)
    layer = OutputLayer(*teacher, whole=Whole)
    found = fused_divergence(
        OutputLayer(student[0][:0], *student[1:]),
        OutputLayer(teacher[0][:0], *teacher[1:], whole=Whole),
        Divergence("jsd"),
    )
    assert found.shape == (0,) and torch.autograd.grad(found.sum(), student[1])[0].abs().max() == 0
    opened.clear()
    fused_divergence(OutputLayer(*student), layer, Divergence("reverse_kl")).sum().backward()
    assert opened == [True, False] * 2, "forward and backward pass"
    opened.clear()
    fused_divergence(
        OutputLayer(*student), layer, Divergence("reverse_kl", top_k=2)
    ).sum().backward()
    assert opened == [True, False], "the backward pass of top tokens needs no teacher"
