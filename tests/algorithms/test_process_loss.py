"""Losses of step scores and their aggregation, by loops over single steps."""

import math

import pytest
import torch

from dschat_ppo.algorithms.process_loss import aggregate_steps, step_losses


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(("score", "label"), [(0.3, 1.0), (0.3, 0.0), (-2.0, 1.0), (1.5, 0.25), (0.0, 0.5)])
def test_binary_cross_entropy_by_hand(score, label):
    expected = -label * math.log(sigmoid(score)) - (1 - label) * math.log(1 - sigmoid(score))
    found = step_losses(torch.tensor([score], dtype=torch.float64), torch.tensor([label], dtype=torch.float64))
    assert found.tolist() == pytest.approx([expected], rel=1e-9)


def test_the_gradient_is_the_difference_of_probability_and_label():
    scores = torch.tensor([-1.0, 0.5, 90.0, -1e4], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1.0, 0.3, 0.0, 1.0], dtype=torch.float64)
    losses = step_losses(scores, labels)
    losses.sum().backward()
    assert losses.isfinite().all()
    expected = [sigmoid(s) - y if s > -700 else -y for s, y in zip(scores.tolist(), labels.tolist(), strict=True)]
    assert scores.grad.tolist() == pytest.approx(expected, abs=1e-12)


# In the last row the columns of the steps, 1 and 2, add up to that of no step, 3.
SCORES = torch.tensor([[0.5, -1.0, 2.0, 9.0], [-3.0, 7.0, 7.0, -40.0], [8.0, 1.0, -0.5, 8.0]])
MASK = torch.tensor([[True, False, True, False], [True, False, False, True], [False, True, True, False]])
STEPS = [[0.5, 2.0], [-3.0, -40.0], [1.0, -0.5]]


@pytest.mark.parametrize(("how", "of"), [
    ("min", min), ("mean", lambda p: sum(p) / len(p)), ("last", lambda p: p[-1]), ("product", math.prod),
])  # fmt: skip
def test_aggregates_by_hand(how, of):
    expected = [of([sigmoid(score) for score in row]) for row in STEPS]
    found = aggregate_steps(SCORES, MASK, how)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("how", ["min", "mean", "last", "product"])
def test_values_outside_the_mask_are_ignored(how):
    scores = SCORES.masked_fill(~MASK, math.nan)
    assert aggregate_steps(scores, MASK, how).tolist() == aggregate_steps(SCORES, MASK, how).tolist()
