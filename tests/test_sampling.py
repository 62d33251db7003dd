"""Truncation by hand, and draws against the exact distribution."""

import math

import numpy as np
import pytest
import torch

from dschat_ppo.rollout.sampling import Sampling, sample, truncate

DRAWS = 20_000
# Upper 0.001 % points of chi-square for 1 to 6 degrees of freedom: a right sampler fails once in 100,000 seeds.
CHI_SQUARE_LIMIT = {1: 19.51, 2: 23.03, 3: 25.90, 4: 28.47, 5: 30.86, 6: 33.11}


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def kept(logits: torch.Tensor, top_k: int, top_p: float) -> list[list[int]]:
    return [torch.isfinite(row).nonzero().flatten().tolist() for row in truncate(logits, top_k, top_p)]


def exact_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Temperature, then top-k, then the smallest set that reaches top-p, in float64."""
    weights = np.exp(logits.astype(np.float64) / temperature)
    order = np.argsort(-weights)
    if top_k:
        weights[order[top_k:]] = 0.0
    weights /= weights.sum()
    reached = 0.0
    for token in order:
        if reached >= top_p:
            weights[token] = 0.0
        reached += weights[token]
    return weights / weights.sum()


# Truncation


@pytest.mark.parametrize(
    ("top_k", "tokens"), [(0, [0, 1, 2, 3]), (1, [2]), (2, [0, 2]), (3, [0, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_top_k_keeps_the_likeliest(top_k, tokens):
    assert kept(logits_of(0.3, 0.1, 0.4, 0.2), top_k, 1.0) == [tokens]


@pytest.mark.parametrize(
    ("top_p", "tokens"),
    [(1.0, [0, 1, 2, 3]), (0.95, [0, 1, 2, 3]), (0.85, [0, 2, 3]), (0.6, [0, 2]), (0.3, [2]), (0.01, [2])],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, tokens):
    assert kept(logits_of(0.3, 0.1, 0.4, 0.2), 0, top_p) == [tokens]


def test_top_p_is_measured_after_top_k():
    # Among 0.4 and 0.3 alone the first holds 4/7 = 0.57, so 0.6 needs both and 0.5 only one.
    assert kept(logits_of(0.3, 0.1, 0.4, 0.2), 2, 0.6) == [[0, 2]]
    assert kept(logits_of(0.3, 0.1, 0.4, 0.2), 2, 0.5) == [[2]]


def test_rows_are_truncated_each_for_itself():
    logits = torch.cat([logits_of(0.7, 0.1, 0.1, 0.1), logits_of(0.1, 0.1, 0.35, 0.45)])
    assert kept(logits, 0, 0.6) == [[0], [2, 3]]
    assert kept(logits, 1, 1.0) == [[0], [3]]


def test_kept_logits_are_left_as_they_are():
    logits = logits_of(0.3, 0.1, 0.4, 0.2)
    result = truncate(logits, 3, 0.85)
    assert torch.equal(result[0, [0, 2, 3]], logits[0, [0, 2, 3]])
    assert result[0, 1].item() == -math.inf
    assert truncate(logits, 0, 1.0) is logits


# Draws


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.7), (0.7, 4, 0.8), (1.6, 5, 0.9)],
)
def test_draws_follow_the_exact_distribution(temperature, top_k, top_p):
    logits = torch.tensor([1.3, -0.4, 0.2, 2.0, -1.0, 0.9, 0.0])
    sampling = Sampling(temperature, top_p, top_k)
    tokens, _ = sample(logits.expand(DRAWS, 7), sampling, torch.Generator().manual_seed(11))
    counts = np.bincount(tokens.numpy(), minlength=7)
    expected = DRAWS * exact_distribution(logits.numpy(), temperature, top_k, top_p)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < CHI_SQUARE_LIMIT[int(possible.sum()) - 1]


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.3, top_p=0.8, top_k=4), Sampling(0.7, top_k=1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprob_is_that_of_the_temperature_scaled_distribution_before_truncation(sampling, dtype):
    logits = (torch.randn(6, 9, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    tokens, logprobs = sample(logits, sampling, torch.Generator().manual_seed(1))
    scaled = logits.double().numpy() / sampling.temperature
    table = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    assert logprobs.dtype == torch.float32
    np.testing.assert_allclose(logprobs.numpy(), table[np.arange(6), tokens.numpy()], rtol=1e-5, atol=1e-5)


def test_greedy_takes_the_likeliest_whatever_the_rest_says():
    logits = torch.tensor([[0.1, 0.3, 0.2], [5.0, 4.9, -1.0]])
    tokens, _ = sample(logits, Sampling(3.0, 0.5, 1), torch.Generator().manual_seed(0))
    assert tokens.tolist() == [1, 0]
    assert tokens.dtype == torch.int64


def test_draws_are_reproducible_from_the_generator_alone():
    logits = torch.zeros(50, 20)
    first, _ = sample(logits, Sampling(), torch.Generator().manual_seed(4))
    torch.manual_seed(99)
    again, _ = sample(logits, Sampling(), torch.Generator().manual_seed(4))
    other, _ = sample(logits, Sampling(), torch.Generator().manual_seed(5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_rows_are_drawn_independently():
    tokens, _ = sample(torch.zeros(1000, 2), Sampling(), torch.Generator().manual_seed(4))
    assert 400 < int(tokens.sum()) < 600
