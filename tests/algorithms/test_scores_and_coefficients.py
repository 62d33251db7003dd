"""Shaping of scores, adaptive coefficients and statistics of an evaluation: by hand, numpy and
enumeration."""

import json
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import normal, properties

from dschat_ppo.algorithms.controllers import AdaptiveEntropy, AdaptiveKL, FixedCoefficient
from dschat_ppo.algorithms.evaluation_statistics import pass_at_k, wilson_interval, win_shares
from dschat_ppo.algorithms.token_rewards import (
    RunningScale,
    clip_scores,
    missing_eos,
    overlong_penalty,
)

SCORES = torch.tensor([-7.0, -5.0, 0.5, 5.0, 6.0])


def test_scores_are_clipped_on_both_sides_or_not_at_all_and_pay_for_a_missing_eos():
    assert clip_scores(SCORES, 5.0).tolist() == [-5.0, -5.0, 0.5, 5.0, 5.0]
    assert torch.equal(clip_scores(SCORES, 0.0), SCORES)
    assert missing_eos(torch.tensor([True, False, True]), 1.5).tolist() == [0.0, -1.5, 0.0]


def test_the_overlong_penalty_is_linear_over_the_buffer():
    # At most 10 tokens, the last 4 of them cost: 0 up to 6, then a quarter of 2 for each.
    lengths = torch.tensor([0, 5, 6, 7, 8, 9, 10, 11, 50])
    expected = [0.0, 0.0, 0.0, -0.5, -1.0, -1.5, -2.0, -2.0, -2.0]
    assert overlong_penalty(lengths, 10, 4, 2.0).tolist() == expected
    assert overlong_penalty(lengths, 10, 4, 2.0).dtype == torch.float32


@properties
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    shift=st.sampled_from([0.0, 3.0, -1e4]),
)
def test_running_scale_matches_numpy_over_everything_seen(sizes, shift):
    running, seen = RunningScale(), []
    for i, size in enumerate(sizes):
        batch = (normal(i, size) * (i + 1) + shift).float()
        running.update(batch)
        seen += batch.tolist()
    assert running.count == len(seen)
    if len(seen) > 1:
        assert running.mean == pytest.approx(np.mean(seen), rel=1e-9)
        assert running.std == pytest.approx(np.std(seen, ddof=1), rel=1e-6)
        torch.testing.assert_close(
            running.scale(SCORES), SCORES / float(np.std(seen, ddof=1)), rtol=1e-5, atol=0
        )


def test_scores_are_unchanged_until_two_differ():
    running = RunningScale()
    assert torch.equal(running.scale(SCORES), SCORES)
    running.update(torch.tensor([4.0]))
    assert torch.equal(running.scale(SCORES), SCORES)
    running.update(torch.tensor([4.0, 4.0]))
    assert torch.equal(running.scale(SCORES), SCORES)
    running.update(torch.tensor([4.0 + 1e-6]))  # equal but for rounding
    assert torch.equal(running.scale(SCORES), SCORES)
    running.update(torch.tensor([4.0 + 6e-3]))
    assert torch.equal(running.scale(SCORES), SCORES / running.std)


def test_running_scale_resumes_from_its_state():
    one, other = RunningScale(), RunningScale()
    one.update(torch.tensor([1.0, 2.0, 7.0]))
    state = json.loads(json.dumps(one.state_dict()))
    assert all(type(number) is float for number in state.values())
    other.load_state_dict(state)
    for running in (one, other):
        running.update(torch.tensor([-3.0, 0.0]))
    assert (other.count, other.mean, other.std) == (one.count, one.mean, one.std)
    assert other.std == pytest.approx(np.std([1, 2, 7, -3, 0], ddof=1))


# Coefficients


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


# Evaluation


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(k):
    passed = torch.tensor(
        [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
    ).bool()
    expected = []
    for row in passed.tolist():
        choices = list(combinations(row, k))
        expected.append(sum(any(choice) for choice in choices) / len(choices))
    assert pass_at_k(passed, k).tolist() == pytest.approx(expected, abs=1e-12)


def test_win_shares_by_hand():
    scores = torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 5.0]])
    baseline = torch.tensor([[1.0, 1.0, 3.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    # 2 of 6 pairs win; 2 win and 4 tie; 3 win and 3 tie
    assert win_shares(scores, baseline).tolist() == pytest.approx(
        [2 / 6, (2 + 4 / 2) / 6, (3 + 3 / 2) / 6]
    )
    assert (win_shares(scores, baseline) + win_shares(baseline, scores)).tolist() == pytest.approx(
        [1, 1, 1]
    )


def test_scores_that_fp32_cannot_tell_apart():
    assert win_shares(
        torch.tensor([[1 + 1e-12]], dtype=torch.float64), torch.tensor([[1.0]])
    ).tolist() == [1.0]


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [
        (0.8, 10, 0.4902, 0.9433),
        (0.0, 10, 0.0, 0.2775),
        (1.0, 10, 0.7225, 1.0),
        (0.5, 1, 0.0546, 0.9454),
    ],
)  # of other programs; Wilson (1927)
def test_wilson_interval(share, count, low, high):
    assert wilson_interval(share, count) == pytest.approx((low, high), abs=6e-5)
