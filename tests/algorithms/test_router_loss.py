"""The load-balancing loss by hand, and as transformers computes it."""

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from dschat_ppo.algorithms.router_loss import load_balancing_loss, router_load


def test_two_tokens_of_one_layer_by_hand():
    """Probabilities (0.5, 0.25, 0.25) and (0.2, 0.6, 0.2); the padding between them does not count."""
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05], [0.2, 0.6, 0.2]]).log()
    load = router_load([logits], torch.tensor([True, False, True]), 1)
    assert load.chosen.tolist() == [1, 1, 0] and float(load.count) == 2
    assert load.probability.tolist() == pytest.approx([0.7, 0.85, 0.45])
    loss = load_balancing_loss(load.probability, load.chosen, load.count)
    assert float(loss) == pytest.approx(3 * (0.5 * 0.35 + 0.5 * 0.425))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_it_is_transformers_loss_and_its_parts_add_up(top_k):
    generator = torch.Generator().manual_seed(top_k)
    logits = [torch.randn(12, 4, generator=generator, requires_grad=True) for _ in range(3)]
    counted = torch.rand(12, generator=generator) < 0.7
    expected = load_balancing_loss_func(tuple(logits), 4, top_k, counted.long())
    gradients = torch.autograd.grad(expected, logits)
    parts = [router_load([layer[part] for layer in logits], counted[part], top_k) for part in (slice(5), slice(5, 12))]
    chosen, count = sum(part.chosen for part in parts), sum(part.count for part in parts)
    loss = sum(load_balancing_loss(part.probability, chosen, count) for part in parts)
    torch.testing.assert_close(loss, expected)
    for found, gradient in zip(torch.autograd.grad(loss, logits), gradients, strict=True):
        torch.testing.assert_close(found, gradient)


def test_a_micro_batch_without_real_tokens_has_a_load_of_zero():
    load = router_load([torch.randn(3, 4)], torch.zeros(3, dtype=torch.bool), 2)
    assert load.chosen.tolist() == load.probability.tolist() == [0] * 4 and float(load.count) == 0
