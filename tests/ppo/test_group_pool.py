"""Dynamic sampling: which groups are kept, how a step is filled, and that nothing accepted is lost."""

import torch

from dschat_ppo.algorithms.group_statistics import groups_that_differ
from dschat_ppo.ppo.collect import GroupPool
from dschat_ppo.types import ScoredRollout


def clipped(scores):
    return scores.clamp(-5, 5)


def rows(groups: list[int], scores: list[float]) -> ScoredRollout:
    """Rows of one prompt and one response token; the token is the row's score times ten."""
    count = len(groups)
    ones = torch.ones(count, 1)
    return ScoredRollout(
        prompt_ids=torch.tensor(groups).unsqueeze(1), prompt_mask=ones.bool(),
        response_ids=(torch.tensor(scores) * 10).long().unsqueeze(1), response_mask=ones.bool(), rollout_logprobs=ones,
        finish_reason=torch.zeros(count, dtype=torch.int8), old_logprobs=ones, entropies=None, ref_logprobs=None,
        kl=None, values=None, source_scores=torch.tensor(scores).unsqueeze(1), scores=torch.tensor(scores),
        baselines=None, groups=torch.tensor(groups),
    )  # fmt: skip


def test_groups_that_differ_by_hand():
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 5.0, 0.5, 0.5])
    groups = torch.tensor([3, 8, 3, 8, 2, 9, 9])  # 3: equal, 8: different, 2: alone, 9: equal
    assert groups_that_differ(scores, groups).tolist() == [False, True, False, True, False, False, False]


def test_groups_with_scores_that_are_not_finite_are_kept_for_the_check_of_rows():
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([nan, 1.0, inf, inf, nan, nan, 2.0, 2.0])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    assert groups_that_differ(scores, groups).tolist() == [True] * 6 + [False] * 2


def test_a_step_is_filled_by_groups_that_differ_and_the_rest_waits():
    pool = GroupPool(4, clipped)
    assert (pool.missing, pool.kept_share) == (4, 1.0)
    pool.add(rows([0, 0, 1, 1], [1.0, 1.0, 0.0, 1.0]))
    assert (pool.missing, pool.kept_share) == (2, 0.5)
    pool.add(rows([2, 2, 3, 3], [0.0, 1.0, 1.0, 0.0]))
    assert (pool.missing, pool.kept_share) == (0, 0.75)
    step, filled = pool.take()
    assert (step.groups.tolist(), step.scores.tolist(), filled) == ([1, 1, 2, 2], [0.0, 1.0, 0.0, 1.0], 0)
    assert step.response_ids.squeeze(1).tolist() == [0, 10, 0, 10]
    assert (pool.missing, pool.kept_share) == (2, 1.0)  # group 3 was accepted and waits
    pool.add(rows([4, 4], [1.0, 0.0]))
    step, _ = pool.take()
    assert step.groups.tolist() == [3, 3, 4, 4]
    assert pool.missing == 4


def test_dropped_groups_fill_a_step_that_got_too_few():
    pool = GroupPool(4, clipped)
    pool.add(rows([0, 0, 1, 1], [1.0, 1.0, 0.0, 1.0]))
    pool.add(rows([2, 2], [0.0, 0.0]))
    step, filled = pool.take()
    assert (step.groups.tolist(), filled) == ([1, 1, 0, 0], 2)
    pool.add(rows([5, 5, 6, 6], [2.0, 2.0, 3.0, 3.0]))  # what was dropped before is gone
    step, filled = pool.take()
    assert (step.groups.tolist(), filled) == ([5, 5, 6, 6], 4)


def test_groups_that_were_kept_are_restored():
    pool, other = GroupPool(4, clipped), GroupPool(4, clipped)
    pool.add(rows([0, 0, 1, 1, 2, 2], [0.0, 1.0, 2.0, 1.0, 5.0, 3.0]))
    pool.take()
    other.add(rows([8, 8, 9, 9], [0.0, 1.0, 1.0, 1.0]))
    other.load_state_dict(pool.state_dict(), torch.device("cpu"))
    assert other.missing == pool.missing == 2
    assert (other.dropped, other.kept_share) == (None, 1.0), "rounds before are forgotten"
    for kept in (pool, other):
        kept.add(rows([7, 7], [1.0, 0.0]))
    (mine, _), (theirs, _) = pool.take(), other.take()
    assert theirs.groups.tolist() == mine.groups.tolist() == [2, 2, 7, 7]
    assert theirs.scores.tolist() == [5.0, 3.0, 1.0, 0.0]
    other.load_state_dict(pool.state_dict(), torch.device("cpu"))
    assert other.missing == 4
