"""Losses on preference pairs: numpy, values by hand, and gradients by finite differences."""

import math

import numpy as np
import pytest
import torch

from dschat_ppo.algorithms.preference_loss import (
    PAIR_LOSSES,
    bradley_terry_loss,
    chosen_nll_loss,
    log_ratios,
    preference_loss,
    reward_centering_loss,
)

CHOSEN = torch.tensor([1.0, -0.5, 3.0, 0.2, math.nan])
REJECTED = torch.tensor([0.0, 0.5, 3.0, -2.0, 9.0])
REAL = torch.tensor([True, True, True, True, False])
MARGIN = torch.tensor([0.5, 0.0, 1.0, 2.0, 3.0])


def loss_by_numpy(margin: np.ndarray) -> float:
    lead = (CHOSEN - REJECTED).numpy().astype(np.float64) - margin
    return float(np.log1p(np.exp(-lead))[REAL.numpy()].sum())


@pytest.mark.parametrize("margin", [None, MARGIN])
def test_bradley_terry_matches_numpy_without_the_filler_pair_and_its_parts_add_up(margin):
    expected = loss_by_numpy(np.zeros(5) if margin is None else margin.numpy()) / 4
    parts = [
        bradley_terry_loss(CHOSEN[part], REJECTED[part], REAL[part], 4, None if margin is None else margin[part])
        for part in ([0, 1, 2, 3, 4], [0, 1], [2], [3, 4])
    ]
    assert parts[0].item() == pytest.approx(expected, rel=1e-5)
    assert sum(part.item() for part in parts[1:]) == pytest.approx(expected, rel=1e-5)
    # Lead ln 3: sigmoid 3/4.
    loss = bradley_terry_loss(torch.tensor([math.log(3.0)]), torch.zeros(1), torch.tensor([True]), num_pairs=1)
    assert loss.item() == pytest.approx(-math.log(0.75))


def test_centering_by_hand_without_the_filler_pair():
    # Sums of scores: 1, 0, 6, -1.8.
    loss = reward_centering_loss(CHOSEN, REJECTED, REAL, num_pairs=8)
    assert loss.item() == pytest.approx((1 + 0 + 36 + 3.24) / 8)


# Direct preference optimisation

LEAD = torch.tensor([3.0, -0.5, 0.0, 12.0, -40.0, 7.0], dtype=torch.float64)
REAL_LEADS = torch.tensor([True, True, True, True, True, False])
SMOOTHING = {"cdpo": 0.2, "robust_dpo": 0.2}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def pair_by_hand(objective: str, lead: float, beta: float, wrong: float) -> float:
    """Loss of one pair by the formulas of the papers."""
    held, flipped = -math.log(sigmoid(beta * lead)), -math.log(sigmoid(-beta * lead))
    return {
        "dpo": held,
        "dpo_nll": held,
        "cdpo": (1 - wrong) * held + wrong * flipped,
        "robust_dpo": ((1 - wrong) * held - wrong * flipped) / (1 - 2 * wrong),
        "ipo": (lead - 0.5 / beta) ** 2,
        "hinge": max(0.0, 1 - beta * lead),
    }[objective]


def mean_by_loop(objective: str, lead: torch.Tensor, beta: float, num_pairs: int) -> float:
    wrong = SMOOTHING.get(objective, 0.0)
    pairs = zip(lead.tolist(), REAL_LEADS.tolist(), strict=True)
    return sum(pair_by_hand(objective, one, beta, wrong) for one, real in pairs if real) / num_pairs


def ours(objective: str, lead: torch.Tensor, beta: float, num_pairs: float) -> torch.Tensor:
    return preference_loss(objective, lead, REAL_LEADS, num_pairs, beta, SMOOTHING.get(objective, 0.0))


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("objective", PAIR_LOSSES)
def test_pair_losses_match_a_loop_without_the_filler_pair(objective, beta):
    lead = torch.where(REAL_LEADS, LEAD, math.nan).requires_grad_()
    loss = ours(objective, lead, beta, 11)
    assert loss.item() == pytest.approx(mean_by_loop(objective, LEAD, beta, 11), rel=1e-12)
    loss.backward()
    assert lead.grad[REAL_LEADS].isfinite().all()


def test_pair_losses_values_by_hand():
    # beta D = ln 3: the pair is held right with probability 3/4.
    lead, real = torch.tensor([math.log(3.0) / 0.5]), torch.tensor([True])
    held, flipped = math.log(4 / 3), math.log(4)
    expected = {
        "dpo": held,
        "dpo_nll": held,
        "cdpo": 0.9 * held + 0.1 * flipped,
        "robust_dpo": (0.9 * held - 0.1 * flipped) / 0.8,
        "ipo": (2 * math.log(3.0) - 1) ** 2,
        "hinge": 0.0,
    }
    for objective, value in expected.items():
        found = preference_loss(objective, lead, real, 1, 0.5, 0.1 if objective in SMOOTHING else 0.0).item()
        assert found == pytest.approx(value, abs=1e-6), objective
    assert preference_loss("dpo", torch.tensor([-4000.0]), real, 1, 0.5).item() == pytest.approx(2000.0)


@pytest.mark.parametrize("objective", PAIR_LOSSES)
def test_pair_losses_have_the_gradient_of_finite_differences(objective):
    lead = LEAD.clone().requires_grad_()
    ours(objective, lead, 0.3, 4).backward()
    step = 1e-6
    for place in range(len(LEAD)):
        moved = torch.zeros_like(LEAD)
        moved[place] = step
        change = mean_by_loop(objective, LEAD + moved, 0.3, 4) - mean_by_loop(objective, LEAD - moved, 0.3, 4)
        assert lead.grad[place].item() == pytest.approx(change / (2 * step), abs=1e-6)
    assert lead.grad[5].item() == 0.0


LOGPROBS = [-3.0, -20.0, -1.0, -9.0, -2.5, 0.0]  # chosen x 3, rejected x 3
REFERENCE = [-4.0, -14.0, -1.0, -6.0, -2.0, 0.0]
TOKENS = [2, 3, 1, 5, 1, 0]


def test_log_ratios_are_sums_over_tokens_and_averages_for_ipo():
    given = torch.tensor(LOGPROBS), torch.tensor(REFERENCE), torch.tensor(TOKENS)
    for objective in PAIR_LOSSES:
        chosen, rejected = log_ratios(*given, objective)
        by_token = objective == "ipo"
        assert chosen.tolist() == pytest.approx([1 / 2, -6 / 3, 0.0] if by_token else [1.0, -6.0, 0.0])
        assert rejected.tolist() == pytest.approx([-3 / 5, -0.5, 0.0] if by_token else [-3.0, -0.5, 0.0])


def test_chosen_nll_is_the_mean_over_pairs_of_means_over_tokens():
    chosen = torch.tensor([-3.0, -20.0, 0.0, -7.0], requires_grad=True)
    real = torch.tensor([True, True, True, False])
    loss = chosen_nll_loss(chosen, torch.tensor([2, 4, 0, 1]), real, num_pairs=3)
    assert loss.item() == pytest.approx((1.5 + 5.0 + 0.0) / 3)
    loss.backward()
    np.testing.assert_allclose(chosen.grad.numpy(), [-1 / 6, -1 / 12, -1 / 3, 0.0], rtol=1e-6)
