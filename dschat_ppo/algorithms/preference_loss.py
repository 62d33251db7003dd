"""Losses on pairs of answers."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from dschat_ppo.algorithms.masked import masked_sum


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    pair_mask: Tensor,
    num_pairs: Tensor | float,
    margin: Tensor | None = None,
) -> Tensor:
    """`sum -log sigmoid(chosen - rejected - margin) / num_pairs` (Bradley & Terry 1952; Ouyang et al. 2022, eq. 1).

    `log(1 + exp(rejected - chosen + margin))`, which others offer as a second loss ("logexp"), is the same number.

    Args:
        chosen_scores: (B,) fp32.
        rejected_scores: (B,) fp32.
        pair_mask: (B,) bool, False on filler pairs.
        num_pairs: real pairs of the whole optimizer step, over all micro-batches and ranks.
        margin: (B,) fp32 by which the chosen answer should lead (Touvron et al. 2023, eq. 2); None for 0.

    Returns:
        Scalar with gradient.
    """
    lead = chosen_scores - rejected_scores
    if margin is not None:
        lead = lead - margin
    return masked_sum(-F.logsigmoid(lead), pair_mask) / num_pairs


def reward_centering_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, pair_mask: Tensor, num_pairs: Tensor | float
) -> Tensor:
    """`sum (chosen + rejected)^2 / num_pairs`: draws scores towards a mean of 0, which Bradley-Terry leaves open
    (Eisenstein et al. 2023).

    Args:
        chosen_scores: (B,) fp32.
        rejected_scores: (B,) fp32.
        pair_mask: (B,) bool, False on filler pairs.
        num_pairs: real pairs of the whole optimizer step, over all micro-batches and ranks.

    Returns:
        Scalar with gradient.
    """
    return masked_sum((chosen_scores + rejected_scores) ** 2, pair_mask) / num_pairs


def sigmoid_pair_loss(lead: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """`-(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D)`, (B,).

    With e = 0 DPO (Rafailov et al. 2023, eq. 7), above it conservative DPO: labels are wrong with probability e
    (Mitchell 2023, "A note on DPO with noisy preferences").
    """
    right, wrong = F.logsigmoid(beta * lead), F.logsigmoid(-beta * lead)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def robust_pair_loss(lead: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """`[-(1 - e) log sigmoid(beta D) + e log sigmoid(-beta D)] / (1 - 2 e)`, (B,): its mean over labels flipped with
    probability e is the loss of the true labels (Chowdhury et al. 2024, "Provably robust DPO")."""
    right, wrong = F.logsigmoid(beta * lead), F.logsigmoid(-beta * lead)
    return (-(1 - label_smoothing) * right + label_smoothing * wrong) / (1 - 2 * label_smoothing)


def ipo_pair_loss(lead: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """`(D - 1 / (2 beta))^2`, (B,), with D of log-probs averaged over tokens (Azar et al. 2024, eq. 17)."""
    return (lead - 1 / (2 * beta)) ** 2


def hinge_pair_loss(lead: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """`max(0, 1 - beta D)`, (B,) (SLiC, Zhao et al. 2023; on ratios to a reference Liu et al. 2024)."""
    return F.relu(1 - beta * lead)


# (D (B,), beta, label smoothing) -> loss of each pair (B,)
PAIR_LOSSES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "dpo": sigmoid_pair_loss,
    "cdpo": sigmoid_pair_loss,
    "ipo": ipo_pair_loss,
    "robust_dpo": robust_pair_loss,
    "hinge": hinge_pair_loss,
    "dpo_nll": sigmoid_pair_loss,
}


def log_ratios(logprobs: Tensor, ref_logprobs: Tensor, num_tokens: Tensor, objective: str) -> tuple[Tensor, Tensor]:
    """`log pi(answer) - log pi_ref(answer)` of both answers of each pair; their difference is D.

    Args:
        logprobs: (2B,) of the policy, summed over each answer's tokens, all chosen answers first.
        ref_logprobs: (2B,) of the reference, alike.
        num_tokens: (2B,) int64, tokens of each answer.
        objective: "ipo" takes means over tokens instead of sums, without which its goal of 1 / (2 beta) would be
            shared among however many tokens an answer has.

    Returns:
        `(chosen (B,), rejected (B,))` in the dtype of the log-probs; 0 tokens count as one.
    """
    ratios = logprobs - ref_logprobs
    if objective == "ipo":
        ratios = ratios / num_tokens.clamp_min(1)
    chosen, rejected = ratios.chunk(2)
    return chosen, rejected


def preference_loss(
    objective: str,
    lead: Tensor,
    pair_mask: Tensor,
    num_pairs: Tensor | float,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`sum of the pairs' losses / num_pairs`.

    Args:
        objective: a key of `PAIR_LOSSES`.
        lead: (B,), D: chosen less rejected of `log_ratios`.
        pair_mask: (B,) bool, False on filler pairs.
        num_pairs: real pairs of the whole optimizer step, over all micro-batches and ranks.
        beta: above 0; how far the policy may go from the reference (less is farther).
        label_smoothing: in [0, 0.5), the share of labels taken to be wrong; for "cdpo" and "robust_dpo".

    Returns:
        Scalar with gradient.
    """
    return masked_sum(PAIR_LOSSES[objective](lead, beta, label_smoothing), pair_mask) / num_pairs


def chosen_nll_loss(
    chosen_logprobs: Tensor, num_tokens: Tensor, pair_mask: Tensor, num_pairs: Tensor | float
) -> Tensor:
    """`sum (-log pi(chosen) / its tokens) / num_pairs` (Pang et al. 2024, eq. 1, first term).

    Args:
        chosen_logprobs: (B,), summed over each chosen answer's tokens.
        num_tokens: (B,) int64, its tokens; 0 counts as one.
        pair_mask: (B,) bool, False on filler pairs.
        num_pairs: real pairs of the whole optimizer step, over all micro-batches and ranks.

    Returns:
        Scalar with gradient.
    """
    return masked_sum(-chosen_logprobs / num_tokens.clamp_min(1), pair_mask) / num_pairs
