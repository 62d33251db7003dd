"""Factors of the learning rate, equal to those of transformers to the last bit."""

import pytest
import torch
from transformers import get_scheduler

from dschat_ppo.algorithms.learning_rate import rate_factor

KINDS = ["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]


def of_transformers(kind: str, warmup: int, total: int, peak: float, **settings) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(kind, optimizer, warmup, total, scheduler_specific_kwargs=settings)
    return [float(scheduler.lr_lambdas[0](step)) for step in range(total + 4)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup", "total"), [(0, 7), (3, 11), (7, 100), (0, 1), (5, 6)])
def test_factors_are_those_of_transformers(kind, warmup, total):
    expected = of_transformers(kind, warmup, total, 3e-5)
    found = [rate_factor(step, kind, warmup, total, peak=3e-5, last=1e-7) for step in range(total + 4)]
    assert found == expected


@pytest.mark.parametrize(("warmup", "total"), [(0, 9), (3, 11)])
def test_a_lowest_factor_is_that_of_transformers_where_it_has_one(warmup, total):
    expected = of_transformers("cosine_with_min_lr", warmup, total, 0.5, min_lr_rate=0.3)
    assert [rate_factor(step, "cosine", warmup, total, least=0.3) for step in range(total + 4)] == expected


def test_a_lowest_factor_by_hand():
    found = [rate_factor(step, "linear", 1, 5, least=0.2) for step in range(7)]
    assert found == pytest.approx([0, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    found = [rate_factor(step, "cosine_with_restarts", 0, 2, least=0.2) for step in range(4)]
    assert found == pytest.approx([1, 0.6, 0.2, 0.2])
