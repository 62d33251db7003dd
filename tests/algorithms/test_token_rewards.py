"""Token rewards and GAE, by hand and against a loop over the definition."""

import numpy as np
import pytest
import torch

from dschat_ppo.algorithms.token_rewards import gae, token_rewards

LENGTHS = (6, 4, 1, 0, 3)


def ragged_mask(lengths=LENGTHS, width=6) -> torch.Tensor:
    return torch.arange(width) < torch.tensor(lengths).unsqueeze(1)


def gae_by_definition(rewards, values, lengths, gamma, lam):
    """A_t = sum_k (gamma lam)^k delta_{t+k} over the tokens of the row that are left, in float64."""
    advantages = np.zeros(rewards.shape)
    for row, length in enumerate(lengths):
        for t in range(length):
            for k in range(length - t):
                next_value = values[row, t + k + 1] if t + k + 1 < length else 0.0
                delta = rewards[row, t + k] + gamma * next_value - values[row, t + k]
                advantages[row, t] += (gamma * lam) ** k * delta
    return advantages


def random_rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(LENGTHS), 6, generator=generator), torch.randn(len(LENGTHS), 6, generator=generator)


def test_score_lands_on_the_last_real_token():
    mask = ragged_mask((3, 1), 3)
    rewards = token_rewards(torch.tensor([2.0, -1.0]), torch.zeros(2, 3), mask, kl_coef=0.1)
    assert rewards.tolist() == [[0.0, 0.0, 2.0], [-1.0, 0.0, 0.0]]


def test_kl_is_charged_on_every_token_the_last_one_included():
    kl = torch.tensor([[1.0, -2.0, 3.0]])
    rewards = token_rewards(torch.tensor([10.0]), kl, ragged_mask((3,), 3), kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 1.0, 8.5]]


def test_a_row_that_fills_the_width_is_scored_at_its_last_column():
    rewards = token_rewards(torch.tensor([4.0]), torch.zeros(1, 5), ragged_mask((5,), 5), kl_coef=0.1)
    assert rewards.tolist() == [[0.0, 0.0, 0.0, 0.0, 4.0]]


def test_an_empty_row_gets_no_reward():
    rewards = token_rewards(torch.tensor([4.0, 1.0]), torch.ones(2, 3), ragged_mask((0, 2), 3), kl_coef=1.0)
    assert rewards.tolist() == [[0.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]


@pytest.mark.parametrize("filling", [1e6, float("nan"), float("inf")])
def test_kl_outside_the_mask_is_ignored(filling):
    mask = ragged_mask()
    kl = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
    scores = torch.arange(5.0)
    polluted = torch.where(mask, kl, torch.tensor(filling))
    assert torch.equal(token_rewards(scores, polluted, mask, 0.3), token_rewards(scores, kl, mask, 0.3))


def test_gae_by_hand():
    # gamma 0.5, lam 0.5, so gamma lam = 0.25; rewards 1, 2, 4; values 2, 4, 8.
    # delta_2 = 4 - 8 = -4; delta_1 = 2 + 0.5 * 8 - 4 = 2; delta_0 = 1 + 0.5 * 4 - 2 = 1.
    # A_2 = -4; A_1 = 2 + 0.25 * -4 = 1; A_0 = 1 + 0.25 * 1 = 1.25.
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[2.0, 4.0, 8.0]])
    advantages, returns = gae(rewards, values, ragged_mask((3,), 3), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[1.25, 1.0, -4.0]]
    assert returns.tolist() == [[3.25, 5.0, 4.0]]


def test_gae_does_not_bootstrap_after_the_last_token():
    # One token, then padding that holds a value: A = r - V, the next value is not used.
    advantages, returns = gae(torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 50.0]]), ragged_mask((1,), 2), 1.0, 0.95)
    assert advantages.tolist() == [[2.0, 0.0]]
    assert returns.tolist() == [[3.0, 0.0]]


@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.8), (1.0, 0.95), (0.97, 1.0), (0.9, 0.0), (0.0, 0.5), (1.0, 1.0)])
def test_gae_matches_its_definition_over_ragged_rows(gamma, lam):
    rewards, values = random_rows(3)
    advantages, returns = gae(rewards, values, ragged_mask(), gamma, lam)
    expected = gae_by_definition(rewards.double().numpy(), values.double().numpy(), LENGTHS, gamma, lam)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5, atol=1e-5)
    inside = ragged_mask().numpy()
    np.testing.assert_allclose(returns.numpy(), np.where(inside, expected + values.numpy(), 0.0), rtol=1e-5, atol=1e-5)


def test_gae_with_lambda_one_returns_the_discounted_sum_of_rewards():
    rewards, values = random_rows(4)
    _, returns = gae(rewards, values, ragged_mask(), gamma=0.9, lam=1.0)
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            discounted = sum(0.9 ** (s - t) * float(rewards[row, s]) for s in range(t, length))
            assert float(returns[row, t]) == pytest.approx(discounted, abs=1e-5)


@pytest.mark.parametrize("filling", [1e6, float("nan")])
def test_padding_changes_neither_advantages_nor_returns(filling):
    rewards, values = random_rows(5)
    mask = ragged_mask()
    clean = gae(rewards, values, mask, 0.9, 0.8)
    polluted = gae(*(torch.where(mask, x, torch.tensor(filling)) for x in (rewards, values)), mask, 0.9, 0.8)
    for before, after in zip(clean, polluted, strict=True):
        assert torch.equal(before, after)
        assert after[~mask].abs().max().item() == 0.0
