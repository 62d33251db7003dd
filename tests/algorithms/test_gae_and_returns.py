"""Token rewards, returns-to-go and GAE: by hand, against loops over the definitions, and with gaps in the mask."""

import numpy as np
import pytest
import torch
from ragged import gapped_mask, normal, ragged_mask, returns_by_loop
from torch.utils._python_dispatch import TorchDispatchMode

from dschat_ppo.algorithms.advantage_estimators import ESTIMATORS, AdvantageInputs, returns_to_go, token_rewards

LENGTHS = (6, 4, 1, 0, 3)
MASK = ragged_mask(LENGTHS)


def gae(rewards, values, mask, gamma, lam) -> tuple[torch.Tensor, torch.Tensor]:
    groups = torch.arange(len(rewards))
    return ESTIMATORS["gae"](AdvantageInputs(rewards, values, mask, groups, None, gamma, lam))


def random_rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(LENGTHS), 6, generator=generator), torch.randn(len(LENGTHS), 6, generator=generator)


def test_token_rewards_by_hand():
    """Every token pays the KL penalty; the score is on the row's last True token, whatever stands outside the mask."""
    kl = torch.tensor([[1.0, -2.0, 3.0], [4.0, torch.nan, torch.inf]])
    rewards = token_rewards(torch.tensor([10.0, -1.0]), kl, ragged_mask((3, 1), 3), kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 1.0, 8.5], [-3.0, 0.0, 0.0]]
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.zeros(5, 6), gapped_mask(), 0.1)
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


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9, 1.0])
def test_returns_to_go_match_a_loop_over_rows_with_gaps(gamma):
    # Tokens 0, 1, 3, 5 of the first row: a gap neither ends the episode nor counts as a step.
    mask, rewards = gapped_mask(), normal(3, 5, 6)
    returns = returns_to_go(rewards.masked_fill(~mask, float("nan")), mask, gamma)
    np.testing.assert_allclose(returns.numpy(), returns_by_loop(rewards.numpy(), mask.numpy(), gamma), atol=1e-12)
    by_hand = rewards[0, 1] + gamma * rewards[0, 3] + gamma**2 * rewards[0, 5]
    assert returns[0, 1].item() == pytest.approx(by_hand.item())


class Operators(TorchDispatchMode):
    """Counts operators that launch a kernel on a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        self.count += not any(tag in str(operator) for tag in ("aten.slice", "aten.view", "aten.unsqueeze"))
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
            following = float(rewards[row, t]) + gamma * next_value - value + gamma * lam * following
            expected[row, t], next_value = following, value
    largest = np.abs(expected).max()
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-5 * largest)
    np.testing.assert_allclose(returns.numpy(), np.where(mask, expected + values.numpy(), 0.0), atol=1e-5 * largest)
    with Operators() as operators:
        found = returns_to_go(rewards, mask, gamma)
    assert operators.count <= 100
    by_loop = returns_by_loop(rewards.double().numpy(), mask.numpy(), gamma)
    np.testing.assert_allclose(found.numpy(), by_loop, atol=1e-5 * np.abs(by_loop).max())


@pytest.mark.parametrize("width", [6, 7, 64, 101])
def test_the_width_of_a_batch_changes_no_bit(width):
    """The critic's pass computes targets in micro-batches, which are as wide as their longest answer."""
    rewards, values = random_rows(8)
    wide = [torch.nn.functional.pad(part, (0, width - 6), value=5.0) for part in (rewards, values)]
    narrow = gae(rewards, values, MASK, 0.99, 0.95)
    found = gae(*wide, torch.nn.functional.pad(MASK, (0, width - 6)), 0.99, 0.95)
    for one, other in zip(narrow, found, strict=True):
        assert torch.equal(other[:, :6], one) and not other[:, 6:].any()
