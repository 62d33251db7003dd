"""Losses of step 2. On preference pairs: reward model (Bradley-Terry), direct preference
optimisation, and without a reference ORPO, SimPO and CPO. On labelled answers: Kahneman-Tversky
optimisation (KTO).

`pair_mask` (B,) bool is False on filler pairs. `num_pairs` are the real pairs of the whole
optimizer step, over all micro-batches and ranks. Losses divided by it are scalars with gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat_ppo.algorithms.aggregation import masked_sum


def bradley_terry_pair_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, margin: Tensor | None = None
) -> Tensor:
    """`-log sigmoid(chosen - rejected - margin)` of each pair, (B,); see `bradley_terry_loss`."""
    lead = chosen_scores - rejected_scores
    if margin is not None:
        lead = lead - margin
    return -F.logsigmoid(lead)


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    pair_mask: Tensor,
    num_pairs: Tensor | float,
    margin: Tensor | None = None,
) -> Tensor:
    """`sum -log sigmoid(chosen - rejected - margin) / num_pairs` (Bradley & Terry 1952; Ouyang et
    al. 2022, eq. 1).

    Scores (B,) fp32. `margin` (B,) fp32 is the required lead of the chosen score (Touvron et al.
    2023, eq. 2); None: 0. The loss equals `log(1 + exp(rejected - chosen + margin))`, a separate
    loss ("logexp") in some libraries.
    """
    losses = bradley_terry_pair_loss(chosen_scores, rejected_scores, margin)
    return masked_sum(losses, pair_mask) / num_pairs


def reward_centering_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, pair_mask: Tensor, num_pairs: Tensor | float
) -> Tensor:
    """`sum (chosen + rejected)^2 / num_pairs`, which pulls the mean score to 0 (Eisenstein et al.
    2023). Bradley-Terry does not determine the mean. Scores (B,) fp32."""
    return masked_sum((chosen_scores + rejected_scores) ** 2, pair_mask) / num_pairs


def sigmoid_pair_loss(lead: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """`-(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D)`, (B,).

    With e = 0 this is DPO (Rafailov et al. 2023, eq. 7), with e > 0 conservative DPO for labels
    that are wrong with probability e (Mitchell 2023, "A note on DPO with noisy preferences").
    """
    right = F.logsigmoid(beta * lead)
    wrong = F.logsigmoid(-beta * lead)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def robust_pair_loss(lead: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """`[-(1 - e) log sigmoid(beta D) + e log sigmoid(-beta D)] / (1 - 2 e)`, (B,). Its mean over
    labels that are flipped with probability e is the DPO loss of the true labels (Chowdhury et al.
    2024, "Provably robust DPO")."""
    right = F.logsigmoid(beta * lead)
    wrong = F.logsigmoid(-beta * lead)
    return (-(1 - label_smoothing) * right + label_smoothing * wrong) / (1 - 2 * label_smoothing)


def ipo_pair_loss(lead: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """`(D - 1 / (2 beta))^2`, (B,), with D from log-probs averaged over tokens (IPO, Azar et al.
    2024, eq. 17)."""
    return (lead - 1 / (2 * beta)) ** 2


def hinge_pair_loss(lead: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """`max(0, 1 - beta D)`, (B,) (SLiC, Zhao et al. 2023; with ratios to a reference Liu et al.
    2024)."""
    return F.relu(1 - beta * lead)


# (D (B,), beta, e) -> loss of each pair (B,), with D the margin of `log_ratios` and e the label
# smoothing
PAIR_LOSSES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "dpo": sigmoid_pair_loss,
    "cdpo": sigmoid_pair_loss,
    "ipo": ipo_pair_loss,
    "robust_dpo": robust_pair_loss,
    "hinge": hinge_pair_loss,
    "dpo_nll": sigmoid_pair_loss,
}


def log_ratios(
    logprobs: Tensor, ref_logprobs: Tensor, num_tokens: Tensor, objective: str
) -> tuple[Tensor, Tensor]:
    """`log pi(answer) - log pi_ref(answer)`, (chosen (B,), rejected (B,)); D is the chosen minus
    the rejected one.

    `logprobs` and `ref_logprobs` (2B,) are summed over each answer's tokens, all chosen answers
    first; `num_tokens` (2B,) int64, 0 counts as 1. "ipo" uses means over tokens, so that its target
    1 / (2 beta) does not depend on lengths.
    """
    ratios = logprobs - ref_logprobs
    if objective == "ipo":
        ratios = ratios / num_tokens.clamp_min(1)
    chosen, rejected = ratios.chunk(2)  # (2B,) -> (B,) each
    return chosen, rejected


def preference_loss(
    objective: str,
    lead: Tensor,
    pair_mask: Tensor,
    num_pairs: Tensor | float,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The sum of the pairs' losses, `/ num_pairs`. `objective` is a key of `PAIR_LOSSES`; `lead`
    (B,), D, the chosen minus the rejected log-ratio of `log_ratios`; `label_smoothing` in [0, 0.5)
    the assumed share of wrong labels, for "cdpo" and "robust_dpo". A smaller `beta`, above 0, lets
    the policy move further from the reference."""
    return masked_sum(PAIR_LOSSES[objective](lead, beta, label_smoothing), pair_mask) / num_pairs


