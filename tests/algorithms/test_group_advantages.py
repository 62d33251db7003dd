"""Groups of scores: rows without a token beside rows with one, and the number format of the sums."""

import pytest
import torch
from ragged import normal, ragged_mask

from dschat_ppo.algorithms import group_advantages as ga
from dschat_ppo.algorithms.token_rewards import AdvantageInputs

# Group 5: scores 1, 4 and an empty row; group 9: two empty rows; group 2: a single row.
LENGTHS, PROMPTS = [2, 0, 1, 0, 0, 2], [5, 5, 5, 9, 9, 2]
REWARDS = torch.tensor([[3.0, -2.0], [8.0, 8.0], [4.0, 8.0], [8.0, 8.0], [8.0, 8.0], [2.5, 0.0]])


def scores_of(lengths, rewards, prompts) -> ga.GroupScores:
    mask, groups = ragged_mask(lengths), torch.tensor(prompts)
    return ga.group_scores(AdvantageInputs(rewards, None, mask, groups, None, gamma=1.0, lam=1.0))


def test_scores_by_hand():
    group = scores_of(LENGTHS, REWARDS, PROMPTS)
    assert group.best.tolist() == [4.0, 4.0, 4.0, 0.0, 0.0, 2.5]
    assert group.behind.tolist() == [-3.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert group.counted.tolist() == [True, False, True, False, False, True]
    assert group.lengths.tolist() == LENGTHS
    assert group.sizes.tolist() == [2.0, 2.0, 2.0, 0.0, 0.0, 1.0]
    assert ga.mean_behind(group).tolist() == [-1.5, -1.5, -1.5, 0.0, 0.0, 0.0]
    assert ga.standard_deviation(group).tolist() == pytest.approx([4.5**0.5] * 3 + [0.0] * 3)


@pytest.mark.parametrize(
    ("function", "first", "third"),
    [
        (ga.centred, -1.5, 1.5),
        (ga.leave_one_out, -3.0, 3.0),
        (ga.length_weighted, -1.0, 2.0),  # baseline (2 * 1 + 1 * 4) / 3 = 2
        (ga.rescaled_to_informative, -2.25, 2.25),  # three rows counted, two of them differ
        (ga.lead_of_the_best, 0.0, 3.0),
    ],
)
def test_rows_without_a_token_get_zero_and_count_nowhere(function, first, third):
    advantages = function(scores_of(LENGTHS, REWARDS, PROMPTS))
    assert advantages.tolist() == pytest.approx([first, 0.0, third, 0.0, 0.0, 0.0])


def test_scores_are_summed_in_float64():
    # In fp32 1e8 + 1 - 1e8 is 0.
    group = scores_of([3, 1], torch.tensor([[1e8, 1.0, -1e8], [0.0, 0.0, 0.0]]), [0, 0])
    assert group.behind.tolist() == [0.0, -1.0]
    assert group.best.dtype == torch.float64


def test_many_groups_at_once_are_those_of_each_alone():
    rewards, prompts = normal(0, 60, 2), [(7 * i) % 13 for i in range(60)]
    whole = ga.centred(scores_of([2] * 60, rewards, prompts))
    for prompt in set(prompts):
        rows = [i for i in range(60) if prompts[i] == prompt]
        alone = rewards[rows].sum(dim=1)
        torch.testing.assert_close(whole[rows], alone - alone.mean())
