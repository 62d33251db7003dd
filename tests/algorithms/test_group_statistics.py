"""Group statistics by hand: rows without a token, fp64, and groups in any order."""

import pytest
import torch
from ragged import normal, ragged_mask

from dschat_ppo.algorithms.group_statistics import Groups, groups_that_differ

# Prompt 5: scores 1, 4 and an empty row; prompt 9: two empty rows; prompt 2: a single row.
LENGTHS, PROMPTS = [2, 0, 1, 0, 0, 2], [5, 5, 5, 9, 9, 2]
SCORES = torch.tensor([1.0, 8.0, 4.0, 8.0, 8.0, 2.5], dtype=torch.float64)


def groups_of(prompts, lengths) -> Groups:
    return Groups.of(torch.tensor(prompts), ragged_mask(lengths))


def test_statistics_by_hand_without_the_empty_rows():
    groups = groups_of(PROMPTS, LENGTHS)
    gaps = groups.gaps(SCORES)
    assert {x.dtype for x in (groups.sizes, gaps, groups.mean(gaps), groups.std(gaps))} == {torch.float64}
    assert groups.counted.tolist() == [True, False, True, False, False, True]
    assert groups.sizes.tolist() == [2.0, 2.0, 2.0, 0.0, 0.0, 1.0]
    assert groups.best(SCORES).tolist() == [4.0, 4.0, 4.0, 0.0, 0.0, 2.5]
    assert gaps.tolist() == [-3.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert groups.mean(gaps).tolist() == [-1.5, -1.5, -1.5, 0.0, 0.0, 0.0]
    assert groups.std(gaps).tolist() == pytest.approx([4.5**0.5] * 3 + [0.0] * 3)


def test_statistics_of_interleaved_groups_equal_those_of_each_group_alone():
    prompts, scores = [(7 * i) % 13 for i in range(60)], normal(0, 60)
    groups = groups_of(prompts, [2] * 60)
    gaps = groups.gaps(scores)
    for prompt in set(prompts):
        rows = [i for i in range(60) if prompts[i] == prompt]
        alone = scores[rows]
        torch.testing.assert_close((gaps - groups.mean(gaps))[rows], alone - alone.mean())
        torch.testing.assert_close(groups.std(gaps)[rows], alone.std().expand(len(rows)))


@pytest.mark.parametrize(
    ("scores", "differ"),
    [
        ([1.0, 1.0, 2.0, 3.0], [False, False, True, True]),
        ([0.0, 0.0, 0.0, 0.0], [False] * 4),
        ([1.0, 1.0, float("nan"), 3.0], [False, False, True, True]),
        ([1.0, 1.0, float("inf"), float("inf")], [False, False, True, True]),
    ],
)
def test_groups_differ_if_their_scores_are_unequal_or_not_finite(scores, differ):
    assert groups_that_differ(torch.tensor(scores), torch.tensor([4, 4, -1, -1])).tolist() == differ
    order = [2, 0, 3, 1]
    shuffled = groups_that_differ(torch.tensor(scores)[order], torch.tensor([4, 4, -1, -1])[order])
    assert shuffled.tolist() == [differ[i] for i in order]
