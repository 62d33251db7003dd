"""Factors of the learning rate, equal to those of transformers to the last bit."""

import pytest
import torch
from transformers import get_scheduler

from dschat_ppo.engine.build_engine import OptimizerSettings, rate_factor

KINDS = ["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]


def of_transformers(kind: str, warmup: int, total: int, peak: float, **settings) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(kind, optimizer, warmup, total, scheduler_specific_kwargs=settings)
    return [float(scheduler.lr_lambdas[0](step)) for step in range(total + 4)]


def factors(kind: str, warmup: int, total: int, steps: int, peak: float = 1.0, least: float = 0.0) -> list[float]:
    settings = OptimizerSettings(peak, 0.0, kind, warmup, total, (0.9, 0.95), 1e-8, min_lr_ratio=least)
    return [rate_factor(settings, step) for step in range(steps)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup", "total"), [(0, 7), (3, 11), (7, 100), (0, 1), (5, 6)])
def test_factors_are_those_of_transformers(kind, warmup, total):
    assert factors(kind, warmup, total, total + 4, 3e-5) == of_transformers(kind, warmup, total, 3e-5)


@pytest.mark.parametrize(("warmup", "total"), [(0, 9), (3, 11)])
def test_a_lowest_factor_is_that_of_transformers_where_it_has_one(warmup, total):
    expected = of_transformers("cosine_with_min_lr", warmup, total, 0.5, min_lr_rate=0.3)
    assert factors("cosine", warmup, total, total + 4, least=0.3) == expected


def test_a_lowest_factor_by_hand():
    assert factors("linear", 1, 5, 7, least=0.2) == pytest.approx([0, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert factors("cosine_with_restarts", 0, 2, 4, least=0.2) == pytest.approx([1, 0.6, 0.2, 0.2])
