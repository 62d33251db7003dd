"""Losses of supervised steps: by hand from the papers, numpy, loops, finite differences, and finite
gradients."""

import math

import numpy as np
import pytest
import torch

from dschat_ppo.algorithms.supervised_losses import (
    PAIR_LOSSES,
    balanced_weights,
    bradley_terry_loss,
    chosen_nll_loss,
    cpo_pair_loss,
    kto_baseline,
    kto_losses,
    log_ratios,
    orpo_pair_loss,
    preference_loss,
    reward_centering_loss,
    simpo_pair_loss,
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
        bradley_terry_loss(
            CHOSEN[part], REJECTED[part], REAL[part], 4, None if margin is None else margin[part]
        )
        for part in ([0, 1, 2, 3, 4], [0, 1], [2], [3, 4])
    ]
    assert parts[0].item() == pytest.approx(expected, rel=1e-5)
    assert sum(part.item() for part in parts[1:]) == pytest.approx(expected, rel=1e-5)
    # Lead ln 3: sigmoid 3/4.
    loss = bradley_terry_loss(
        torch.tensor([math.log(3.0)]), torch.zeros(1), torch.tensor([True]), num_pairs=1
    )
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
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


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
    return preference_loss(
        objective, lead, REAL_LEADS, num_pairs, beta, SMOOTHING.get(objective, 0.0)
    )


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("objective", PAIR_LOSSES)
def test_pair_losses_match_a_loop_without_the_filler_pair(objective, beta):
    lead = torch.where(REAL_LEADS, LEAD, math.nan).requires_grad_()
    loss = ours(objective, lead, beta, 11)
    assert loss.item() == pytest.approx(mean_by_loop(objective, LEAD, beta, 11), rel=1e-12)
    loss.backward()
    assert lead.grad[REAL_LEADS].isfinite().all()


def test_dpo_by_hand_and_on_an_extreme_pair():
    # beta D = ln 3: the pair is held right with probability 3/4.
    for lead, expected in ((math.log(3.0) / 0.5, math.log(4 / 3)), (-4000.0, 2000.0)):
        loss = preference_loss("dpo", torch.tensor([lead]), torch.tensor([True]), 1, 0.5)
        assert loss.item() == pytest.approx(expected)


LOGPROBS = [-3.0, -20.0, -1.0, -9.0, -2.5, 0.0]  # chosen x 3, rejected x 3
REFERENCE = [-4.0, -14.0, -1.0, -6.0, -2.0, 0.0]
TOKENS = [2, 3, 1, 5, 1, 0]


def test_log_ratios_are_sums_over_tokens_and_averages_for_ipo():
    given = torch.tensor(LOGPROBS), torch.tensor(REFERENCE), torch.tensor(TOKENS)
    for objective in PAIR_LOSSES:
        chosen, rejected = log_ratios(*given, objective)
        by_token = objective == "ipo"
        assert chosen.tolist() == pytest.approx(
            [1 / 2, -6 / 3, 0.0] if by_token else [1.0, -6.0, 0.0]
        )
        assert rejected.tolist() == pytest.approx(
            [-3 / 5, -0.5, 0.0] if by_token else [-3.0, -0.5, 0.0]
        )


def test_chosen_nll_is_the_mean_over_pairs_of_means_over_tokens():
    chosen = torch.tensor([-3.0, -20.0, 0.0, -7.0], requires_grad=True)
    real = torch.tensor([True, True, True, False])
    loss = chosen_nll_loss(chosen, torch.tensor([2, 4, 0, 1]), real, num_pairs=3)
    assert loss.item() == pytest.approx((1.5 + 5.0 + 0.0) / 3)
    loss.backward()
    np.testing.assert_allclose(chosen.grad.numpy(), [-1 / 6, -1 / 12, -1 / 3, 0.0], rtol=1e-6)


# Without a reference: ORPO, SimPO and CPO


MEANS_CHOSEN = (-0.7, -2.0, -0.05, -30.0, -0.69)
MEANS_REJECTED = (-1.3, -0.4, -4.0, -0.01, -0.70)
EXTREME = (0.0, -1e-12, -1e-6, -0.6931, -0.6932, -80.0, -1e4)


