"""Estimators of the KL divergence from samples (J. Schulman, "Approximating KL Divergence", 2020).

With x drawn from p and d = log p(x) - log q(x): k1 = d is unbiased for KL(p || q), of either sign; k3 =
exp(-d) - 1 + d is unbiased too and never negative.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kl_k1(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """`d`, per token; shape and dtype of the inputs."""
    return logprobs - other_logprobs


def kl_k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """`exp(-d) - 1 + d`, per token; shape and dtype of the inputs."""
    difference = logprobs - other_logprobs
    return torch.expm1(-difference) + difference
