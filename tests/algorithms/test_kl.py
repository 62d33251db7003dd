"""KL forms: values by hand, expectations and expected gradients over an enumerated categorical distribution."""

import math

import pytest
import torch

from dschat_ppo.algorithms.kl import KL_ESTIMATORS, kl_k3, kl_loss

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.0, -0.4], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([-0.5, 0.2, 0.4, 1.0, -1.0], dtype=torch.float64), dim=0)


def exact_gradient(reverse: bool = False) -> torch.Tensor:
    """Gradient for the logits: sum of p (log p - log q) has p_j (log p_j - log q_j - KL), the other p_j - q_j."""
    p = [math.exp(x) / sum(math.exp(y) for y in LOGITS.tolist()) for x in LOGITS.tolist()]
    q = [math.exp(x) for x in REFERENCE.tolist()]
    if reverse:
        return torch.tensor([a - b for a, b in zip(p, q, strict=True)], dtype=torch.float64)
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return torch.tensor([a * (math.log(a / b) - kl) for a, b in zip(p, q, strict=True)], dtype=torch.float64)


def expected_gradient(estimator: str, straight: bool) -> torch.Tensor:
    """Gradient of the loss, averaged over all tokens with the weights of the policy itself (which carry none)."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=0)
    losses = kl_loss(logprobs.unsqueeze(0), REFERENCE.unsqueeze(0), estimator, straight).squeeze(0)
    (logprobs.detach().exp() * losses).sum().backward()
    return logits.grad


def test_values_by_hand():
    logprobs, other = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -3.0])
    values = {name: estimate(logprobs, other).tolist() for name, estimate in KL_ESTIMATORS.items()}
    assert values["k1"] == pytest.approx([0.5, -1.0, 0.0])
    assert values["k2"] == pytest.approx([0.125, 0.5, 0.0])
    assert values["k3"] == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2, 0.0])
    assert values["abs"] == pytest.approx([0.5, 1.0, 0.0])
    for name, expected in values.items():
        for straight in (False, True):
            assert kl_loss(logprobs, other, name, straight).tolist() == pytest.approx(expected, rel=1e-6)


def test_gradients_in_expectation():
    """The straight-through form has that of the exact divergence; k2 too, k3 that of the reverse one, k1 none."""
    for estimator in KL_ESTIMATORS:
        torch.testing.assert_close(expected_gradient(estimator, straight=True), exact_gradient())
    torch.testing.assert_close(expected_gradient("k2", straight=False), exact_gradient())
    torch.testing.assert_close(expected_gradient("k3", straight=False), exact_gradient(reverse=True))
    assert expected_gradient("k1", straight=False).abs().max().item() < 1e-15
    for biased in (exact_gradient(reverse=True), expected_gradient("abs", straight=False)):
        assert (biased - exact_gradient()).abs().max().item() > 0.05


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("straight", [False, True])
def test_rounding_does_not_decide_the_gradient_where_policy_and_reference_are_equal(estimator, straight):
    logprobs, gradients = torch.full((2,), -1.0, requires_grad=True), []
    for noise in (-2e-6, 2e-6):
        loss = kl_loss(logprobs, torch.full((2,), -1.0 + noise), estimator, straight)
        gradients += torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(*gradients, atol=5e-4, rtol=0)


def test_k3_is_capped_before_its_square_overflows():
    # Log-ratios -19, and beyond the cap of -20: -21, -1000 and -inf; from above there is no cap.
    logprobs = torch.tensor([-19.0, -21.0, -1000.0, -math.inf, 0.0], requires_grad=True)
    estimate = kl_k3(logprobs, torch.tensor([0.0, 0.0, 0.0, 0.0, -1000.0]))
    cap = math.exp(20) - 1 - 20
    assert estimate.tolist() == pytest.approx([math.exp(19) - 1 - 19, cap, cap, cap, 999.0])
    assert (estimate.float() ** 2).sum().isfinite()
    estimate.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([1 - math.exp(19), 0.0, 0.0, 0.0, 1.0])
    assert math.isnan(kl_k3(torch.tensor(math.nan), torch.tensor(0.0)).item())
