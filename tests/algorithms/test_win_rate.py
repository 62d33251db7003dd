"""Win shares and confidence intervals by hand."""

import pytest
import torch

from dschat_ppo.algorithms.win_rate import wilson_interval, win_shares


def test_win_shares_by_hand():
    scores = torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 5.0]])
    baseline = torch.tensor([[1.0, 1.0, 3.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    # 2 of 6 pairs win; 2 win and 4 tie; 3 win and 3 tie
    assert win_shares(scores, baseline).tolist() == pytest.approx([2 / 6, (2 + 4 / 2) / 6, (3 + 3 / 2) / 6])
    assert (win_shares(scores, baseline) + win_shares(baseline, scores)).tolist() == pytest.approx([1, 1, 1])


def test_scores_that_fp32_cannot_tell_apart():
    assert win_shares(torch.tensor([[1 + 1e-12]], dtype=torch.float64), torch.tensor([[1.0]])).tolist() == [1.0]


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [(0.8, 10, 0.4902, 0.9433), (0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0), (0.5, 1, 0.0546, 0.9454)],
)  # of other programs; Wilson (1927)
def test_wilson_interval(share, count, low, high):
    assert wilson_interval(share, count) == pytest.approx((low, high), abs=6e-5)
