"""Kahneman-Tversky optimisation (KTO): a loss on single answers that are desirable or undesirable."""

from __future__ import annotations

import torch
from torch import Tensor


def kto_baseline(log_ratio_sum: Tensor, num_rows: Tensor | float) -> Tensor:
    """`max(0, sum / num_rows)`: z0, an estimate of KL(policy || reference) (Ethayarajh et al. 2024). No gradient.

    `log_ratio_sum`: scalar, the sum of `log pi(answer) - log pi_ref(answer)` over the `num_rows` mismatched rows (a
    prompt with another prompt's answer) of all micro-batches and ranks of an optimizer step.
    """
    return (log_ratio_sum / num_rows).clamp_min(0).detach()


def kto_losses(
    log_ratios: Tensor, desirable: Tensor, baseline: Tensor, beta: float, desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:  # fmt: skip
    """`w_D (1 - sigmoid(beta (r - z0)))` of desirable, `w_U (1 - sigmoid(beta (z0 - r)))` of undesirable answers, (B,):
    this is `lambda_y - v(x, y)` of Ethayarajh et al. 2024 (eq. 8).

    `log_ratios` (B,), r: `log pi(answer) - log pi_ref(answer)`, summed over each answer's tokens. `desirable` (B,)
    bool. `baseline` (B,) or scalar, z0. A smaller `beta`, above 0, lets the policy move further from the reference.
    """
    gain = torch.where(desirable, log_ratios - baseline, baseline - log_ratios)
    weights = torch.full_like(gain, undesirable_weight).masked_fill(desirable, desirable_weight)
    return weights * torch.sigmoid(-beta * gain)  # 1 - sigmoid(x), without cancellation


def balanced_weights(desirable: int, undesirable: int, weights: tuple[float, float]) -> tuple[float, float]:
    """The ratio `w_D n_D / (w_U n_U)`, and the desirable weight that makes it 1 with the same undesirable weight.
    Ethayarajh et al. 2024 (section 4.2) recommend a ratio from 1 to 4/3. n: answers, above 0; `weights`: w_D, w_U."""
    return weights[0] * desirable / (weights[1] * undesirable), weights[1] * undesirable / desirable
