"""Log-probabilities and entropy of tokens, against numpy in fp64."""

import math

import numpy as np
import pytest
import torch

from dschat_ppo.algorithms.logprobs import token_entropy, token_logprobs


def numpy_log_softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits.astype(np.float64) / temperature
    largest = scaled.max(axis=-1, keepdims=True)
    return scaled - largest - np.log(np.exp(scaled - largest).sum(axis=-1, keepdims=True))


def random_logits(dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)


def random_tokens() -> torch.Tensor:
    return torch.randint(0, 11, (3, 4), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_match_numpy_log_softmax(temperature, dtype):
    logits, tokens = random_logits(dtype), random_tokens()
    table = numpy_log_softmax(logits.float().numpy(), temperature)
    expected = np.take_along_axis(table, tokens.numpy()[..., None], axis=-1)[..., 0]
    result = token_logprobs(logits, tokens, temperature)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=2e-6)


def test_gradient_of_a_logprob_is_one_hot_minus_probabilities():
    logits = random_logits(torch.float32)[0, :1].requires_grad_()
    token_logprobs(logits, torch.tensor([4]), temperature=2.0).sum().backward()
    probabilities = np.exp(numpy_log_softmax(logits.detach().numpy(), 2.0))[0]
    expected = (np.eye(11)[4] - probabilities) / 2.0
    np.testing.assert_allclose(logits.grad[0].numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_is_minus_sum_p_log_p(temperature, dtype):
    logits = random_logits(dtype)
    table = numpy_log_softmax(logits.float().numpy(), temperature)
    result = token_entropy(logits, temperature)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), -(np.exp(table) * table).sum(axis=-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_of_probability_zero_add_nothing(temperature):
    low = -math.inf
    logits = torch.tensor([[low, math.log(1.0), low, math.log(3.0)]], requires_grad=True)
    others = torch.tensor([[math.log(1.0), math.log(3.0)]], requires_grad=True)
    p = 1 / 4 if temperature == 1 else 1 / 10  # at temperature 0.5 the weights are 1 and 9
    entropy = token_entropy(logits, temperature)
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    for score in (token_entropy, lambda x, t: token_logprobs(x, torch.tensor([x.shape[1] - 1]), t)):
        [found], [expected] = (torch.autograd.grad(score(x, temperature).sum(), x) for x in (logits, others))
        assert found[0, [0, 2]].tolist() == [0.0, 0.0]
        torch.testing.assert_close(found[0, [1, 3]], expected[0])
