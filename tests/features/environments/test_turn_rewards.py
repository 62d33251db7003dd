"""Rewards of turns: where tokens receive them, and what turns are credited with."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ragged import gapped_mask, inputs_of, normal
from scored_rows import (
    LONGEST,
    assert_rows_that_stay_train_as_without_the_others,
    scored,
)

from dschat_ppo.algorithms.advantage_estimators import ESTIMATORS, AdvantageInputs
from dschat_ppo.config.algorithm_flags import WITHIN_A_GROUP, AlgorithmFlags
from dschat_ppo.features.environments.token_rewards import by_turn, turn_rewards
from dschat_ppo.ppo.advantages import AdvantageComputation
from dschat_ppo.types import select_rows


@pytest.mark.parametrize("name", ["gae", "dr_grpo"])
def test_rewards_to_go_are_received_at_the_ends_of_turns(name):
    """Row 3 has two turns, rewards 1 and 0.5 of weight 2, and 0.25 of another source; another row
    is of its group."""
    rows = scored(groups=torch.tensor([0, 0, 0, 1, 1, 2]))
    mask = rows.response_mask.clone()
    mask[3] = torch.tensor([True, True, False, True])
    at_turns = torch.zeros(6, LONGEST)
    at_turns[3, 1], at_turns[3, 3] = 1.0, 0.5
    scores = rows.scores.clone()
    scores[3] = 2 * 1.5 + 0.25
    rows = replace(rows, response_mask=mask, scores=scores, extra={"turn_rewards": at_turns})
    whitening = {"whiten_advantages": False} if name == "gae" else {}
    flags = AlgorithmFlags(advantage_estimator=name, kl_coef=0.0, **whitening)
    whole, to_go = (
        AdvantageComputation(flags, LONGEST, 0, 5.0, early_rewards=early)
        for early in (None, turn_rewards(2.0))
    )
    assert whole.with_rewards(rows).rewards[3].tolist() == [0.0, 0.0, 0.0, 3.25]
    rewarded = to_go.with_rewards(rows)
    assert rewarded.rewards[3].tolist() == [0.0, 2.0, 0.0, 1.25]
    assert torch.equal(rewarded.rewards[[0, 1, 4]], whole.with_rewards(rows).rewards[[0, 1, 4]])
    found = to_go.advantages(rewarded, 1).advantages[3]
    if name == "dr_grpo":  # row 4 scores 3 in its one turn, and has no second turn
        assert found.tolist() == [0.125, 0.125, 0.0, 0.0]
    else:
        value = rows.values[3].tolist()
        lam, last = flags.gae_lambda, 1.25 - value[3]
        second = 2.0 + value[3] - value[1] + lam * last
        first = value[1] - value[0] + lam * second
        np.testing.assert_allclose(found.numpy(), [first, second, 0.0, last], rtol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "gpg", "maxrl", "reinforce_plus_plus_baseline"])
def test_equal_rewards_of_another_order_or_in_other_turns_teach_nothing(name):
    """Two pairs of episodes of two turns, in each pair with rewards that are equal in all turns, of
    the unit 100.3. Their fp32 scores differ in the last digit, as sums in another order do."""
    mask = torch.tensor([[True, True, False, True]]).repeat(4, 1)
    at_turns = torch.zeros(4, LONGEST)
    at_turns[:2, 1], at_turns[:2, 3] = 100.3, 3 * 100.3
    at_turns[2:, 1], at_turns[2:, 3] = 7 * 100.3, 0.0
    scores = at_turns.sum(dim=1) * torch.tensor([1.0, 1 + 2e-7, 1.0, 1 - 2e-7])
    assert len(scores.unique()) == 4
    rows = scored()
    rows = select_rows(rows, torch.arange(4))
    rows = replace(
        rows,
        response_mask=mask,
        extra={"turn_rewards": at_turns},
        scores=scores,
        groups=torch.tensor([4, 4, 8, 8]),
    )
    flags = AlgorithmFlags(advantage_estimator=name, kl_coef=0.0)
    for early in (None, turn_rewards(1.0)):
        compute = AdvantageComputation(flags, LONGEST, 0, 0.0, early_rewards=early)
        advantages = compute.advantages(compute.with_rewards(rows), 1).advantages
        assert advantages.abs().max() < 1e-6


@pytest.mark.parametrize("name", ["rloo", "gae"])
def test_rows_that_stay_train_as_in_a_run_without_the_others(name):
    mask = torch.arange(3) < (torch.arange(12) % 3 + 1).unsqueeze(1)
    flags = AlgorithmFlags(advantage_estimator=name)
    assert_rows_that_stay_train_as_without_the_others(
        flags, turn_rewards(0.5), turn_rewards=0.25 * mask.float()
    )


# two turns, two, one
TURNS = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 1, 0, 0], [1, 1, 1, 0, 0]]).bool()


def test_turns_are_credited_with_the_rewards_from_them_on_by_hand():
    rewards = torch.tensor(
        [[0.0, 1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 4.0, 0.0, 0.0], [0.0, 0.0, 8.0, 0.0, 0.0]]
    )
    inputs = inputs_of(TURNS, rewards, [5, 5, 5], gamma=1.0)
    advantages, returns = by_turn(ESTIMATORS["dr_grpo"], inputs, rewards)
    # first turns: 3, 4, 8 with mean 5; second turns: 2, 4 with mean 3
    expected = [[-2.0, -2.0, 0.0, -1.0, 0.0], [-1.0, 0.0, 1.0, 0.0, 0.0], [3.0, 3.0, 3.0, 0.0, 0.0]]
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-6)
    assert returns.tolist() == [
        [3.0, 3.0, 0.0, 2.0, 0.0],
        [4.0, 0.0, 4.0, 0.0, 0.0],
        [8.0, 8.0, 8.0, 0.0, 0.0],
    ]


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        # 1, 7, 13 with deviation 6; the second turns are worth 0, 2 and 4, with deviation 2
        ("grpo", [-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]),
        ("grpo_pass_at_k", [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]),
        # means 7 and 2
        ("maxrl", [-6 / 7, 0.0, 6 / 7], [-1.0, 0.0, 1.0]),
    ],
)
def test_the_score_of_a_turn_leaves_out_the_rewards_before_it_by_hand(name, first, second):
    mask = torch.tensor([[1, 1, 0, 1]]).bool().repeat(3, 1)
    at_turns = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 5.0, 0.0, 2.0], [0.0, 9.0, 0.0, 4.0]])
    inputs = inputs_of(mask, at_turns, [3, 3, 3], scores=at_turns.sum(dim=1), epsilon=0.0)
    advantages, _ = by_turn(ESTIMATORS[name], inputs, at_turns)
    expected = [[a, a, 0.0, b] for a, b in zip(first, second, strict=True)]
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(WITHIN_A_GROUP) - {"gdpo"}))
def test_turns_of_equal_episodes_have_advantage_zero(name):
    """Four episodes of three turns score 3 x 100.3, or 0 with another sign in one turn; what is
    left of the score at the last token and after each turn is rounding."""
    mask = torch.tensor([[1, 1, 0, 1, 0, 1]]).bool().repeat(4, 1)
    for last in (100.3, -200.6):
        at_turns = torch.tensor([[0.0, 100.3, 0.0, 100.3, 0.0, last]]).repeat(4, 1)
        scores = torch.tensor([1e-5, -2e-5, 0.0, 3e-5]) + at_turns.sum(dim=1)  # fp32's last digits
        rewards = at_turns.clone()
        rewards[:, -1] += scores - at_turns.sum(dim=1)
        inputs = inputs_of(mask, rewards, [0] * 4, scores=scores, gamma=1.0)
        advantages, _ = by_turn(ESTIMATORS[name], inputs, at_turns)
        assert advantages.abs().max() < 1e-9


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "opo", "gpg", "grpo_pass_at_k", "reinforce_plus_plus_baseline"]
)
def test_turns_equal_a_loop_over_cut_rows(name):
    """Each turn as a row of its own, which begins with it; with a KL penalty, so that scores and
    rewards differ."""
    mask = gapped_mask().bool() if name != "opo" else TURNS
    groups = torch.arange(len(mask)) % 2
    at_turns = torch.where(mask, normal(5, *mask.shape), 0.0)
    kl = torch.where(mask, normal(6, *mask.shape) * 0.1, 0.0)
    inputs = inputs_of(mask, at_turns - kl, groups.tolist(), scores=at_turns.sum(dim=1), gamma=0.7)
    found, _ = by_turn(ESTIMATORS[name], inputs, at_turns)
    starts = [
        [c for c in range(mask.shape[1]) if row[c] and (c == 0 or not row[c - 1])]
        for row in mask.tolist()
    ]
    seen = torch.zeros(mask.shape)
    for turn in range(max(map(len, starts))):
        rows = [r for r in range(len(mask)) if len(starts[r]) > turn]
        cut = torch.zeros(len(rows), mask.shape[1], dtype=torch.bool)
        for number, r in enumerate(rows):
            cut[number, starts[r][turn] :] = mask[r, starts[r][turn] :]
        part = AdvantageInputs(
            torch.where(cut, inputs.rewards[rows], 0.0),
            None,
            cut,
            groups[rows],
            None,
            0.7,
            1.0,
            scores=torch.where(cut, at_turns[rows], 0.0).sum(dim=1),
        )
        advantages, _ = ESTIMATORS[name](part)
        for number, r in enumerate(rows):
            end = starts[r][turn + 1] if len(starts[r]) > turn + 1 else mask.shape[1]
            seen[r, starts[r][turn] : end] = advantages[number, starts[r][turn] : end]
    assert seen.abs().sum() > 0
    np.testing.assert_allclose(found.numpy(), seen.numpy(), atol=1e-5)
