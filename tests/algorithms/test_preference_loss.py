"""Bradley-Terry and centring of scores, against numpy."""

import math

import numpy as np
import pytest
import torch

from dschat_ppo.algorithms.preference_loss import bradley_terry_loss, reward_centering_loss

CHOSEN = torch.tensor([1.0, -0.5, 3.0, 0.2, 7.0])
REJECTED = torch.tensor([0.0, 0.5, 3.0, -2.0, 9.0])
REAL = torch.tensor([True, True, True, True, False])
MARGIN = torch.tensor([0.5, 0.0, 1.0, 2.0, 3.0])


def loss_by_numpy(margin: np.ndarray) -> float:
    lead = (CHOSEN - REJECTED).numpy().astype(np.float64) - margin
    return float(np.log1p(np.exp(-lead))[REAL.numpy()].sum())


def test_one_pair_by_hand():
    # Lead ln 3: sigmoid 3/4.
    loss = bradley_terry_loss(torch.tensor([math.log(3.0)]), torch.zeros(1), torch.tensor([True]), num_pairs=1)
    assert loss.item() == pytest.approx(-math.log(0.75))


def test_equal_scores_cost_log_two():
    loss = bradley_terry_loss(torch.full((4,), 5.0), torch.full((4,), 5.0), torch.ones(4).bool(), num_pairs=4)
    assert loss.item() == pytest.approx(math.log(2.0))


def test_margin_is_taken_from_the_lead():
    # Lead 2 with margin 2 is no lead.
    loss = bradley_terry_loss(torch.tensor([2.0]), torch.zeros(1), torch.tensor([True]), 1, torch.tensor([2.0]))
    assert loss.item() == pytest.approx(math.log(2.0))


@pytest.mark.parametrize("margin", [None, MARGIN])
def test_matches_numpy_without_the_filler_pair(margin):
    expected = loss_by_numpy(np.zeros(5) if margin is None else margin.numpy()) / 4
    assert bradley_terry_loss(CHOSEN, REJECTED, REAL, 4, margin).item() == pytest.approx(expected, rel=1e-5)


def test_filler_pairs_have_no_gradient():
    chosen = CHOSEN.clone().requires_grad_()
    bradley_terry_loss(chosen, REJECTED, REAL, 4, MARGIN).backward()
    lead = (CHOSEN - REJECTED - MARGIN).numpy().astype(np.float64)
    expected = np.where(REAL.numpy(), -1 / (1 + np.exp(lead)) / 4, 0.0)
    np.testing.assert_allclose(chosen.grad.numpy(), expected, rtol=1e-5)
    assert chosen.grad[4].item() == 0.0


def test_stays_finite_for_a_hopeless_pair():
    loss = bradley_terry_loss(torch.tensor([-500.0]), torch.tensor([500.0]), torch.tensor([True]), num_pairs=1)
    assert loss.item() == pytest.approx(1000.0)


def test_micro_batches_add_up_to_the_whole():
    whole = CHOSEN.clone().requires_grad_()
    loss = bradley_terry_loss(whole, REJECTED, REAL, 4, MARGIN)
    loss.backward()
    parts, total = CHOSEN.clone().requires_grad_(), 0.0
    for rows in ([0, 1], [2], [3, 4]):
        part = bradley_terry_loss(parts[rows], REJECTED[rows], REAL[rows], 4, MARGIN[rows])
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(parts.grad, whole.grad)


def test_logexp_of_others_is_the_same_loss():
    ours = bradley_terry_loss(CHOSEN, REJECTED, REAL, 4, MARGIN).item()
    logexp = np.log(1 + np.exp((REJECTED - CHOSEN + MARGIN).numpy().astype(np.float64)))
    assert ours == pytest.approx(logexp[REAL.numpy()].sum() / 4, rel=1e-5)


def test_centering_by_hand_without_the_filler_pair():
    # Sums of scores: 1, 0, 6, -1.8 (and 16 of the filler).
    loss = reward_centering_loss(CHOSEN, REJECTED, REAL, num_pairs=8)
    assert loss.item() == pytest.approx((1 + 0 + 36 + 3.24) / 8)


def test_centering_gradient_goes_to_both_scores():
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    reward_centering_loss(chosen, rejected, REAL, num_pairs=4).backward()
    expected = [2 * total / 4 for total in (1.0, 0.0, 6.0, -1.8)] + [0.0]
    assert chosen.grad.tolist() == pytest.approx(expected)
    assert rejected.grad.tolist() == pytest.approx(expected)


def test_what_stands_in_filler_pairs_does_not_leak():
    chosen = torch.tensor([1.0, math.nan], requires_grad=True)
    real = torch.tensor([True, False])
    for loss in (bradley_terry_loss, reward_centering_loss):
        chosen.grad = None
        value = loss(chosen, torch.zeros(2), real, 1)
        value.backward()
        assert math.isfinite(value.item())
        assert math.isfinite(chosen.grad[0].item())
