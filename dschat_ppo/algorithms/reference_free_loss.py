"""Losses on preference pairs that need no reference: ORPO, SimPO and CPO."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_MEAN = -1e-6  # mean log-prob of an answer in `log_odds`: above it the odds exceed 10^6


def log_odds(mean_logprobs: Tensor) -> Tensor:
    """`log(p / (1 - p))` with p = exp(mean log-prob of an answer's tokens), of any shape (Hong et al. 2024, eq. 4). A
    mean above `LARGEST_MEAN` counts as that, without gradient: the odds of a certain answer are infinite."""
    mean = mean_logprobs.clamp_max(LARGEST_MEAN)
    # log(1 - e^x): `log1p` is exact for small e^x, `expm1` for e^x near 1 (Maechler 2012); each sees harmless values
    # where the other one is used, because the gradient of both is computed
    near = mean > -0.6931
    from_log1p = torch.log1p(-torch.exp(mean.masked_fill(near, -1.0)))
    from_expm1 = torch.log(-torch.expm1(mean.masked_fill(~near, -0.5)))
    return mean - torch.where(near, from_expm1, from_log1p)


def orpo_pair_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """`-beta log sigmoid(log odds(chosen) - log odds(rejected))`, (B,): the second term of ORPO (Hong et al. 2024).
    `chosen`, `rejected`: (B,), log-probs averaged over tokens; `beta`: lambda in the paper (eq. 6)."""
    return -beta * F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def simpo_pair_loss(chosen: Tensor, rejected: Tensor, beta: float, gamma: float) -> Tensor:
    """`-log sigmoid(beta (chosen - rejected) - gamma)`, (B,) (SimPO, Meng et al. 2024, eq. 6). `chosen`, `rejected`:
    (B,), log-probs averaged over tokens; `gamma`: required lead, in units of beta x log-prob."""
    return -F.logsigmoid(beta * (chosen - rejected) - gamma)


def cpo_pair_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """`-log sigmoid(beta (chosen - rejected))`, (B,): DPO with a uniform reference (CPO, Xu et al. 2024). `chosen`,
    `rejected`: (B,), log-probs summed over tokens."""
    return -F.logsigmoid(beta * (chosen - rejected))