def pair(values=MEANS_CHOSEN, others=MEANS_REJECTED):
    made = [
        torch.tensor(part, dtype=torch.float64, requires_grad=True) for part in (values, others)
    ]
    return made[0], made[1]


def odds(mean: float) -> float:
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


@pytest.mark.parametrize(
    ("loss", "by_hand"),
    [
        (
            lambda w, r: orpo_pair_loss(w, r, 0.3),
            lambda w, r: -0.3 * math.log(sigmoid(odds(w) - odds(r))),
        ),
        (
            lambda w, r: simpo_pair_loss(w, r, 2.5, 0.8),
            lambda w, r: math.log(1 + math.exp(-(2.5 * w - 2.5 * r - 0.8))),
        ),
        (
            lambda w, r: cpo_pair_loss(w, r, 0.4),
            lambda w, r: math.log(1 + math.exp(-(0.4 * w - 0.4 * r))),
        ),
    ],
    ids=["orpo", "simpo", "cpo"],
)
def test_losses_by_hand(loss, by_hand):
    expected = [by_hand(w, r) for w, r in zip(MEANS_CHOSEN, MEANS_REJECTED, strict=True)]
    assert loss(*pair()).tolist() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, r: orpo_pair_loss(w, r, 0.1),
        lambda w, r: simpo_pair_loss(w, r, 10.0, 3.0),
        lambda w, r: cpo_pair_loss(w, r, 5.0),
    ],
)
def test_values_and_gradients_are_finite_at_extreme_log_probs(loss):
    grid = [(w, r) for w in EXTREME for r in EXTREME]
    chosen, rejected = pair([w for w, _ in grid], [r for _, r in grid])
    found = loss(chosen, rejected)
    found.sum().backward()
    assert found.isfinite().all()
    assert chosen.grad.isfinite().all() and rejected.grad.isfinite().all()
    assert (chosen.grad <= 0).all() and (rejected.grad >= 0).all()
    assert found.max() > 100, "no extreme pair in the grid"


# KTO


RATIOS = (2.0, -1.5, 0.3, -0.2, 40.0)
DESIRABLE = (True, True, False, False, False)


def by_hand(
    ratio: float, desirable: bool, baseline: float, beta: float, weights: tuple[float, float]
) -> float:
    """lambda_y - v(x, y), with v = lambda sigmoid(beta (r - z0)) or lambda sigmoid(beta (z0 -
    r))."""
    weight = weights[0] if desirable else weights[1]
    gain = ratio - baseline if desirable else baseline - ratio
    return weight - weight / (1 + math.exp(-beta * gain))


@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_kto_losses_by_hand(baseline):
    ratios, desirable = torch.tensor(RATIOS, dtype=torch.float64), torch.tensor(DESIRABLE)
    found = kto_losses(
        ratios, desirable, torch.tensor(baseline, dtype=torch.float64), 0.4, 1.2, 0.5
    )
    expected = [
        by_hand(r, d, baseline, 0.4, (1.2, 0.5)) for r, d in zip(RATIOS, DESIRABLE, strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("extreme", [-1e6, -800.0, 800.0, 1e6])
@pytest.mark.parametrize("desirable", [True, False])
def test_values_and_gradients_are_finite_at_extreme_ratios(extreme, desirable):
    ratios = torch.tensor([extreme], dtype=torch.float64, requires_grad=True)
    loss = kto_losses(ratios, torch.tensor([desirable]), torch.tensor(3.0), 1.0, 1.0, 1.0)
    loss.sum().backward()
    assert loss.isfinite().all() and ratios.grad.isfinite().all()
    assert loss.item() == pytest.approx(float(desirable == (extreme < 0)), abs=1e-6)


def test_the_baseline_is_a_mean_not_below_zero_and_without_gradient():
    ratios = torch.tensor([1.0, 2.0, -0.6], requires_grad=True)
    found = kto_baseline(ratios.sum(), 3)
    assert found.item() == pytest.approx(0.8)
    assert not found.requires_grad
    assert kto_baseline(torch.tensor(-4.0), 2).item() == 0.0


def test_balanced_weights_by_hand():
    # 30 desirable answers of weight 2 and 10 undesirable ones of weight 3: 60 to 30
    ratio, desirable = balanced_weights(30, 10, (2.0, 3.0))
    assert ratio == 2.0
    assert desirable == 1.0  # 30 x 1 = 10 x 3
