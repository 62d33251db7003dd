"""The clipped value loss: by hand, against a loop, and its gradient by finite differences."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dschat_ppo.algorithms.actor_critic_losses import value_losses

LENGTHS = (5, 3, 0, 1)


def ragged_mask(lengths=LENGTHS, width=5) -> torch.Tensor:
    return torch.arange(width) < torch.tensor(lengths).unsqueeze(1)


def clipped_value_loss(values, old_values, returns, mask, clip_eps, num_tokens) -> SimpleNamespace:
    """The critic's loss: the sum of the token losses over the number of tokens of the optimizer step."""
    losses, clipped = value_losses(values, old_values, returns, mask, clip_eps)
    return SimpleNamespace(loss=losses.sum() / num_tokens, clipped=clipped)


def random_inputs(dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(4, 5, generator=generator, dtype=dtype)
    new = old + 0.5 * torch.randn(4, 5, generator=generator, dtype=dtype)
    return new, old, torch.randn(4, 5, generator=generator, dtype=dtype)


def loss_by_loop(new, old, returns, mask, clip_eps, num_tokens) -> float:
    total = 0.0
    for row, column in np.argwhere(mask):
        value, target = new[row, column], returns[row, column]
        errors = [(value - target) ** 2]
        if clip_eps > 0:
            near_old = min(max(value, old[row, column] - clip_eps), old[row, column] + clip_eps)
            errors.append((near_old - target) ** 2)
        total += 0.5 * max(errors)
    return total / num_tokens


@pytest.mark.parametrize(
    ("value", "target", "loss", "clipped"),
    [
        (1.5, 2.0, 0.5 * 0.8**2, True),  # clipped to 1.2, further from the target
        (1.5, 0.0, 0.5 * 1.5**2, False),  # clipped to 1.2, nearer to the target: the plain error counts
        (0.5, 0.0, 0.5 * 0.8**2, True),  # clipped to 0.8
        (0.5, 2.0, 0.5 * 1.5**2, False),
        (1.1, 3.0, 0.5 * 1.9**2, False),  # within the range
    ],
)
def test_one_token_by_hand(value, target, loss, clipped):
    result = clipped_value_loss(
        torch.tensor([[value]]),
        torch.tensor([[1.0]]),
        torch.tensor([[target]]),
        torch.tensor([[True]]),
        clip_eps=0.2,
        num_tokens=1,
    )
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    assert result.clipped.item() is clipped


@pytest.mark.parametrize("clip_eps", [0.0, 0.05, 0.2, 1.0])
def test_matches_a_loop_over_uneven_rows(clip_eps):
    new, old, returns = random_inputs(torch.float32)
    mask = ragged_mask()
    result = clipped_value_loss(new, old, returns, mask, clip_eps, num_tokens=9)
    expected = loss_by_loop(new.numpy(), old.numpy(), returns.numpy(), mask.numpy(), clip_eps, 9)
    assert result.loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("clip_eps", [0.0, 0.2])
def test_gradient_matches_finite_differences(clip_eps):
    new, old, returns = random_inputs()
    mask = ragged_mask()
    leaf = new.clone().requires_grad_()
    clipped_value_loss(leaf, old, returns, mask, clip_eps, num_tokens=9).loss.backward()
    arrays = old.numpy(), returns.numpy(), mask.numpy()
    step = 1e-6
    for row in range(4):
        for column in range(5):
            up, down = new.numpy().copy(), new.numpy().copy()
            up[row, column] += step
            down[row, column] -= step
            slope = (loss_by_loop(up, *arrays, clip_eps, 9) - loss_by_loop(down, *arrays, clip_eps, 9)) / (2 * step)
            assert leaf.grad[row, column].item() == pytest.approx(slope, abs=1e-7)


def test_micro_batches_add_up_to_the_whole():
    new, old, returns = random_inputs()
    mask = ragged_mask()
    whole = new.clone().requires_grad_()
    loss = clipped_value_loss(whole, old, returns, mask, 0.2, num_tokens=9).loss
    loss.backward()
    parts, total = new.clone().requires_grad_(), 0.0
    for rows in ([0, 3], [1], [2]):
        part = clipped_value_loss(parts[rows], old[rows], returns[rows], mask[rows], 0.2, num_tokens=9).loss
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad)


def test_padding_changes_neither_loss_nor_gradient():
    new, old, returns = random_inputs()
    mask = ragged_mask()
    clean, polluted = new.clone().requires_grad_(), new.masked_fill(~mask, 1e4).requires_grad_()
    loss = clipped_value_loss(clean, old, returns, mask, 0.2, 9).loss
    other = clipped_value_loss(polluted, old.masked_fill(~mask, -7.0), returns.masked_fill(~mask, 9.0), mask, 0.2, 9)
    loss.backward()
    other.loss.backward()
    assert other.loss.item() == loss.item()
    assert torch.equal(polluted.grad, clean.grad)


@pytest.mark.parametrize("clip_eps", [0.0, 0.2])
def test_losses_of_tokens_match_a_loop_over_single_tokens(clip_eps):
    new, old, returns = random_inputs()
    mask = ragged_mask()
    inputs = (x.masked_fill(~mask, float("nan")) for x in (new, old, returns))
    losses, clipped = value_losses(*inputs, mask, clip_eps)
    for row in range(4):
        for column in range(5):
            cell = np.array([[mask[row, column]]])
            arrays = (x[row : row + 1, column : column + 1].numpy() for x in (new, old, returns))
            expected = loss_by_loop(*arrays, cell, clip_eps, 1)
            assert losses[row, column].item() == pytest.approx(expected, abs=1e-12)
            plain = 0.5 * (new - returns)[row, column].item() ** 2
            assert clipped[row, column].item() is bool(expected > plain + 1e-12)
