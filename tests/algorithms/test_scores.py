"""Reward shaping: by hand, and the running standard deviation against numpy over all scores."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import normal, properties

from dschat_ppo.algorithms.scores import RunningScale, clip_scores, missing_eos, overlong_penalty

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
@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6), shift=st.sampled_from([0.0, 3.0, -1e4]))
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
        torch.testing.assert_close(running.scale(SCORES), SCORES / float(np.std(seen, ddof=1)), rtol=1e-5, atol=0)


def test_scores_are_unchanged_until_two_differ():
    running = RunningScale()
    assert torch.equal(running.scale(SCORES), SCORES)
    running.update(torch.tensor([4.0]))
    assert torch.equal(running.scale(SCORES), SCORES)
    running.update(torch.tensor([4.0, 4.0]))
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
