"""Losses of direct preference optimisation: numpy loops, values by hand, finite differences."""

import math

import numpy as np
import pytest
import torch

from dschat_ppo.algorithms.preference_loss import PAIR_LOSSES, chosen_nll_loss, log_ratios, preference_loss

LEAD = torch.tensor([3.0, -0.5, 0.0, 12.0, -40.0, 7.0], dtype=torch.float64)
REAL = torch.tensor([True, True, True, True, True, False])
SMOOTHING = {"cdpo": 0.2, "robust_dpo": 0.2}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def pair_by_hand(objective: str, lead: float, beta: float, wrong: float) -> float:
    """One pair's loss by the papers' own words."""
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
    pairs = zip(lead.tolist(), REAL.tolist(), strict=True)
    return sum(pair_by_hand(objective, one, beta, wrong) for one, real in pairs if real) / num_pairs


def ours(objective: str, lead: torch.Tensor, beta: float, num_pairs: float) -> torch.Tensor:
    return preference_loss(objective, lead, REAL, num_pairs, beta, SMOOTHING.get(objective, 0.0))


def test_every_objective_has_its_loss():
    assert set(PAIR_LOSSES) == {"dpo", "cdpo", "ipo", "robust_dpo", "hinge", "dpo_nll"}


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("objective", PAIR_LOSSES)
def test_matches_a_loop_without_the_filler_pair(objective, beta):
    assert ours(objective, LEAD, beta, 11).item() == pytest.approx(mean_by_loop(objective, LEAD, beta, 11), rel=1e-12)


def test_values_by_hand():
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


def test_a_policy_that_is_still_the_reference_pays_the_same_for_every_pair():
    lead, real = torch.zeros(3, dtype=torch.float64), torch.ones(3).bool()
    expected = {
        "dpo": math.log(2), "dpo_nll": math.log(2), "cdpo": math.log(2), "robust_dpo": math.log(2), "ipo": 25.0,
        "hinge": 1.0,
    }  # fmt: skip
    for objective, value in expected.items():
        found = preference_loss(objective, lead, real, 3, 0.1, SMOOTHING.get(objective, 0.0)).item()
        assert found == pytest.approx(value, rel=1e-12), objective


def test_robust_loss_is_in_the_mean_over_flipped_labels_the_loss_of_the_true_ones():
    real = torch.ones(6).bool()
    right = preference_loss("robust_dpo", LEAD, real, 1, 0.3, 0.2)
    flipped = preference_loss("robust_dpo", -LEAD, real, 1, 0.3, 0.2)
    assert (0.8 * right + 0.2 * flipped).item() == pytest.approx(preference_loss("dpo", LEAD, real, 1, 0.3).item())


@pytest.mark.parametrize("objective", PAIR_LOSSES)
def test_gradient_is_that_of_finite_differences(objective):
    lead = LEAD.clone().requires_grad_()
    ours(objective, lead, 0.3, 4).backward()
    step = 1e-6
    for place in range(len(LEAD)):
        moved = torch.zeros_like(LEAD)
        moved[place] = step
        change = mean_by_loop(objective, LEAD + moved, 0.3, 4) - mean_by_loop(objective, LEAD - moved, 0.3, 4)
        assert lead.grad[place].item() == pytest.approx(change / (2 * step), abs=1e-6)
    assert lead.grad[5].item() == 0.0


@pytest.mark.parametrize("objective", PAIR_LOSSES)
def test_micro_batches_add_up_to_the_whole(objective):
    parts = [
        preference_loss(objective, LEAD[rows], REAL[rows], 5, 0.3, SMOOTHING.get(objective, 0.0))
        for rows in ([0, 1], [2, 5], [3, 4])
    ]
    assert sum(part.item() for part in parts) == pytest.approx(ours(objective, LEAD, 0.3, 5).item(), rel=1e-12)


@pytest.mark.parametrize("objective", PAIR_LOSSES)
def test_what_stands_in_filler_pairs_does_not_leak(objective):
    lead = torch.where(REAL, LEAD, math.nan).requires_grad_()
    loss = ours(objective, lead, 0.3, 4)
    loss.backward()
    assert loss.item() == pytest.approx(mean_by_loop(objective, LEAD, 0.3, 4))
    assert lead.grad[REAL].isfinite().all()


def test_no_loss_overflows_on_a_hopeless_pair():
    lead, real = torch.tensor([-4000.0]), torch.tensor([True])
    assert preference_loss("dpo", lead, real, 1, 0.5).item() == pytest.approx(2000.0)


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


def test_only_the_policy_gets_gradient_from_the_log_ratios():
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor(TOKENS)
    chosen, rejected = log_ratios(logprobs, torch.tensor(REFERENCE, dtype=torch.float64), tokens, "ipo")
    (chosen - rejected).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([1 / 2, 1 / 3, 1.0, -1 / 5, -1.0, -1.0])


def test_nll_is_the_mean_over_pairs_of_means_over_tokens():
    chosen = torch.tensor([-3.0, -20.0, 0.0, -7.0], requires_grad=True)
    real = torch.tensor([True, True, True, False])
    loss = chosen_nll_loss(chosen, torch.tensor([2, 4, 0, 1]), real, num_pairs=3)
    assert loss.item() == pytest.approx((1.5 + 5.0 + 0.0) / 3)
    loss.backward()
    np.testing.assert_allclose(chosen.grad.numpy(), [-1 / 6, -1 / 12, -1 / 3, 0.0], rtol=1e-6)
