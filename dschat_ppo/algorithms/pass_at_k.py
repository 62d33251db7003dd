"""pass@k: how often at least one of k answers is right."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pass_at_k(passed: Tensor, k: int) -> Tensor:
    """Probability that at least one of k answers, drawn without replacement from the n answers to a prompt, passes.

    `1 - C(n - c, k) / C(n, k)` with c passing answers, an unbiased estimate of the policy's pass@k (Chen et al. 2021,
    eq. 1). `passed` (prompts, n) bool, k from 1 to n -> (prompts,) fp64.
    """
    n = passed.shape[1]
    # (n + 1,) pass@k of a prompt with c = 0, ..., n passing answers
    table = torch.tensor([1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)], dtype=torch.float64)
    return table[passed.sum(dim=1).cpu()]  # (prompts, n) -> (prompts,)
