"""Advantage estimators, token rewards, returns and group statistics: by hand, and against loops
over definitions."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import (
    fillings,
    gapped_mask,
    inputs_of,
    normal,
    properties,
    ragged_mask,
    returns_by_loop,
    widened,
)
from torch.utils._python_dispatch import TorchDispatchMode

from dschat_ppo.algorithms.advantage_estimators import (
    ESTIMATORS,
    AdvantageInputs,
    returns_to_go,
)
from dschat_ppo.algorithms.groups import Groups, groups_that_differ, groups_within
from dschat_ppo.algorithms.token_rewards import token_rewards
from dschat_ppo.config.algorithm_flags import WITHIN_A_GROUP

LENGTHS = (5, 3, 0, 1, 2, 5, 4, 0)
# four rows of 7 (one of them empty), two of -2, a single 40, an empty 11
PROMPTS = 7, -2, 7, 40, -2, 7, 7, 11


def scored(scores, groups, lengths=None, **changes) -> AdvantageInputs:
    """fp32 inputs with each score on the last token and no KL penalty."""
    mask = ragged_mask(lengths or [1] * len(scores))
    rewards = token_rewards(torch.tensor(scores), torch.zeros(mask.shape), mask, 0.0)
    return inputs_of(mask, rewards, groups, **{"gamma": 1.0, "epsilon": 0.0, **changes})


def row_advantages(name: str, inputs: AdvantageInputs) -> list[float]:
    """The advantage of each row, which must be equal on all its tokens and 0 in the padding."""
    advantages, _ = ESTIMATORS[name](inputs)
    first = advantages[torch.arange(len(advantages)), inputs.response_mask.int().argmax(dim=1)]
    assert torch.equal(advantages, torch.where(inputs.response_mask, first.unsqueeze(1), 0.0))
    return first.tolist()


def row_by_loop(name, i, scores, lengths, groups, epsilon, normalise) -> float:
    """The advantage of row i under a row-level estimator, from lists over the whole batch."""
    mates = [j for j in range(len(scores)) if groups[j] == groups[i] and lengths[j] > 0]
    if lengths[i] == 0 or len(mates) == 1:
        return 0.0
    values = [scores[j] for j in mates]
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1)) + epsilon
    if name == "grpo":
        return (scores[i] - mean) / (spread if normalise else 1.0)
    if name == "dr_grpo":
        return scores[i] - mean
    if name == "rloo":
        return scores[i] - float(np.mean([scores[j] for j in mates if j != i]))
    if name == "opo":
        return scores[i] - sum(lengths[j] * scores[j] for j in mates) / sum(
            lengths[j] for j in mates
        )
    if name == "gpg":
        counted = [j for j in range(len(scores)) if lengths[j] > 0]
        useful = [
            j for j in counted if len({scores[k] for k in counted if groups[k] == groups[j]}) > 1
        ]
        return len(counted) / len(useful) * (scores[i] - mean)
    if name == "maxrl":
        return (scores[i] - mean) / mean if mean > 0 else 0.0
    assert name == "grpo_pass_at_k"
    first, second = sorted(values, reverse=True)[:2]
    return (first - second) / (spread if normalise else 1.0) if scores[i] == first else 0.0


def check_rows(name, inputs):
    mask, rewards = inputs.response_mask.numpy(), inputs.rewards.numpy()
    scores = [float(rewards[i][mask[i]].sum()) for i in range(len(rewards))]
    lengths, groups = mask.sum(axis=1).tolist(), inputs.groups.tolist()
    rest = inputs.epsilon, inputs.normalise_std
    expected = [row_by_loop(name, i, scores, lengths, groups, *rest) for i in range(len(scores))]
    advantages, returns = ESTIMATORS[name](inputs)
    np.testing.assert_allclose(
        advantages.numpy(), np.where(mask, np.array(expected)[:, None], 0.0), atol=1e-10
    )
    np.testing.assert_allclose(
        returns.numpy(), returns_by_loop(rewards, mask, inputs.gamma), atol=1e-10
    )


ROW_LEVEL = ["grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_pass_at_k", "maxrl"]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("name", ROW_LEVEL)
def test_row_estimators_match_a_loop_over_uneven_groups_and_rows_with_gaps(name, normalise):
    check_rows(
        name, inputs_of(ragged_mask(LENGTHS), groups=PROMPTS, normalise_std=normalise, epsilon=0.03)
    )
    check_rows(name, inputs_of(gapped_mask(), groups=[1, 1, 2, 1, 2], normalise_std=normalise))


BY_HAND = {
    # 1, 2, 6: mean 3, unbiased variance (4 + 1 + 9) / 2 = 7. The other prompt: 5, 5.
    "grpo": (
        scored([1.0, 5.0, 2.0, 6.0, 5.0], [0, 1, 0, 0, 1]),
        [-2 / 7**0.5, 0.0, -1 / 7**0.5, 3 / 7**0.5, 0.0],
    ),
    # The empty answer of the group is no score.
    "dr_grpo": (
        scored([1.0, 2.0, 6.0, 9.0], [3] * 4, lengths=[1, 2, 1, 0]),
        [-2.0, -1.0, 3.0, 0.0],
    ),
    "rloo": (scored([1.0, 2.0, 6.0], [3, 3, 3]), [1 - 4.0, 2 - 3.5, 6 - 1.5]),
    # (1 * 1 + 3 * 5) / 4 = 4
    "opo": (scored([1.0, 5.0], [0, 0], lengths=[1, 3]), [-3.0, 1.0]),
    # Six rows, of which the last two say nothing: alpha = 6 / 4. A score of 0 in a mixed group is
    # information, and a row on its group's mean counts as well.
    "gpg": (
        scored([0.0, 0.5, 1.0, 0.5, 1.0, 1.0], [0, 0, 0, 0, 1, 1]),
        [-0.75, 0.0, 0.75, 0.0, 0.0, 0.0],
    ),
    "grpo_pass_at_k": (
        scored([1.0, 4.0, 2.5, 3.0, 3.0, 9.0], [0, 0, 0, 1, 1, 2], normalise_std=False),
        [0.0, 1.5, 0.0, 0.0, 0.0, 0.0],
    ),
    # One of four, three of four, none of two, a mean of -1.
    "maxrl": (
        scored(
            [0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, -3.0, 1.0],
            [0] * 4 + [1] * 4 + [2] * 2 + [3] * 2,
        ),
        [-1.0, 3.0, -1.0, -1.0, 1 / 3, -1.0, 1 / 3, 1 / 3, 0.0, 0.0, 0.0, 0.0],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_row_estimators_by_hand(name):
    inputs, expected = BY_HAND[name]
    assert row_advantages(name, inputs) == pytest.approx(expected, rel=1e-5)


def test_differences_survive_fp32_and_the_kl_penalty_is_subtracted_before_the_baseline():
    # Scores 3 and 3, penalties 0.5 * (1 + 1) and 0.5 * 4: S = 2 and 1.
    mask = ragged_mask([2, 1])
    rewards = token_rewards(
        torch.tensor([3.0, 3.0]), torch.tensor([[1.0, 1.0], [4.0, 9.0]]), mask, 0.5
    )
    assert row_advantages("dr_grpo", inputs_of(mask, rewards, [0, 0])) == [0.5, -0.5]
    # In fp32 1e8 + 1 - 1e8 is 0, and so is the difference to the other row.
    rewards = torch.tensor([[1e8, 1.0, -1e8], [0.0, 9.0, 9.0]])
    assert row_advantages("dr_grpo", inputs_of(ragged_mask([3, 1]), rewards, [0, 0])) == [0.5, -0.5]
    # 3e6 and 3e6 + 4, more than a millionth apart: the gaps to the best score are exact.
    assert row_advantages("dr_grpo", scored([3e6, 3e6 + 4], [0, 0])) == [-2.0, 2.0]


def penalised(scores, penalties, **changes) -> AdvantageInputs:
    """One group of answers of one token each, whose rewards are the scores minus the penalties."""
    scores, penalties = torch.tensor(scores), torch.tensor(penalties)
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    rewards = token_rewards(scores, penalties.unsqueeze(1), mask, 1.0)
    return inputs_of(
        mask,
        rewards,
        [0] * len(scores),
        **{"gamma": 1.0, "epsilon": 1e-6, "scores": scores, **changes},
    )


def test_grpo_subtracts_the_kl_from_standardised_scores_by_hand():
    # 1 and 3 over their deviation 2^0.5, less 0.1 and 0.3: 2^0.5 - 0.2 apart, a spread below 1: not
    # divided.
    half = 0.5**0.5 - 0.1
    assert row_advantages("grpo", penalised([1.0, 3.0], [0.1, 0.3])) == pytest.approx(
        [-half, half], rel=1e-5
    )
    # Less 0.3 and 0.1: the spread is 1 + 0.02^0.5, so the sum is brought back to 1.
    half = 0.5**0.5
    assert row_advantages("grpo", penalised([1.0, 3.0], [0.3, 0.1])) == pytest.approx(
        [-half, half], rel=1e-5
    )
    # Equal scores: the penalties alone, as they are.
    assert row_advantages("grpo", penalised([2.0, 2.0], [0.02, 0.0])) == pytest.approx(
        [-0.01, 0.01], rel=1e-5
    )


def of_sources(inputs: AdvantageInputs, *columns, weights) -> AdvantageInputs:
    weights = torch.tensor(weights, dtype=torch.float64)
    return replace(inputs, source_scores=torch.tensor(columns).T, source_weights=weights)


def test_gdpo_standardises_each_source_in_its_group_and_their_sum_over_the_batch_by_hand():
    # First source: 0 and 1, 4 and 4, so -+h and 0 with h = 0.5^0.5. Second: it scores the second
    # prompt alone, -+h.
    nan = float("nan")
    inputs = scored([9.0, 8.0, 7.0, 6.0], [5, 5, 3, 3])
    inputs = of_sources(inputs, [0.0, 1.0, 4.0, 4.0], [nan, nan, -20.0, 30.0], weights=[3.0, 1.0])
    # -3h, 3h, -h, h: variance 20 h^2 / 3 = 10 / 3
    unit = 0.5**0.5 / (10 / 3) ** 0.5
    assert row_advantages("gdpo", inputs) == pytest.approx([-3 * unit, 3 * unit, -unit, unit])
    # One source: grpo, whose advantages -+h and 0 have the variance 1 / 3.
    one = of_sources(inputs, [0.0, 1.0, 4.0, 4.0], weights=[0.5])
    assert row_advantages("gdpo", one) == pytest.approx([-(1.5**0.5), 1.5**0.5, 0.0, 0.0])


@pytest.mark.parametrize("seed", range(4))
def test_gdpo_matches_a_loop_with_gaps_unscored_rows_and_penalties(seed):
    mask, groups = ragged_mask(LENGTHS), list(PROMPTS)
    columns = [normal(seed + k, len(groups)) for k in range(3)]
    columns[1][[0, 4]] = torch.nan  # of prompt 7 some rows, of prompt -2 one
    columns[2][:] = torch.nan
    penalties = normal(seed + 9, len(groups)).abs()
    scores = normal(seed + 5, len(groups))
    rewards = token_rewards(scores - penalties, torch.zeros(mask.shape), mask, 0.0)
    inputs = inputs_of(mask, rewards, groups, epsilon=0.03, scores=scores)
    inputs = of_sources(inputs, *(column.tolist() for column in columns), weights=[0.7, -2.0, 1.0])
    mixed, less = np.zeros(len(groups)), np.zeros(len(groups))
    counted = [i for i, length in enumerate(LENGTHS) if length]
    for i in counted:
        mates = [j for j in counted if groups[j] == groups[i]]
        less[i] = float(penalties[i]) - np.mean([float(penalties[j]) for j in mates])
        for weight, column in zip((0.7, -2.0, 1.0), inputs.source_scores.T.tolist(), strict=True):
            values = [column[j] for j in mates if not np.isnan(column[j])]
            if len(values) > 1 and not np.isnan(column[i]):
                mixed[i] += weight * (column[i] - np.mean(values)) / (np.std(values, ddof=1) + 0.03)
    kept = mixed[counted]
    expected = (mixed - kept.mean()) / (kept.std(ddof=1) + 0.03) - less
    found, returns = ESTIMATORS["gdpo"](inputs)
    np.testing.assert_allclose(
        found.numpy(), np.where(mask.numpy(), expected[:, None], 0.0), atol=1e-6
    )
    np.testing.assert_allclose(
        returns.numpy(), returns_by_loop(rewards.numpy(), mask.numpy(), 0.9), atol=1e-6
    )


def test_grpo_divides_by_the_deviation_of_the_batch_by_hand():
    # 1, 3, 5, 5, 6: mean 4, variance (9 + 1 + 1 + 1 + 4) / 4 = 4. An empty answer is no score.
    inputs = scored(
        [1.0, 3.0, 5.0, 5.0, 6.0, 99.0], [0, 0, 1, 1, 2, 2], [1, 1, 2, 1, 1, 0], batch_std=True
    )
    assert row_advantages("grpo", inputs) == pytest.approx([-0.5, 0.5, 0.0, 0.0, 0.0, 0.0])
    assert row_advantages("grpo_pass_at_k", inputs) == pytest.approx([0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    # A group may spread more than the batch, and keeps that: 0 and 6 among 3, 3, 3, 3 and 3 have
    # the variance 18 / 6.
    wide = scored([0.0, 6.0, 3.0, 3.0, 3.0, 3.0, 3.0], [0, 0, 1, 1, 1, 1, 1], batch_std=True)
    assert row_advantages("grpo", wide) == pytest.approx(
        [-(3**0.5), 3**0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    )
    # The penalties 0.3 and 0.1 keep their size.
    inputs = penalised([1.0, 3.0], [0.3, 0.1], batch_std=True)
    half = 0.5**0.5 + 0.1
    assert row_advantages("grpo", inputs) == pytest.approx([-half, half], rel=1e-5)


def test_maxrl_divides_by_the_mean_before_the_kl_penalty_and_subtracts_that_by_hand():
    # Mean 2: -0.5 and 0.5; penalties of 0.3 and 0.1 are 0.1 above and below theirs.
    assert row_advantages("maxrl", penalised([1.0, 3.0], [0.3, 0.1])) == pytest.approx(
        [-0.6, 0.6], rel=1e-5
    )
    assert row_advantages("maxrl", penalised([0.0, 0.0], [-0.3, 0.1])) == pytest.approx(
        [0.2, -0.2], rel=1e-5
    )


@pytest.mark.parametrize("score", [0.1, -0.7, 1e-8, 3e7])
@pytest.mark.parametrize("name", WITHIN_A_GROUP)
def test_equal_scores_have_advantage_exactly_zero(name, score):
    lengths = [5, 3, 1, 2, 4, 4, 2]
    for epsilon in (1e-6, 1e-30):
        inputs = of_sources(
            scored([score] * 7, [0] * 7, lengths, epsilon=epsilon), [score] * 7, weights=[1.0]
        )
        assert torch.equal(ESTIMATORS[name](inputs)[0], torch.zeros(7, 5))


# In fp32 1002.3 + 13 x 0.1 is 1003.6002, 1003.5999 in another order: 4e-7 of it apart.
ROUNDED = [1003.6002, 1003.5999, 1003.6, 1003.6]


@pytest.mark.parametrize("batch_std", [False, True])
@pytest.mark.parametrize("name", WITHIN_A_GROUP)
def test_scores_that_are_equal_but_for_rounding_have_advantage_zero(name, batch_std):
    for more, groups in (([], []), ([1.0, 3.0], [7, 7])):
        scores = ROUNDED + more
        inputs = scored(scores, [0] * 4 + groups, batch_std=batch_std, epsilon=1e-6)
        inputs = of_sources(inputs, scores, weights=[1.0])
        # the scores that other code computed in another way, to a last digit
        inputs = replace(inputs, scores=torch.tensor(scores) * (1 + 1e-7))
        advantages = ESTIMATORS[name](inputs)[0]
        assert advantages[:4].abs().max() < 1e-9
        assert not more or advantages[4:].abs().max() > 1e-3


def test_a_large_score_does_not_hide_what_differs_beside_it_by_hand():
    # 1, 3 and 5 in one group, 1e9 in another: the sizes of another group say nothing.
    inputs = scored([1.0, 3.0, 5.0, 1e9, 1e9], [0, 0, 0, 1, 1])
    assert row_advantages("grpo", inputs) == pytest.approx([-1.0, 0.0, 1.0, 0.0, 0.0])
    assert row_advantages("gpg", scored([2.0, 2.00001], [0, 0])) == pytest.approx(
        [-5e-6, 5e-6], rel=0.05
    )


def test_maxrl_with_n_answers_is_the_gradient_of_the_log_success_rate_to_order_n_less_1():
    """Over all outcomes of n answers, each right with probability p = sigmoid(x)."""
    p = 0.3
    for n in (2, 3, 5):
        expected = 0.0  # of sum over answers of advantage x d log(probability of the answer) / dx
        for outcome in product([0.0, 1.0], repeat=n):
            probability = np.prod([p if right else 1 - p for right in outcome])
            advantages = row_advantages("maxrl", scored(list(outcome), [0] * n))
            slopes = [right - p for right in outcome]
            expected += probability * np.dot(advantages, slopes) / n
        truncated = sum((1 - p) ** (k - 1) for k in range(1, n)) * p * (1 - p)
        assert expected == pytest.approx(truncated, rel=1e-6)


def test_reinforce_plus_plus_with_and_without_a_baseline_by_hand():
    # gamma 0.5, rewards 1, 2, 4: 4; 2 + 2; 1 + 2.
    inputs = inputs_of(
        ragged_mask([3, 0], 3), torch.tensor([[1.0, 2.0, 4.0], [9.0, 9.0, 9.0]]), gamma=0.5
    )
    advantages, returns = ESTIMATORS["reinforce_plus_plus"](inputs)
    assert advantages.tolist() == [[3.0, 4.0, 4.0], [0.0, 0.0, 0.0]] and torch.equal(
        returns, advantages
    )
    # S = 7 and 1, mean 4; with gamma 1 the returns-to-go are 7, 6, 4 and 1.
    rewards = torch.tensor([[1.0, 2.0, 4.0], [1.0, 8.0, 8.0]])
    advantages, returns = ESTIMATORS["reinforce_plus_plus_baseline"](
        inputs_of(ragged_mask([3, 1]), rewards, [0, 0], gamma=1.0)
    )
    assert advantages.tolist() == [[3.0, 2.0, 0.0], [-3.0, 0.0, 0.0]]
    assert returns.tolist() == [[7.0, 6.0, 4.0], [1.0, 0.0, 0.0]]


def test_remax_by_hand_and_against_a_loop():
    mask = ragged_mask(LENGTHS)
    inputs = inputs_of(mask)
    advantages, returns = ESTIMATORS["remax"](inputs)
    expected = returns_by_loop(inputs.rewards.numpy(), mask.numpy(), 0.9)
    np.testing.assert_allclose(returns.numpy(), expected, atol=1e-10)
    for i, length in enumerate(LENGTHS):
        for t in range(length):
            expected[i, t] -= float(inputs.baselines[i]) * 0.9 ** (length - 1 - t)
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-10)
    assert row_advantages(
        "remax", scored([3.0, 1.0], [0, 0], baselines=torch.tensor([2.0, 5.0]))
    ) == [1.0, -4.0]


@pytest.mark.parametrize("name", ["reinforce_plus_plus_baseline", "remax"])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_a_score_equal_to_its_baseline_has_advantage_exactly_zero_for_every_gamma(name, gamma):
    inputs = scored([0.7] * 3, [0] * 3, [4, 1, 3], gamma=gamma, baselines=torch.tensor([0.7] * 3))
    assert torch.equal(ESTIMATORS[name](inputs)[0], torch.zeros(3, 4))


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@properties
@given(filling=fillings, columns=st.integers(0, 3), shuffle=st.randoms(use_true_random=False))
def test_results_do_not_depend_on_padding_or_the_order_of_rows(name, filling, columns, shuffle):
    mask = ragged_mask(LENGTHS)
    inputs = inputs_of(mask, groups=PROMPTS)
    order = shuffle.sample(range(len(LENGTHS)), len(LENGTHS))

    def disturbed(values):
        return widened(values.masked_fill(~mask, filling), columns, filling)[order]

    other = AdvantageInputs(
        disturbed(inputs.rewards),
        disturbed(inputs.values),
        widened(mask, columns, False)[order],
        inputs.groups[order] * 1000 - 3,
        inputs.baselines[order],
        inputs.gamma,
        inputs.lam,
        source_scores=inputs.source_scores[order],
        source_weights=inputs.source_weights,
    )
    for result, expected in zip(ESTIMATORS[name](other), ESTIMATORS[name](inputs), strict=True):
        torch.testing.assert_close(result, widened(expected, columns, 0.0)[order])


# Token rewards, returns-to-go and GAE


GAE_LENGTHS = (6, 4, 1, 0, 3)
MASK = ragged_mask(GAE_LENGTHS)


def gae(rewards, values, mask, gamma, lam) -> tuple[torch.Tensor, torch.Tensor]:
    groups = torch.arange(len(rewards))
    return ESTIMATORS["gae"](AdvantageInputs(rewards, values, mask, groups, None, gamma, lam))


def random_rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(GAE_LENGTHS), 6, generator=generator), torch.randn(
        len(GAE_LENGTHS), 6, generator=generator
    )


def test_token_rewards_by_hand():
    """Every token pays the KL penalty; the score is on the row's last True token, whatever stands
    outside the mask."""
    kl = torch.tensor([[1.0, -2.0, 3.0], [4.0, torch.nan, torch.inf]])
    rewards = token_rewards(torch.tensor([10.0, -1.0]), kl, ragged_mask((3, 1), 3), kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 1.0, 8.5], [-3.0, 0.0, 0.0]]
    rewards = token_rewards(
        torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.zeros(5, 6), gapped_mask(), 0.1
    )
    assert rewards.nonzero().tolist() == [[0, 5], [2, 2], [3, 5], [4, 3]]
    assert rewards.sum(dim=1).tolist() == [1.0, 0.0, 3.0, 4.0, 5.0]


def test_gae_by_hand():
    # gamma 0.5, lam 0.5, so gamma lam = 0.25; rewards 1, 2, 4; values 2, 4, 8.
    # delta_2 = 4 - 8 = -4; delta_1 = 2 + 0.5 * 8 - 4 = 2; delta_0 = 1 + 0.5 * 4 - 2 = 1.
    # A_2 = -4; A_1 = 2 + 0.25 * -4 = 1; A_0 = 1 + 0.25 * 1 = 1.25.
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[2.0, 4.0, 8.0]])
    advantages, returns = gae(rewards, values, ragged_mask((3,), 3), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[1.25, 1.0, -4.0]]
    assert returns.tolist() == [[3.25, 5.0, 4.0]]


class Operators(TorchDispatchMode):
    """Counts operators that launch a kernel on a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        self.count += not any(
            tag in str(operator) for tag in ("aten.slice", "aten.view", "aten.unsqueeze")
        )
        return operator(*arguments, **(named or {}))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 1.0), (0.9, 0.0), (0.0, 0.5)])
