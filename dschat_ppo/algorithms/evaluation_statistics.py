"""Statistics of evaluations: pass@k, win shares and confidence intervals."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pass_at_k(passed: Tensor, k: int) -> Tensor:
    """Probability that at least one of k responses, drawn without replacement from the n responses
    to a prompt, passes.

    `1 - C(n - c, k) / C(n, k)` with c passing responses, an unbiased estimate of the policy's
    pass@k (Chen et al. 2021, eq. 1). `passed` (prompts, n) bool, k from 1 to n -> (prompts,) fp64.
    """
    n = passed.shape[1]
    # (n + 1,) pass@k of a prompt with c = 0, ..., n passing responses
    table = torch.tensor(
        [1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)], dtype=torch.float64
    )
    return table[passed.sum(dim=1).cpu()]  # (prompts, n) -> (prompts,)


def win_shares(scores: Tensor, baseline: Tensor) -> Tensor:
    """Probability that a response scores higher than one of the baseline to the same prompt; a tie
    counts half.

    Compares all pairs of the finite scores (prompts, n) and (prompts, m) -> (prompts,) fp64. The
    mean over prompts is the win rate (the Mann-Whitney statistic of each prompt, averaged).
    """
    difference = scores.double().unsqueeze(2) - baseline.double().unsqueeze(1)  # (prompts, n, m)
    return (difference.sign() + 1).mean(dim=(1, 2)) / 2


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """95 % confidence interval (low, high) of the mean of `count` independent values from 0 to 1
    (Wilson 1927).

    For values that are 0 or 1 it is Wilson's score interval. For values between, such as
    `win_shares`, it is wide enough too: their variance is at most `p (1 - p)`. It has no random
    numbers, and where all values agree it does not shrink to a point, as a bootstrap does.
    """
    z = 1.959963984540054  # quantile of the normal distribution
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    reach = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, centre - reach), min(1.0, centre + reach)
