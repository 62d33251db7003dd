"""Adaptive coefficients: by hand, at their bounds, and restored from a state."""

import json

import pytest

from dschat_ppo.algorithms.controllers import AdaptiveEntropy, AdaptiveKL, FixedCoefficient


def test_a_fixed_coefficient_is_constant_and_comes_from_the_configuration():
    fixed = FixedCoefficient(0.3)
    fixed.update(99.0, 1000)
    fixed.load_state_dict(fixed.state_dict())
    assert fixed.value == 0.3
    # the configuration of a resumed run decides
    other = FixedCoefficient(0.4)
    other.load_state_dict(fixed.state_dict())
    assert other.value == 0.4


@pytest.mark.parametrize(
    ("kl", "count", "expected"),
    [
        (6.0, 100, 0.5),  # at the target
        (6.6, 100, 0.5 * (1 + 0.1 * 0.25)),
        (5.4, 100, 0.5 * (1 - 0.1 * 0.25)),
        (60.0, 100, 0.5 * (1 + 0.2 * 0.25)),  # bounded
        (-3.0, 100, 0.5 * (1 - 0.2 * 0.25)),
        (60.0, 400, 0.5 * 1.2),
        (0.0, 9000, 0.5 * 0.8),  # never to zero or below
    ],
)
def test_adaptive_kl_by_hand(kl, count, expected):
    controller = AdaptiveKL(0.5, target=6.0, horizon=400)
    controller.update(kl, count)
    assert controller.value == pytest.approx(expected, rel=1e-12)


def test_adaptive_kl_resumes_from_its_state():
    controller = AdaptiveKL(0.5, target=6.0, horizon=400)
    controller.update(60.0, 100)
    other = AdaptiveKL(7.0, target=6.0, horizon=400)
    other.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    other.update(6.6, 100)
    assert other.value == pytest.approx(0.5 * 1.05 * 1.025)


def test_adaptive_entropy_by_hand():
    controller = AdaptiveEntropy(0.01, target=0.5, delta=0.005, smallest=0.0, largest=0.02)
    assert controller.value == 0.01
    values = []
    for entropy in (0.4, 0.5, 0.3, 0.6, 0.9, 0.4, 0.7, 0.7, 0.7, 0.7, 0.7, 0.2):
        controller.update(entropy, 64)
        values.append(controller.value)
    # 0.015, 0.02, the bound, then hidden 0.015 and 0.01, 0.015 again, hidden down to 0, and 0.005
    assert values == pytest.approx([0.015, 0.02, 0.02, 0.0, 0.0, 0.015, 0, 0, 0, 0, 0, 0.005])


@pytest.mark.parametrize(("last", "expected"), [(0.9, 0.0), (0.1, 0.015)])
def test_adaptive_entropy_resumes_from_its_state(last, expected):
    controller = AdaptiveEntropy(0.01, target=0.5, delta=0.005, smallest=0.0, largest=0.02)
    controller.update(last, 64)
    other = AdaptiveEntropy(0.9, target=0.5, delta=0.005, smallest=0.0, largest=0.02)
    other.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert other.value == pytest.approx(expected)
    other.update(0.1, 64)
    assert other.value == pytest.approx({0.9: 0.01, 0.1: 0.02}[last])
