"""Estimators of the KL divergence from samples (J. Schulman, "Approximating KL Divergence", 2020), and the exact sum.

With x drawn from p and d = log p(x) - log q(x): k1 = d is unbiased for KL(p || q), of either sign; k3 =
exp(-d) - 1 + d is unbiased too and never negative; k2 = d^2 / 2 and abs = |d| are biased. What is right as a value is
not right as a loss: for samples of p itself the gradient of k1 is 0 in expectation and that of k3 is the gradient of
KL(q || p), while that of k2 is the gradient of KL(p || q). So k1 or k3 belong into rewards and metrics, k2 or a
straight-through form into losses (Tang and Munos 2025, "On a few pitfalls in KL divergence gradient
estimation for RL").
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST_K3_EXPONENT = 20.0


def kl_k1(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """`d`, per token; shape and dtype of the inputs."""
    return logprobs - other_logprobs


def kl_k2(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """`d^2 / 2`, per token; shape and dtype of the inputs."""
    return 0.5 * (logprobs - other_logprobs) ** 2


def kl_k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """`exp(-d) - 1 + d`, per token; shape and dtype of the inputs.

    The exponent is at most 20, so a token counts e^20 at most, without a slope there: larger ones overflow fp32 in sums
    of squares, and at 89 by themselves. d itself has no bound from above.
    """
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


def kl_full(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`sum_v p_v (log p_v - log q_v)`, the divergence itself.

    Args:
        log_p: (..., V) fp32, normalised. Entries of probability 0 (-inf, or too small for the number format) add 0 to
            value and gradient, whatever `log_q` is there.
        log_q: (..., V) fp32, normalised. Where it is -inf and p is not 0, the divergence is infinite.

    Returns:
        (...) fp32, with the gradients of both.
    """
    impossible = log_p.exp() == 0
    log_p, log_q = (x.masked_fill(impossible, 0.0) for x in (log_p, log_q))
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """A tensor with the value of the first and the gradient of the second; both of one shape."""
    return gradient_of - gradient_of.detach() + value.detach()


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, estimator: str, straight: bool) -> Tensor:
    """Divergence from the reference as a loss of tokens.

    Args:
        logprobs: (B, R) fp32 of the policy in training, with gradient. Fill what stands outside the mask with
            something finite first: this function knows no mask, and 0 times the slope of NaN is NaN.
        ref_logprobs: (B, R) fp32, likewise.
        estimator: key of `KL_ESTIMATORS`, which gives the value.
        straight: the gradient is that of k2, hence that of KL(policy || reference) on samples of the policy itself.
            False: the estimator's own, which is 0 in expectation for k1 and that of other divergences for k3 and abs.

    Returns:
        (B, R) fp32 with gradient.

    Raises:
        KeyError: no such estimator.
    """
    value = KL_ESTIMATORS[estimator](logprobs, ref_logprobs)
    return straight_through(value, kl_k2(logprobs, ref_logprobs)) if straight else value
