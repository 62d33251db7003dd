"""The clipped value loss: by hand, against a loop, and its gradient by finite differences."""

import pytest
import torch

from dschat_ppo.algorithms.actor_critic_losses import value_losses

LENGTHS = (5, 3, 0, 1)


def ragged_mask(lengths=LENGTHS, width=5) -> torch.Tensor:
    return torch.arange(width) < torch.tensor(lengths).unsqueeze(1)


def random_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    new = old + 0.5 * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return new, old, torch.randn(4, 5, generator=generator, dtype=torch.float64)


def loss_by_hand(value, old, target, clip_eps) -> float:
    errors = [(value - target) ** 2]
    if clip_eps > 0:
        errors.append((min(max(value, old - clip_eps), old + clip_eps) - target) ** 2)
    return 0.5 * max(errors)


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
    tensors = (torch.tensor([[x]]) for x in (value, 1.0, target, True))
    losses, was_clipped = value_losses(*tensors, 0.2)
    assert losses.item() == pytest.approx(loss, rel=1e-5)
    assert was_clipped.item() is clipped


@pytest.mark.parametrize("clip_eps", [0.0, 0.05, 0.2, 1.0])
def test_tokens_match_a_loop_and_finite_differences(clip_eps):
    """Padding holds NaN and moves neither a loss nor a gradient."""
    mask, step = ragged_mask(), 1e-6
    new, old, returns = (x.masked_fill(~mask, float("nan")) for x in random_inputs())
    new.requires_grad_()
    losses, clipped = value_losses(new, old, returns, mask, clip_eps)
    losses.sum().backward()
    assert not losses[~mask].any() and not clipped[~mask].any() and not new.grad[~mask].any()
    for place in mask.nonzero().tolist():
        value, before, target = (x[tuple(place)].item() for x in (new, old, returns))
        loss = loss_by_hand(value, before, target, clip_eps)
        up, down = (loss_by_hand(value + move, before, target, clip_eps) for move in (step, -step))
        assert losses[tuple(place)].item() == pytest.approx(loss, abs=1e-12)
        assert new.grad[tuple(place)].item() == pytest.approx((up - down) / (2 * step), abs=1e-7)
        assert clipped[tuple(place)].item() is (loss > 0.5 * (value - target) ** 2 + 1e-12)
