"""From tokens to a scalar by hand, against loops and numpy, and forms of the KL with their expected
gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import fillings, normal, properties, ragged_mask, row_lengths

from dschat_ppo.algorithms.aggregation import (
    Denominators,
    aggregate,
    masked_sum,
    masked_whiten,
    row_means,
    zero_outside,
)
from dschat_ppo.algorithms.kl import KL_ESTIMATORS, kl_k3, kl_loss

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.0, -0.4], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([-0.5, 0.2, 0.4, 1.0, -1.0], dtype=torch.float64), dim=0)


def exact_gradient(reverse: bool = False) -> torch.Tensor:
    """Gradient for the logits: sum of p (log p - log q) has p_j (log p_j - log q_j - KL), the other
    p_j - q_j."""
    p = [math.exp(x) / sum(math.exp(y) for y in LOGITS.tolist()) for x in LOGITS.tolist()]
    q = [math.exp(x) for x in REFERENCE.tolist()]
    if reverse:
        return torch.tensor([a - b for a, b in zip(p, q, strict=True)], dtype=torch.float64)
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return torch.tensor(
        [a * (math.log(a / b) - kl) for a, b in zip(p, q, strict=True)], dtype=torch.float64
    )


def expected_gradient(estimator: str, straight: bool) -> torch.Tensor:
    """Gradient of the loss, averaged over all tokens with the weights of the policy itself (which
    carry none)."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=0)
    losses = kl_loss(logprobs.unsqueeze(0), REFERENCE.unsqueeze(0), estimator, straight).squeeze(0)
    (logprobs.detach().exp() * losses).sum().backward()
    return logits.grad


def test_values_by_hand():
    logprobs, other = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -3.0])
    values = {name: estimate(logprobs, other).tolist() for name, estimate in KL_ESTIMATORS.items()}
    assert values["k1"] == pytest.approx([0.5, -1.0, 0.0])
    assert values["k2"] == pytest.approx([0.125, 0.5, 0.0])
    assert values["k3"] == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2, 0.0])
    assert values["abs"] == pytest.approx([0.5, 1.0, 0.0])
    for name, expected in values.items():
        for straight in (False, True):
            assert kl_loss(logprobs, other, name, straight).tolist() == pytest.approx(
                expected, rel=1e-6
            )


def test_gradients_in_expectation():
    """The straight-through form has that of the exact divergence; k2 too, k3 that of the reverse
    one, k1 none."""
    for estimator in KL_ESTIMATORS:
        torch.testing.assert_close(expected_gradient(estimator, straight=True), exact_gradient())
    torch.testing.assert_close(expected_gradient("k2", straight=False), exact_gradient())
    torch.testing.assert_close(
        expected_gradient("k3", straight=False), exact_gradient(reverse=True)
    )
    assert expected_gradient("k1", straight=False).abs().max().item() < 1e-15
    for biased in (exact_gradient(reverse=True), expected_gradient("abs", straight=False)):
        assert (biased - exact_gradient()).abs().max().item() > 0.05


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("straight", [False, True])
def test_rounding_does_not_decide_the_gradient_where_policy_and_reference_are_equal(
    estimator, straight
):
    logprobs, gradients = torch.full((2,), -1.0, requires_grad=True), []
    for noise in (-2e-6, 2e-6):
        loss = kl_loss(logprobs, torch.full((2,), -1.0 + noise), estimator, straight)
        gradients += torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(*gradients, atol=5e-4, rtol=0)


def test_k3_is_capped_before_its_square_overflows():
    # Log-ratios -19, and beyond the cap of -20: -21, -1000 and -inf; from above there is no cap.
    logprobs = torch.tensor([-19.0, -21.0, -1000.0, -math.inf, 0.0], requires_grad=True)
    estimate = kl_k3(logprobs, torch.tensor([0.0, 0.0, 0.0, 0.0, -1000.0]))
    cap = math.exp(20) - 1 - 20
    assert estimate.tolist() == pytest.approx([math.exp(19) - 1 - 19, cap, cap, cap, 999.0])
    assert (estimate.float() ** 2).sum().isfinite()
    estimate.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([1 - math.exp(19), 0.0, 0.0, 0.0, 1.0])
    assert math.isnan(kl_k3(torch.tensor(math.nan), torch.tensor(0.0)).item())


MODES = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant"]


def by_loop(losses, mask, mode, denominators) -> float:
    total = 0.0
    for row, keep in zip(losses.tolist(), mask.tolist(), strict=True):
        kept = [loss for loss, inside in zip(row, keep, strict=True) if inside]
        if kept:
            total += sum(kept) / len(kept) if mode == "seq_mean_token_mean" else sum(kept)
    counts = {"token_mean": denominators.tokens, "constant": denominators.constant}
    return total / counts.get(mode, denominators.rows)