def test_long_rows_with_gaps_equal_a_loop_in_few_operators(gamma, lam):
    """Each operator is a launch on a GPU: a loop over 1,024 columns would make 10,000."""
    generator = torch.Generator().manual_seed(7)
    rewards, values = (torch.randn(3, 1024, generator=generator) for _ in range(2))
    mask = torch.rand(3, 1024, generator=generator) < 0.9
    mask[1, 250:] = False
    mask[2] = False
    with Operators() as operators:
        advantages, returns = gae(rewards, values, mask, gamma, lam)
    assert operators.count <= 100
    expected = np.zeros((3, 1024))
    for row in range(3):
        following, next_value = 0.0, 0.0
        for t in reversed(np.flatnonzero(mask[row].numpy())):
            value = float(values[row, t])
            following = (
                float(rewards[row, t]) + gamma * next_value - value + gamma * lam * following
            )
            expected[row, t], next_value = following, value
    largest = np.abs(expected).max()
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-5 * largest)
    np.testing.assert_allclose(
        returns.numpy(), np.where(mask, expected + values.numpy(), 0.0), atol=1e-5 * largest
    )
    with Operators() as operators:
        found = returns_to_go(rewards, mask, gamma)
    assert operators.count <= 100
    by_loop = returns_by_loop(rewards.double().numpy(), mask.numpy(), gamma)
    np.testing.assert_allclose(found.numpy(), by_loop, atol=1e-5 * np.abs(by_loop).max())


