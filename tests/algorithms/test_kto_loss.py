"""KTO: values by hand from the paper's value function, the baseline, and finite gradients."""

import math

import pytest
import torch

from dschat_ppo.algorithms.kto_loss import balanced_weights, kto_baseline, kto_losses

RATIOS = (2.0, -1.5, 0.3, -0.2, 40.0)
DESIRABLE = (True, True, False, False, False)


def by_hand(ratio: float, desirable: bool, baseline: float, beta: float, weights: tuple[float, float]) -> float:
    """lambda_y - v(x, y), with v = lambda sigmoid(beta (r - z0)) or lambda sigmoid(beta (z0 - r))."""
    weight = weights[0] if desirable else weights[1]
    gain = ratio - baseline if desirable else baseline - ratio
    return weight - weight / (1 + math.exp(-beta * gain))


@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_losses_by_hand(baseline):
    ratios, desirable = torch.tensor(RATIOS, dtype=torch.float64), torch.tensor(DESIRABLE)
    found = kto_losses(ratios, desirable, torch.tensor(baseline, dtype=torch.float64), 0.4, 1.2, 0.5)
    expected = [by_hand(r, d, baseline, 0.4, (1.2, 0.5)) for r, d in zip(RATIOS, DESIRABLE, strict=True)]
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
