"""From scored rows to experience, against plain loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scored_rows import (
    EOS,
    LENGTHS,
    LONGEST,
    SCORES,
    Computation,
    assert_rows_that_stay_train_as_without_the_others,
    groups_of_four,
    scored,
)

from dschat_ppo.algorithms.advantage_estimators import ESTIMATORS
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.ppo.advantages import empty_rows_without_score
from dschat_ppo.types import ScoredRollout


def computation(**flags) -> Computation:
    return Computation(
        AlgorithmFlags(**flags),
        LONGEST,
        seed=0,
        score_clip=flags.get("reward_clip", 5.0),
        source_weights=[1.0, 0.0],
    )


def rewards_by_loop(rows: ScoredRollout, scores, kl_coef: float) -> np.ndarray:
    rewards = np.zeros((6, LONGEST))
    for i, length in enumerate(LENGTHS):
        for t in range(length):
            rewards[i, t] = -kl_coef * float(rows.kl[i, t]) + (
                scores[i] if t == length - 1 else 0.0
            )
    return rewards


@pytest.mark.parametrize(
    ("flags", "scores"),
    [
        ({}, (1.0, -5.0, 2.0, 0.5, 3.0, -1.0)),
        ({"reward_clip": 0.0}, SCORES),
        ({"reward_clip": 2.0}, (1.0, -2.0, 2.0, 0.5, 2.0, -1.0)),
        ({"reward_clip": 0.0, "missing_eos_penalty": 1.5}, (1.0, -7.0, 0.5, -1.0, 3.0, -2.5)),
        # the last 2 of 4 tokens: lengths 3, 1, 0, 4, 2, 4
        (
            {"reward_clip": 0.0, "overlong_buffer": 2, "overlong_penalty": 3.0},
            (-0.5, -7.0, 2.0, -2.5, 3.0, -4.0),
        ),
        (
            {"reward_clip": 2.0, "missing_eos_penalty": 1.0, "overlong_buffer": 4},
            (0.25, -2.25, 1.0, -1.5, 1.5, -3.0),
        ),
    ],
)
def test_scores_are_clipped_then_penalised(flags, scores):
    rows = scored()
    found = computation(**flags)(rows, step=1)
    np.testing.assert_allclose(found.rewards.numpy(), rewards_by_loop(rows, scores, 0.1), atol=1e-6)
    assert torch.equal(found.scores, rows.scores)
    torch.testing.assert_close(found.penalised_scores, torch.tensor(scores))


def test_gae_whitened_over_all_tokens():
    rows = scored()
    found = computation(gamma=0.9, gae_lambda=0.8)(rows, step=1)
    rewards = rewards_by_loop(rows, np.clip(SCORES, -5, 5), 0.1)
    advantages = np.zeros((6, LONGEST))
    for i, length in enumerate(LENGTHS):
        following = 0.0
        for t in reversed(range(length)):
            next_value = float(rows.values[i, t + 1]) if t + 1 < length else 0.0
            following = (
                rewards[i, t] + 0.9 * next_value - float(rows.values[i, t]) + 0.9 * 0.8 * following
            )
            advantages[i, t] = following
    mask = rows.response_mask.numpy()
    np.testing.assert_allclose(
        found.returns.numpy()[mask], (advantages + rows.values.numpy())[mask], atol=1e-5
    )
    kept = advantages[mask]
    np.testing.assert_allclose(
        found.advantages.numpy()[mask], (kept - kept.mean()) / kept.std(), atol=1e-5
    )
    plain = computation(gamma=0.9, gae_lambda=0.8, whiten_advantages=False)(rows, step=1)
    np.testing.assert_allclose(plain.advantages.numpy()[mask], kept, atol=1e-5)


def test_equal_scores_are_not_blown_up_by_the_noise_of_the_kl():
    rows = scored(scores=torch.tensor([2.0, 2.0, 1.0, 1.0, 3.0, -1.0]))
    found = computation(advantage_estimator="grpo", kl_coef=0.1, reward_clip=0.0)(rows, step=1)
    penalties = -rewards_by_loop(rows, [0.0] * 6, 0.1).sum(axis=1)
    # of a group of equal scores: the penalties alone, as they are
    half = (penalties[1] - penalties[0]) / 2
    # 3 and -1 are 2^0.5 / 2 above and below their mean, in units of their deviation
    standardised = np.array([3.0, -1.0]) / (8**0.5 + 1e-6) - penalties[4:]
    apart = (standardised - standardised.mean()) / max(1, standardised.std(ddof=1))
    expected = [half, -half, 0.0, 0.0, *apart]
    assert 0 < abs(half) < 0.1
    for i, length in enumerate(LENGTHS):
        assert found.advantages[i, :length].tolist() == pytest.approx(
            [expected[i]] * length, abs=1e-5
        )


def test_the_deviation_of_the_batch_is_that_of_the_rows_with_a_token():
    found = computation(advantage_estimator="grpo", group_std="batch", reward_clip=0.0)(
        scored(), step=1
    ).advantages
    std = np.std([1.0, -7.0, 0.5, 3.0, -1.0], ddof=1) + 1e-6
    np.testing.assert_allclose(found[:, 0].numpy(), np.array([4, -4, 0, 0, 2, -2]) / std, atol=1e-5)


def test_gdpo_weighs_the_sources_and_subtracts_penalties_as_they_are():
    """Rows of groups 0, 0, -, 1, 2, 2, of which that of group 1 has no other; rows 2 to 5 except 4
    are cut."""
    sources = torch.tensor([[1.0, 2.0], [3.0, 1.0], [9.0, 9.0], [5.0, 5.0], [7.0, 0.0], [7.0, 4.0]])
    weights = [2.0, 0.5]
    rows = scored(source_scores=sources, scores=sources @ torch.tensor(weights))
    flags = AlgorithmFlags(advantage_estimator="gdpo", missing_eos_penalty=0.5)
    found = Computation(flags, LONGEST, 0, 0.0, source_weights=weights)(rows, step=1).advantages[
        :, 0
    ]
    half = 0.5**0.5
    mixed = np.array([-2 + 0.5, 2 - 0.5, 0.0, -0.5, 0.5]) * half  # of rows 0, 1, 3, 4, 5
    expected = mixed / mixed.std(ddof=1) + np.array([0.0, 0.0, 0.0, 0.25, -0.25])
    np.testing.assert_allclose(found[[0, 1, 3, 4, 5]].numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("estimator", "apart"),
    [
        ("grpo", 0.5**0.5),
        ("dr_grpo", 0.5),
        ("rloo", 1.0),
    ],
)
def test_sources_that_cancel_leave_equal_scores_equal(estimator, apart):
    """0.9 - 3 * 0.3 = 0.3 - 3 * 0.1 = 0, which fp32 gives as two numbers of size 1e-8. Scores 1 and
    0 of the other group differ."""
    sources = torch.zeros(6, 2)
    sources[:2] = torch.tensor([[0.9, 0.3], [0.3, 0.1]])
    sources[4] = torch.tensor([4.0, 1.0])
    weights = [1.0, -3.0]
    scores = torch.stack([weights[0] * sources[:, 0], weights[1] * sources[:, 1]]).sum(dim=0)
    assert scores[0] != scores[1]
    flags = AlgorithmFlags(advantage_estimator=estimator, kl_coef=0.0)
    made = Computation(flags, LONGEST, 0, 5.0, source_weights=weights)
    advantages = made(scored(source_scores=sources, scores=scores), step=1).advantages[:, 0]
    assert advantages[:2].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(advantages[4:].numpy(), [apart, -apart], atol=1e-5)


def test_the_size_of_a_score_is_that_of_what_its_sources_add_and_of_a_clipped_one_the_bound():
    """By hand: |1 * 2| + |-3 * 1|; |1 * 9| + |-3 * 1|, clipped to 5; a source without score."""
    sources = torch.tensor([[2.0, 1.0], [9.0, 1.0], [0.5, float("nan")]])
    rows = scored(source_scores=sources.repeat(2, 1), scores=torch.tensor([-1.0, 6.0, 0.5] * 2))
    made = Computation(AlgorithmFlags(), LONGEST, 0, 5.0, source_weights=[1.0, -3.0])
    assert made.score_magnitudes(rows).tolist() == [5.0, 5.0, 0.5] * 2


def test_the_greedy_score_of_remax_carries_no_penalties():
    rows = scored(baselines=torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0]))
    flags = {"missing_eos_penalty": 1.5, "overlong_buffer": 2, "overlong_penalty": 3.0}
    found = computation(advantage_estimator="remax", kl_coef=0.0, reward_clip=0.0, **flags)(
        rows, step=1
    )
    # of rows 3 and 5, cut at 4 tokens: 0.5 - 1.5 - 3 - 0 and -1 - 1.5 - 3 - 1; of row 0, ended
    # after 3: 1 - 1.5 - 1
    assert [float(found.advantages[row, 0]) for row in (3, 5, 0)] == pytest.approx(
        [-4.0, -6.5, -1.5]
    )


def test_the_target_of_the_kl_is_of_k1_whatever_the_reward_takes():
    values = []
    for estimator in ("k1", "k3"):
        rows = scored()
        compute = computation(kl_target=0.01, kl_horizon=60, kl_estimator=estimator)
        compute(replace(rows, kl=rows.kl if estimator == "k1" else rows.kl**2), step=1)
        values.append(compute.kl_coef.value)
    assert values[0] == values[1] != 0.1


def test_truncated_answers_are_left_out_of_the_policys_loss_alone():
    rows = scored()
    found = computation(mask_truncated_answers=True)(rows, step=1)
    assert found.loss_mask.sum(dim=1).tolist() == [3, 1, 0, 0, 2, 0]
    assert torch.equal(found.response_mask, rows.response_mask)
    assert torch.equal(found.advantages, computation()(rows, step=1).advantages)
    assert torch.equal(computation()(rows, step=1).loss_mask, rows.response_mask)


def test_importance_weights_are_factors_of_the_token_losses():
    rows = scored()
    found = computation(importance_correction="token", importance_cap=1.5)(rows, step=1)
    ratios = (rows.old_logprobs - rows.rollout_logprobs).exp().clamp_max(1.5)
    torch.testing.assert_close(found.loss_weights, torch.where(rows.response_mask, ratios, 0.0))
    found = computation(importance_correction="token", importance_cap=1.5, importance_floor=0.9)(
        rows, step=1
    )
    torch.testing.assert_close(
        found.loss_weights, torch.where(rows.response_mask, ratios.clamp_min(0.9), 0.0)
    )


@pytest.fixture
def wide_bounds(monkeypatch):
    """Few tokens of a small batch have a covariance within the bounds of the paper."""
    monkeypatch.setattr("dschat_ppo.algorithms.step.CLIP_COV_BOUNDS", (-100.0, 100.0))


TRUNCATED_TOO = {
    "--high_entropy_share": {"high_entropy_share": 0.5},
    "kl_cov": {"policy_loss": "kl_cov", "covariance_share": 0.5, "whiten_advantages": False},
    "clip_cov": {"policy_loss": "clip_cov", "covariance_share": 1.0, "whiten_advantages": False},
}
HALF = {"covariance_share": 0.5}


@pytest.mark.parametrize("flags", TRUNCATED_TOO.values(), ids=TRUNCATED_TOO)
def test_tokens_are_chosen_among_those_of_the_loss(flags, wide_bounds):
    """With `--mask_truncated_answers` 6 of 14 tokens are left; the 8 others have the largest
    entropies, and log-probs that would move the mean of the covariances."""
    rows = scored()
    left = rows.response_mask & (rows.finish_reason == EOS).unsqueeze(1)  # (6, 4)
    gone = rows.response_mask & ~left
    rows = replace(
        rows, entropies=rows.entropies + 9.0 * gone, old_logprobs=rows.old_logprobs - 50.0 * gone
    )
    found = computation(mask_truncated_answers=True, kl_coef=0.0, **flags)(rows, step=1)
    advantages, logprobs = found.advantages[left].double(), rows.old_logprobs[left].double()
    covariances = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    if flags.get("policy_loss") == "kl_cov":
        assert found.selected.sum() == 3
        assert (
            found.selected[left].tolist() == (covariances >= covariances.sort().values[3]).tolist()
        )
    elif "policy_loss" in flags:
        assert torch.equal(found.selected, left)
        some = [
            computation(mask_truncated_answers=True, **{**flags, **HALF})(rows, step).selected
            for step in (1, 1, 2)
        ]
        assert torch.equal(some[0], some[1]) and not torch.equal(some[0], some[2]), (
            "drawn by seed and step"
        )
    else:
        entropies = rows.entropies[left]
        assert (found.loss_weights[left] > 0).tolist() == (
            entropies >= entropies.sort().values[3]
        ).tolist()


def test_running_scaling_divides_by_the_deviation_of_all_scores_so_far():
    compute = computation(normalize_rewards="running", kl_coef=0.0, reward_clip=0.0)
    first, second = scored(), scored(scores=torch.tensor(SCORES) * 10 + 1)
    compute(first, step=1)
    found = compute(second, step=2)
    seen = np.array([*SCORES, *(10 * s + 1 for s in SCORES)])
    expected = second.scores / seen.std(ddof=1) * second.response_mask.any(dim=1)
    torch.testing.assert_close(found.rewards.sum(dim=1), expected.float())


def test_the_kl_coefficient_adapts_after_the_step():
    rows = scored()
    compute = computation(kl_target=0.01, kl_horizon=60, reward_clip=0.0)
    first = compute(rows, step=1)
    assert compute.used_kl_coef == 0.1 != compute.kl_coef.value, "that before it adapts"
    np.testing.assert_allclose(first.rewards.numpy(), rewards_by_loop(rows, SCORES, 0.1), atol=1e-6)
    kl = float((rows.old_logprobs - rows.ref_logprobs)[rows.response_mask].double().mean())
    expected = 0.1 * (1 + np.clip(kl / 0.01 - 1, -0.2, 0.2) * 6 / 60)
    assert compute.kl_coef.value == pytest.approx(expected, rel=1e-6)
    second = compute(rows, step=2).rewards
    np.testing.assert_allclose(second.numpy(), rewards_by_loop(rows, SCORES, expected), atol=1e-6)


# Rows without a score, which leave their group


ESTIMATED = [
    *({"advantage_estimator": name} for name in ESTIMATORS),
    {"advantage_estimator": "grpo", "group_std": "batch"},
    {"advantage_estimator": "grpo", "loss_aggregation": "constant"},
    {"advantage_estimator": "dr_grpo", "normalize_rewards": "running"},
    {"kl_target": 0.1},
]


@pytest.mark.parametrize("flags", ESTIMATED, ids=lambda flags: "-".join(map(str, flags.values())))
def test_rows_that_stay_train_as_in_a_run_without_the_others(flags):
    assert_rows_that_stay_train_as_without_the_others(AlgorithmFlags(**flags))


def test_advantages_of_groups_with_missing_scores_by_hand():
    plain = {"kl_coef": 0.0, "reward_clip": 0.0}
    third = 1 / 3  # the mean of 1, 0, 0, whose deviation is 1 / sqrt(3)
    for scores, name, expected in (
        ([1.0, None, 0.0, 0.0], "dr_grpo", [2 * third, 0, -third, -third]),
        ([1.0, None, 0.0, 0.0], "grpo", [2 / 3**0.5, 0, -1 / 3**0.5, -1 / 3**0.5]),
        ([1.0, None, 0.0, 0.0], "rloo", [1, 0, -0.5, -0.5]),
        ([1.0, None, None, None], "grpo", [0, 0, 0, 0]),
        ([1.0, None, None, None], "rloo", [0, 0, 0, 0]),
        ([1.0, None, None, None], "reinforce_plus_plus_baseline", [0, 0, 0, 0]),
        ([1.0, None, None, None], "remax", [0.75, 0, 0, 0]),
        ([1.0, None, 1.0, 1.0], "grpo", [0, 0, 0, 0]),  # an environment failed once: no advantage
        ([None] * 4, "grpo", [0, 0, 0, 0]),
    ):
        rows = groups_of_four(scores, torch.full((4,), 0.25))
        found = computation(advantage_estimator=name, **plain)(rows, step=1)
        assert found.advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    whole = groups_of_four([1.0, 0.0, 0.0, 0.0])
    assert empty_rows_without_score(whole) is whole


def test_rows_that_left_keep_their_length_and_their_sampled_tokens():
    rows = groups_of_four([1.0, None, 0.0, 0.0])
    found = empty_rows_without_score(rows)
    assert found.response_mask.sum(dim=1).tolist() == [1, 0, 3, 1]
    assert found.response_lengths.tolist() == rows.response_lengths.tolist() == [1, 2, 3, 1]
    assert torch.equal(found.sampled_mask, rows.response_mask)
    assert not found.values[1].any() and torch.equal(found.values[0], rows.values[0])