@pytest.mark.parametrize("width", [6, 7, 64, 101])
def test_the_width_of_a_batch_changes_no_bit(width):
    """The critic's pass computes targets in micro-batches, which are as wide as their longest
    answer."""
    rewards, values = random_rows(8)
    wide = [torch.nn.functional.pad(part, (0, width - 6), value=5.0) for part in (rewards, values)]
    narrow = gae(rewards, values, MASK, 0.99, 0.95)
    found = gae(*wide, torch.nn.functional.pad(MASK, (0, width - 6)), 0.99, 0.95)
    for one, other in zip(narrow, found, strict=True):
        assert torch.equal(other[:, :6], one) and not other[:, 6:].any()


# Statistics of groups


# Prompt 5: scores 1, 4 and an empty row; prompt 9: two empty rows; prompt 2: a single row.
GROUP_LENGTHS, GROUP_PROMPTS = [2, 0, 1, 0, 0, 2], [5, 5, 5, 9, 9, 2]
SCORES = torch.tensor([1.0, 8.0, 4.0, 8.0, 8.0, 2.5], dtype=torch.float64)


def groups_of(prompts, lengths) -> Groups:
    return Groups.of(torch.tensor(prompts), ragged_mask(lengths))


def test_statistics_by_hand_without_the_empty_rows():
    groups = groups_of(GROUP_PROMPTS, GROUP_LENGTHS)
    gaps = groups.gaps(SCORES)
    assert {x.dtype for x in (groups.sizes, gaps, groups.mean(gaps), groups.std(gaps))} == {
        torch.float64
    }
    assert groups.counted.tolist() == [True, False, True, False, False, True]
    assert groups.sizes.tolist() == [2.0, 2.0, 2.0, 0.0, 0.0, 1.0]
    assert groups.best(SCORES).tolist() == [4.0, 4.0, 4.0, 0.0, 0.0, 2.5]
    assert gaps.tolist() == [-3.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert groups.mean(gaps).tolist() == [-1.5, -1.5, -1.5, 0.0, 0.0, 0.0]
    assert groups.std(gaps).tolist() == pytest.approx([4.5**0.5] * 3 + [0.0] * 3)


@pytest.mark.parametrize(
    ("scores", "differ"),
    [
        ([1.0, 1.0, 2.0, 3.0], [False, False, True, True]),
        ([0.0, 0.0, 0.0, 0.0], [False] * 4),
        ([1003.6002, 1003.5999, -0.1, -0.1000002], [False, False, True, True]),
        ([1e-9, 1.00001e-9, -3.0, -3.000001], [True, True, False, False]),
        ([1.0, 1.0, float("nan"), 3.0], [False, False, True, True]),
        ([1.0, 1.0, float("inf"), float("inf")], [False, False, True, True]),
    ],
)
def test_groups_differ_if_their_scores_are_unequal_or_not_finite(scores, differ):
    assert groups_that_differ(torch.tensor(scores), torch.tensor([4, 4, -1, -1])).tolist() == differ
    order = [2, 0, 3, 1]
    shuffled = groups_that_differ(torch.tensor(scores)[order], torch.tensor([4, 4, -1, -1])[order])
    assert shuffled.tolist() == [differ[i] for i in order]


def test_groups_within_two_bounds_have_a_mean_strictly_between_them_or_not_finite():
    scores = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, float("nan"), 1.0])
    groups = torch.tensor([5, 5, 5, 5, 2, 2, 0, -1, 0])  # means 0.25, 0.5, 1, NaN
    assert groups_within(scores, groups, 0.25, 1.0).tolist() == [False] * 4 + [True] * 2 + [
        False,
        True,
        False,
    ]
    assert groups_within(scores, groups, 0.2, 0.5).tolist() == [True] * 4 + [False] * 3 + [
        True,
        False,
    ]