def chosen_nll_loss(
    chosen_logprobs: Tensor, num_tokens: Tensor, pair_mask: Tensor, num_pairs: Tensor | float
) -> Tensor:
    """`sum (-log pi(chosen) / tokens) / num_pairs`, the NLL term of dpo_nll (Pang et al. 2024, eq.
    1). `chosen_logprobs` (B,), summed over the tokens of each chosen answer; `num_tokens` (B,)
    int64, 0 counts as 1."""
    return masked_sum(-chosen_logprobs / num_tokens.clamp_min(1), pair_mask) / num_pairs


LARGEST_MEAN = -1e-6  # mean log-prob of an answer in `log_odds`: above it the odds exceed 10^6


def log_odds(mean_logprobs: Tensor) -> Tensor:
    """`log(p / (1 - p))` with p = exp(mean log-prob of an answer's tokens), of any shape (Hong et
    al. 2024, eq. 4). A mean above `LARGEST_MEAN` counts as that, without gradient: the odds of a
    certain answer are infinite."""
    mean = mean_logprobs.clamp_max(LARGEST_MEAN)
    # log(1 - e^x): `log1p` is exact for small e^x, `expm1` for e^x near 1 (Maechler 2012); each
    # sees harmless values where the other one is used, because the gradient of both is computed
    near = mean > -0.6931
    from_log1p = torch.log1p(-torch.exp(mean.masked_fill(near, -1.0)))
    from_expm1 = torch.log(-torch.expm1(mean.masked_fill(~near, -0.5)))
    return mean - torch.where(near, from_expm1, from_log1p)


def orpo_pair_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """`-beta log sigmoid(log odds(chosen) - log odds(rejected))`, (B,): the second term of ORPO
    (Hong et al. 2024). `chosen`, `rejected`: (B,), log-probs averaged over tokens; `beta`: lambda
    in the paper (eq. 6)."""
    return -beta * F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def simpo_pair_loss(chosen: Tensor, rejected: Tensor, beta: float, gamma: float) -> Tensor:
    """`-log sigmoid(beta (chosen - rejected) - gamma)`, (B,) (SimPO, Meng et al. 2024, eq. 6).
    `chosen`, `rejected`: (B,), log-probs averaged over tokens; `gamma`: required lead, in units of
    beta x log-prob."""
    return -F.logsigmoid(beta * (chosen - rejected) - gamma)


def cpo_pair_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """`-log sigmoid(beta (chosen - rejected))`, (B,): DPO with a uniform reference (CPO, Xu et al.
    2024). `chosen`, `rejected`: (B,), log-probs summed over tokens."""
    return -F.logsigmoid(beta * (chosen - rejected))


def kto_baseline(log_ratio_sum: Tensor, num_rows: Tensor | float) -> Tensor:
    """`max(0, sum / num_rows)`: z0, an estimate of KL(policy || reference) (Ethayarajh et al.
    2024). No gradient.

    `log_ratio_sum`: scalar, the sum of `log pi(answer) - log pi_ref(answer)` over the `num_rows`
    mismatched rows (a prompt with another prompt's answer) of all micro-batches and ranks of an
    optimizer step.
    """
    return (log_ratio_sum / num_rows).clamp_min(0).detach()


def kto_losses(
    log_ratios: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """`w_D (1 - sigmoid(beta (r - z0)))` of desirable, `w_U (1 - sigmoid(beta (z0 - r)))` of
    undesirable answers, (B,): this is `lambda_y - v(x, y)` of Ethayarajh et al. 2024 (eq. 8).

    `log_ratios` (B,), r: `log pi(answer) - log pi_ref(answer)`, summed over each answer's tokens.
    `desirable` (B,) bool. `baseline` (B,) or scalar, z0. A smaller `beta`, above 0, lets the policy
    move further from the reference.
    """
    gain = torch.where(desirable, log_ratios - baseline, baseline - log_ratios)
    weights = torch.full_like(gain, undesirable_weight).masked_fill(desirable, desirable_weight)
    return weights * torch.sigmoid(-beta * gain)  # 1 - sigmoid(x), without cancellation


def balanced_weights(
    desirable: int, undesirable: int, weights: tuple[float, float]
) -> tuple[float, float]:
    """The ratio `w_D n_D / (w_U n_U)`, and the desirable weight that makes it 1 with the same
    undesirable weight. Ethayarajh et al. 2024 (section 4.2) recommend a ratio from 1 to 4/3. n:
    answers, above 0; `weights`: w_D, w_U."""
    desirable_weight, undesirable_weight = weights
    ratio = desirable_weight * desirable / (undesirable_weight * undesirable)
    balanced_weight = undesirable_weight * undesirable / desirable
    return ratio, balanced_weight
