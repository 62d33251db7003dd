"""ORPO, SimPO and CPO: values by hand from the formulas of the papers, and finite gradients at extreme log-probs."""

import math

import pytest
import torch

from dschat_ppo.algorithms.reference_free_loss import (
    cpo_pair_loss,
    log_odds,
    orpo_pair_loss,
    simpo_pair_loss,
)

CHOSEN = (-0.7, -2.0, -0.05, -30.0, -0.69)
REJECTED = (-1.3, -0.4, -4.0, -0.01, -0.70)
EXTREME = (0.0, -1e-12, -1e-6, -0.6931, -0.6932, -80.0, -1e4)


def pair(values=CHOSEN, others=REJECTED):
    made = [torch.tensor(part, dtype=torch.float64, requires_grad=True) for part in (values, others)]
    return made[0], made[1]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def odds(mean: float) -> float:
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


def test_log_odds_are_the_logarithm_of_p_over_one_minus_p():
    means = [*CHOSEN, *REJECTED]
    found = log_odds(torch.tensor(means, dtype=torch.float64))
    assert found.tolist() == pytest.approx([odds(mean) for mean in means], rel=1e-9)


@pytest.mark.parametrize(("loss", "by_hand"), [
    (lambda w, r: orpo_pair_loss(w, r, 0.3), lambda w, r: -0.3 * math.log(sigmoid(odds(w) - odds(r)))),
    (lambda w, r: simpo_pair_loss(w, r, 2.5, 0.8), lambda w, r: math.log(1 + math.exp(-(2.5 * w - 2.5 * r - 0.8)))),
    (lambda w, r: cpo_pair_loss(w, r, 0.4), lambda w, r: math.log(1 + math.exp(-(0.4 * w - 0.4 * r)))),
], ids=["orpo", "simpo", "cpo"])  # fmt: skip
def test_losses_by_hand(loss, by_hand):
    expected = [by_hand(w, r) for w, r in zip(CHOSEN, REJECTED, strict=True)]
    assert loss(*pair()).tolist() == pytest.approx(expected, rel=1e-8)


def test_the_gradient_of_log_odds_is_one_over_one_minus_p():
    means = torch.tensor([-0.01, -0.5, -0.7, -3.0, -40.0], dtype=torch.float64, requires_grad=True)
    log_odds(means).sum().backward()
    expected = [1 / (1 - math.exp(mean)) for mean in means.tolist()]
    assert means.grad.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("loss", [
    lambda w, r: orpo_pair_loss(w, r, 0.1), lambda w, r: simpo_pair_loss(w, r, 10.0, 3.0),
    lambda w, r: cpo_pair_loss(w, r, 5.0),
])  # fmt: skip
def test_values_and_gradients_are_finite_at_extreme_log_probs(loss):
    grid = [(w, r) for w in EXTREME for r in EXTREME]
    chosen, rejected = pair([w for w, _ in grid], [r for _, r in grid])
    found = loss(chosen, rejected)
    found.sum().backward()
    assert found.isfinite().all()
    assert chosen.grad.isfinite().all() and rejected.grad.isfinite().all()
    assert (chosen.grad <= 0).all() and (rejected.grad >= 0).all()
    assert found.max() > 100, "no extreme pair in the grid"
