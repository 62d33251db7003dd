"""Estimators of the KL divergence from samples (J. Schulman, "Approximating KL Divergence", 2020);
the exact sum is in `divergence.py`.

With x drawn from p and d = log p(x) - log q(x): k1 = d is an unbiased estimate of KL(p || q) and
may be negative; k3 = exp(-d) - 1 + d is unbiased and never negative; k2 = d^2 / 2 and abs = |d| are
biased. An unbiased value does not imply an unbiased gradient: for samples of p itself the gradient
of k1 is 0 in expectation, that of k3 is the gradient of KL(q || p), and that of k2 is the gradient
of KL(p || q). Use k1 or k3 in rewards and metrics, and k2 or a straight-through form in losses
(Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL").
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

LARGEST_K3_EXPONENT = 20.0
SMOOTH_BELOW = 0.01  # nats: a change of a probability by 1 %; rounding is 1e-6 in fp32


def kl_k1(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """`d`, per token; shape and dtype of the inputs."""
    return logprobs - other_logprobs


def kl_k2(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """`d^2 / 2`, per token; shape and dtype of the inputs."""
    return 0.5 * (logprobs - other_logprobs) ** 2


def kl_k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """`exp(-d) - 1 + d`, per token; shape and dtype of the inputs. The exponent is at most 20, with
    gradient 0 beyond: otherwise the sum of squares overflows fp32, and from 89 on exp itself does.
    d has no upper bound."""
    difference = (logprobs - other_logprobs).clamp_min(-LARGEST_K3_EXPONENT)
    return torch.expm1(-difference) + difference


def kl_abs(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """`|d|`, per token; shape and dtype of the inputs."""
    return (logprobs - other_logprobs).abs()


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "abs": kl_abs,
}


def smooth_abs(difference: Tensor) -> Tensor:
    """`|d| - s / 2`, and `d^2 / (2 s)` for |d| below s = 0.01; the same shape.

    Where two log-probs are equal up to rounding, the sign of d is noise, and the slope of |d| with
    it: micro-batches and ranks would change the gradient.
    """
    return smooth_l1_loss(
        difference, torch.zeros_like(difference), reduction="none", beta=SMOOTH_BELOW
    )


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """The value of the first tensor with the gradient of the second; both have the same shape."""
    return gradient_of - gradient_of.detach() + value.detach()


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, estimator: str, straight: bool) -> Tensor:
    """The KL divergence from the reference as a loss, per token: (B, R) fp32 with gradient.

    Log-probs (B, R) fp32 of both policies must be finite outside the mask too: this function has no
    mask, and a later product of 0 with the gradient of NaN is NaN. `estimator` gives the value.
    `straight`: the gradient is that of k2, which on samples of the policy is that of KL(policy ||
    reference). Otherwise it is the estimator's own, which is 0 in expectation for k1 and that of
    another divergence for k3 and abs (for abs that of `smooth_abs`: at the start of a run the
    policy equals the reference up to rounding).
    """
    value = KL_ESTIMATORS[estimator](logprobs, ref_logprobs)
    if estimator == "abs" and not straight:
        return straight_through(value, smooth_abs(logprobs - ref_logprobs))
    if straight:
        return straight_through(value, kl_k2(logprobs, ref_logprobs))
    return value
