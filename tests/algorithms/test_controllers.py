"""Adaptive coefficients: by hand, at their bounds, and restored from a state."""

import json

import pytest

from dschat_ppo.algorithms.controllers import AdaptiveEntropy, AdaptiveKL, FixedCoefficient


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


def test_adaptive_entropy_by_hand():
    controller = AdaptiveEntropy(0.01, target=0.5, delta=0.005, largest=0.02)
    assert controller.value == 0.01
    values = []
    for entropy in (0.4, 0.5, 0.3, 0.6, 0.9, 0.4, 0.7, 0.7, 0.7, 0.7, 0.7, 0.2):
        controller.update(entropy, 64)
        values.append(controller.value)
    # 0.015, 0.02, the bound, then hidden 0.015 and 0.01, 0.015 again, hidden down to 0, and 0.005
    assert values == pytest.approx([0.015, 0.02, 0.02, 0.0, 0.0, 0.015, 0, 0, 0, 0, 0, 0.005])


def test_coefficients_resume_from_their_states_and_a_fixed_one_from_its_configuration():
    def resumed(before, measured, after):
        before.update(measured, 100)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        return after

    assert resumed(FixedCoefficient(0.3), 99.0, FixedCoefficient(0.4)).value == 0.4
    kl = resumed(AdaptiveKL(0.5, 6.0, 400), 60.0, AdaptiveKL(7.0, 6.0, 400))
    kl.update(6.6, 100)
    assert kl.value == pytest.approx(0.5 * 1.05 * 1.025)
    for last, values in ((0.9, (0.0, 0.01)), (0.1, (0.015, 0.02))):
        before, after = (AdaptiveEntropy(start, 0.5, 0.005, 0.02) for start in (0.01, 0.9))
        found = [resumed(before, last, after).value]
        after.update(0.1, 64)
        assert (*found, after.value) == pytest.approx(values)