@pytest.mark.parametrize("mode", MODES)
@properties
@given(lengths=row_lengths(), seed=st.integers(0, 9), filling=fillings)
def test_every_mode_matches_a_loop_whatever_the_padding_holds(mode, lengths, seed, filling):
    mask = ragged_mask(lengths, 5)
    losses, denominators = normal(seed, *mask.shape), Denominators(tokens=31, rows=7, constant=60)
    found = aggregate(losses.masked_fill(~mask, filling), mask, mode, denominators)
    assert found.item() == pytest.approx(by_loop(losses, mask, mode, denominators), abs=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected", "weights"),
    [
        ("token_mean", (1 + 2 + 6 + 5) / 8, [[1 / 8] * 3, [0, 0, 0], [1 / 8, 0, 0]]),
        ("seq_mean_token_sum", (9 + 5) / 4, [[1 / 4] * 3, [0, 0, 0], [1 / 4, 0, 0]]),
        ("seq_mean_token_mean", (3 + 5) / 4, [[1 / 12] * 3, [0, 0, 0], [1 / 4, 0, 0]]),
        ("constant", (9 + 5) / 40, [[1 / 40] * 3, [0, 0, 0], [1 / 40, 0, 0]]),
    ],
)
def test_every_mode_by_hand_with_the_weight_of_each_token_as_gradient(mode, expected, weights):
    nan = float("nan")
    losses = torch.tensor([[1.0, 2.0, 6.0], [nan, nan, nan], [5.0, nan, nan]], requires_grad=True)
    loss = aggregate(
        losses, ragged_mask([3, 0, 1]), mode, Denominators(tokens=8, rows=4, constant=40)
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    torch.testing.assert_close(losses.grad, torch.tensor(weights))


@pytest.mark.parametrize("mode", MODES)
@properties
@given(lengths=row_lengths(), cut=st.integers(0, 6))
def test_micro_batches_add_up_to_the_whole(mode, lengths, cut):
    mask, denominators = ragged_mask(lengths, 5), Denominators(31, 7, 60)
    whole = normal(2, *mask.shape).requires_grad_()
    parts = whole.detach().clone().requires_grad_()
    loss = aggregate(whole, mask, mode, denominators)
    loss.backward()
    total = 0.0
    for rows in (slice(0, cut), slice(cut, None)):
        part = aggregate(parts[rows], mask[rows], mode, denominators)
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad)


def test_values_and_gradients_outside_the_mask_are_ignored():
    nan, inf = float("nan"), float("inf")
    values, mask = torch.tensor([[1.0, nan], [inf, 2.0]], requires_grad=True), torch.eye(2).bool()
    kept = zero_outside(values, mask)
    (kept**2).sum().backward()
    assert kept.tolist() == [[1.0, 0.0], [0.0, 2.0]] and values.grad.tolist() == [
        [2.0, 0.0],
        [0.0, 4.0],
    ]
    assert masked_sum(values, mask).item() == 3.0
    values = torch.tensor([[1.0, 2.0, nan], [5.0, 5.0, 5.0], [4.0, inf, 9.0]])
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    assert row_means(values, mask).tolist() == [1.5, 0.0, 6.5]


def test_whitening_matches_numpy_and_a_calculation_by_hand():
    # Tokens 1, 2, 3, 6: mean 3, population variance (4 + 1 + 0 + 9) / 4 = 3.5.
    values, mask = torch.tensor([[1.0, 2.0, 9.0], [3.0, 6.0, 9.0]]), ragged_mask([2, 2], 3)
    expected = torch.tensor([[-2.0, -1.0, 0.0], [0.0, 3.0, 0.0]]) / 3.5**0.5
    torch.testing.assert_close(masked_whiten(values, mask), expected)
    values, mask = normal(0, 4, 5).float() * 3 + 7, ragged_mask([5, 3, 0, 1])
    kept = values.numpy().astype(np.float64)[mask.numpy()]
    white = masked_whiten(values, mask)
    np.testing.assert_allclose(
        white.numpy()[mask.numpy()], (kept - kept.mean()) / kept.std(), rtol=1e-4, atol=1e-5
    )
    assert not white[~mask].any()
    assert not masked_whiten(torch.full((2, 3), 4.0), torch.ones(2, 3).bool()).any(), "equal tokens"
    assert not masked_whiten(torch.randn(2, 3), torch.zeros(2, 3).bool()).any(), "no tokens"


def test_whitening_of_small_differences_of_large_values_matches_numpy():
    # Advantages around a million, 1/16 apart: a mean in fp32 is off by more than their spread.
    steps = torch.randint(-8, 9, (200, 50), generator=torch.Generator().manual_seed(0))
    values, mask = 1e6 + steps / 16, torch.ones(200, 50, dtype=torch.bool)
    wide = values.numpy().astype(np.float64)
    white = masked_whiten(values, mask)
    assert white.dtype == torch.float32
    np.testing.assert_allclose(
        white.numpy(), (wide - wide.mean()) / np.sqrt(wide.var() + 1e-8), rtol=1e-6, atol=1e-6
    )
