"""How often one of several answers is right."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pass_at_k(passed: Tensor, k: int) -> Tensor:
    """Probability that at least one of k answers, drawn from a prompt's n without putting back, passes.

    `1 - C(n - c, k) / C(n, k)` with c answers that pass (Chen et al. 2021, eq. 1), unbiased for the policy's pass@k.

    Args:
        passed: (prompts, n) bool.
        k: from 1 to n.

    Returns:
        (prompts,) float64.
    """
    n = passed.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} of {n} answers")
    table = torch.tensor([1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)], dtype=torch.float64)
    return table[passed.sum(dim=1).cpu()]
