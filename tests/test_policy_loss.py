"""The clipped surrogate: by hand, against a loop, and its gradient by finite differences."""

import math

import numpy as np
import pytest
import torch

from dschat_ppo.algorithms.policy_loss import ppo_policy_loss

LENGTHS = (5, 3, 0, 1)


def ragged_mask(lengths=LENGTHS, width=5) -> torch.Tensor:
    return torch.arange(width) < torch.tensor(lengths).unsqueeze(1)


def random_inputs(dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(4, 5, generator=generator, dtype=dtype) - 2
    new = old + 0.4 * torch.randn(4, 5, generator=generator, dtype=dtype)
    return new, old, torch.randn(4, 5, generator=generator, dtype=dtype)


def loss_by_loop(new, old, advantages, mask, clip_eps, num_tokens) -> float:
    total = 0.0
    for row, column in np.argwhere(mask):
        ratio = math.exp(new[row, column] - old[row, column])
        bounded = min(max(ratio, 1 - clip_eps), 1 + clip_eps)
        total += -min(advantages[row, column] * ratio, advantages[row, column] * bounded)
    return total / num_tokens


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.5, 2.0, -2.4, True),  # gain is capped at 1.2 x 2
        (1.5, -2.0, 3.0, False),  # a loss is not capped
        (0.5, 2.0, -1.0, False),  # nor is the way back towards the old policy
        (0.5, -2.0, 1.6, True),  # 0.8 x 2
        (1.1, 2.0, -2.2, False),
        (0.9, -2.0, 1.8, False),
        (1.0, 3.0, -3.0, False),
    ],
)
def test_one_token_by_hand(ratio, advantage, loss, clipped):
    result = ppo_policy_loss(
        torch.tensor([[math.log(ratio) - 1.0]]),
        torch.tensor([[-1.0]]),
        torch.tensor([[advantage]]),
        torch.tensor([[True]]),
        clip_eps=0.2,
        num_tokens=1,
    )
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    assert result.ratio.item() == pytest.approx(ratio, rel=1e-5)
    assert result.clipped.item() is clipped


def test_tokens_are_summed_and_divided_by_the_given_count():
    # Ratio 1 everywhere: -(1 + 2 + 3) / 12, although the mask holds three tokens.
    advantages = torch.tensor([[1.0, 2.0], [3.0, 99.0]])
    mask = torch.tensor([[True, True], [True, False]])
    result = ppo_policy_loss(torch.zeros(2, 2), torch.zeros(2, 2), advantages, mask, 0.2, num_tokens=12)
    assert result.loss.item() == pytest.approx(-0.5)


@pytest.mark.parametrize("clip_eps", [0.05, 0.2, 0.5])
def test_matches_a_loop_over_uneven_rows(clip_eps):
    new, old, advantages = random_inputs(torch.float32)
    mask = ragged_mask()
    result = ppo_policy_loss(new, old, advantages, mask, clip_eps, num_tokens=9)
    expected = loss_by_loop(new.numpy(), old.numpy(), advantages.numpy(), mask.numpy(), clip_eps, 9)
    assert result.loss.item() == pytest.approx(expected, rel=1e-5)


def test_gradient_matches_finite_differences():
    new, old, advantages = random_inputs()
    mask = ragged_mask()
    leaf = new.clone().requires_grad_()
    ppo_policy_loss(leaf, old, advantages, mask, 0.2, num_tokens=9).loss.backward()
    arrays = old.numpy(), advantages.numpy(), mask.numpy()
    step = 1e-6
    for row in range(4):
        for column in range(5):
            up, down = new.numpy().copy(), new.numpy().copy()
            up[row, column] += step
            down[row, column] -= step
            slope = (loss_by_loop(up, *arrays, 0.2, 9) - loss_by_loop(down, *arrays, 0.2, 9)) / (2 * step)
            assert leaf.grad[row, column].item() == pytest.approx(slope, abs=1e-7)


def test_no_gradient_where_the_gain_is_clipped_and_none_outside_the_mask():
    logprobs = torch.tensor([[math.log(1.5), math.log(1.1), 0.3]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    ppo_policy_loss(logprobs, torch.zeros(1, 3), torch.ones(1, 3), mask, 0.2, num_tokens=1).loss.backward()
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, -1.1, 0.0], rel=1e-5)


def test_micro_batches_add_up_to_the_whole():
    new, old, advantages = random_inputs()
    mask = ragged_mask()
    whole = new.clone().requires_grad_()
    loss = ppo_policy_loss(whole, old, advantages, mask, 0.2, num_tokens=9).loss
    loss.backward()
    parts, total = new.clone().requires_grad_(), 0.0
    for rows in ([0], [1, 2], [3]):
        part = ppo_policy_loss(parts[rows], old[rows], advantages[rows], mask[rows], 0.2, num_tokens=9).loss
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad)


@pytest.mark.parametrize("filling", [1e4, float("nan"), float("inf")])
def test_padding_changes_neither_loss_nor_gradient(filling):
    new, old, advantages = random_inputs()
    mask = ragged_mask()
    clean, polluted = new.clone().requires_grad_(), new.masked_fill(~mask, filling).requires_grad_()
    loss = ppo_policy_loss(clean, old, advantages, mask, 0.2, 9).loss
    other = ppo_policy_loss(polluted, old.masked_fill(~mask, -7.0), advantages.masked_fill(~mask, 9.0), mask, 0.2, 9)
    loss.backward()
    other.loss.backward()
    assert other.loss.item() == loss.item()
    assert torch.equal(polluted.grad, clean.grad)


def test_an_empty_batch_has_loss_zero_and_gradient_zero():
    logprobs = torch.randn(2, 3, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    loss = ppo_policy_loss(logprobs, torch.zeros(2, 3), torch.ones(2, 3), mask, 0.2, num_tokens=4).loss
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad.abs().max().item() == 0.0


def test_metrics_carry_no_gradient():
    new, old, advantages = random_inputs()
    result = ppo_policy_loss(new.requires_grad_(), old, advantages, ragged_mask(), 0.2, 9)
    assert not result.ratio.requires_grad
    assert not result.clipped.requires_grad
