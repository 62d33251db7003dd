"""Advantage estimators, one function each, from `AdvantageInputs` to (advantages, returns).

Both results of an estimator have the shape and dtype of the rewards, (B, R), and are 0 outside the
mask. `returns` are the critic's targets for gae; for the other estimators they are the discounted
return-to-go and are only logged. No estimator whitens: the caller does so over the tokens of all
ranks (`WHITENED` in `config/algorithm_flags.py`).

In the formulas S is the score of a row: the sum of its token rewards, so a KL penalty is subtracted
before any baseline. Estimators that compare the responses to one prompt give 0 to a row that has no
other response to be compared with, and exactly 0 to all rows of a group whose scores are equal but
for rounding. They compute `S - mean` from the gaps to the group's best score (`Groups.gaps`), in
fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dschat_ppo.algorithms.aggregation import zero_outside
from dschat_ppo.algorithms.groups import Groups
from dschat_ppo.algorithms.token_rewards import is_last_token


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of the estimators. The B rows are all rows of the PPO step, of all ranks."""

    # (B, R) fp32, of each token: the score on the last one, minus the KL penalty (`token_rewards`)
    rewards: Tensor
    # (B, R) fp32, the critic's V before each response token; None without a critic
    values: Tensor | None
    response_mask: Tensor  # (B, R) bool, True on response tokens; rows may have none
    groups: Tensor  # (B,) int64, number of the row's prompt: any numbers, rows in any order
    # (B,) fp32, score of the greedy response to the row's prompt; None except for remax
    baselines: Tensor | None
    gamma: float  # discount per token, in [0, 1]
    lam: float  # lambda of gae, in [0, 1]
    # grpo and grpo_pass_at_k: divide by the standard deviation of the group
    normalise_std: bool = True
    batch_std: bool = False  # instead by that of all rows
    epsilon: float = 1e-6  # added to that standard deviation
    # (B,) fp32, scores before the KL penalty (gdpo: before all penalties); None: the rewards hold
    # no penalty
    scores: Tensor | None = None
    # (B, K) fp32, by each reward source; NaN where it does not score the row
    source_scores: Tensor | None = None
    source_weights: Tensor | None = None  # (K,) fp64, weights of the sources in the score
    # (B,) fp64, sizes of the numbers that S was added up from, which bound its rounding where they
    # are larger than S; None: they are not
    magnitudes: Tensor | None = None


Estimator = Callable[[AdvantageInputs], tuple[Tensor, Tensor]]


def returns_to_go(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """`G_t = r_t + gamma G_{t+1}`, (B, R), with t + 1 the row's next True token and G = 0 after the
    last one. Gaps in the mask neither reset the sum nor discount it. 0 outside the mask."""
    factors = torch.where(response_mask, rewards.new_full((), gamma), 1.0)  # (B, R)
    return zero_outside(_carried_back(zero_outside(rewards, response_mask), factors), response_mask)


def _carried_back(terms: Tensor, factors: Tensor) -> Tensor:
    """`x_t = terms_t + factors_t x_{t+1}` with x = 0 after the last column, (B, R), in 3 log2(R)
    operations.

    By doubling (Hillis and Steele 1986): after k rounds x_t covers the terms of 2^k columns from t
    on. Columns appended with terms of 0 change no bit of the others, so the width of a micro-batch
    does not matter.
    """
    sums = terms.clone()
    step = 1
    while step < sums.shape[1]:
        sums[:, :-step] += factors[:, : sums.shape[1] - step] * sums[:, step:]
        # over 2 step columns, where so many follow
        factors = factors[:, :-step] * factors[:, step:]
        step *= 2
    return sums


def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16); each row is a trajectory,
    which ends at its last token.

    `delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = delta_t + gamma lam A_{t+1}`, `returns = A + V`,
    with V and A after the last token 0. Where the mask has gaps, t + 1 is the row's next True
    token: a token that the policy did not choose is not a step of the trajectory.
    """
    assert inputs.values is not None
    mask = inputs.response_mask
    gamma = inputs.gamma
    lam = inputs.lam
    values = zero_outside(inputs.values, mask)  # (B, R)
    length = mask.shape[1]
    # (B, R), R where the mask is False
    columns = torch.where(mask, torch.arange(length, device=mask.device), length)
    # next True column or R
    following = pad(columns.flip(1).cummin(dim=1).values.flip(1)[:, 1:], (0, 1), value=length)
    next_values = pad(values, (0, 1)).gather(1, following)  # (B, R) V_{t+1}
    deltas = zero_outside(inputs.rewards + gamma * next_values - values, mask)
    advantages = _carried_back(deltas, torch.where(mask, deltas.new_full((), gamma * lam), 1.0))
    advantages = zero_outside(advantages, mask)
    return advantages, advantages + values


def grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """`(S - mean) / (std + epsilon)` over the group, on every token (GRPO, Shao et al. 2024). With
    a KL penalty inside S see `_standardised_gaps`; with `normalise_std` False as `dr_grpo`."""
    groups = Groups.of(inputs.groups, inputs.response_mask)
    if inputs.normalise_std:
        gaps = _standardised_gaps(inputs, groups)  # (B,)
    else:
        gaps = _score_gaps(inputs, groups)
    return _on_every_token(gaps - groups.mean(gaps), inputs)


def _standardised_gaps(inputs: AdvantageInputs, groups: Groups) -> Tensor:
    """(B,) gaps of `Z / max(1, std(Z))` with `Z = S / (std(S) + epsilon) - KL penalty`, S before
    the penalty.

    Each quantity is divided by its own standard deviation, so a row of a group of n is at most `(n
    - 1) / sqrt(n)` from its group's mean (Samuelson 1968, "How deviant can you be?"). Dividing the
    penalty by the deviation of the scores would amplify the noise of the KL without bound where
    scores are nearly equal. Where they are equal, the penalties alone are compared. Without a
    penalty the result is `S / (std(S) + epsilon)`.

    With `batch_std`, std(S) is over all rows (TRL's `scale_rewards="batch"`), and Z is not divided
    again.
    """
    scores = scores_before_penalty(inputs)  # (B,)
    gaps = groups.gaps(scores, _magnitudes(scores, inputs))
    if inputs.batch_std:
        std = _batch_std(scores, groups)
    else:
        std = groups.std(gaps)
    penalised = groups.gaps(gaps / _divisor(std, inputs) + _penalty_gaps(inputs, groups))
    if inputs.batch_std:
        return penalised
    return groups.gaps(penalised / groups.std(penalised).clamp_min(1))


def dr_grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """`S - mean` over the group, on every token (Dr. GRPO, Liu et al. 2025)."""
    groups = Groups.of(inputs.groups, inputs.response_mask)
    gaps = _score_gaps(inputs, groups)  # (B,)
    return _on_every_token(gaps - groups.mean(gaps), inputs)


def rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """S minus the mean of the other scores of the group, `n / (n - 1) (S - mean)` (RLOO, Ahmadian
    et al. 2024)."""
    groups = Groups.of(inputs.groups, inputs.response_mask)
    gaps = _score_gaps(inputs, groups)  # (B,)
    return _on_every_token(
        (gaps - groups.mean(gaps)) * groups.sizes / (groups.sizes - 1).clamp_min(1), inputs
    )


def opo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """`S - sum(length S) / sum(length)` over the group, on every token (OPO, Hao et al. 2025)."""
    groups = Groups.of(inputs.groups, inputs.response_mask)
    gaps = _score_gaps(inputs, groups)  # (B,)
    lengths = inputs.response_mask.sum(dim=1).double()  # (B, R) -> (B,)
    return _on_every_token(gaps - groups.sum(lengths * gaps) / groups.sum(lengths), inputs)


def gpg(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """`alpha (S - mean)` on every token, alpha = counted rows / rows of groups with unequal scores
    (Chu et al. 2025).

    A group with equal scores adds nothing to the gradient but counts in its denominator; alpha
    corrects for that. It is B / (B - M) of the paper, with M the rows of groups with equal scores,
    and not the rows of score 0 as in some implementations: a wrong response in a mixed group
    contributes, and a right one in a group of ones does not. The inputs must hold the rows of all
    ranks. A KL penalty inside S makes scores unequal, so alpha is 1.
    """
    groups = Groups.of(inputs.groups, inputs.response_mask)
    gaps = _score_gaps(inputs, groups)  # (B,)
    worst = -groups.max(-gaps)  # (B,) lowest gap of the group
    informative = groups.counted & (worst < 0)
    alpha = groups.counted.sum() / informative.sum().clamp_min(1)
    return _on_every_token(alpha * (gaps - groups.mean(gaps)), inputs)


def grpo_pass_at_k(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """The best score minus the second best, on every token of the group's best row; 0 on other rows
    and on ties.

    Leave-one-out for the group's maximum (Tang et al. 2025, "Optimizing language models for
    inference time objectives using reinforcement learning"). Scores are standardised as in `grpo`.
    """
    groups = Groups.of(inputs.groups, inputs.response_mask)
    if inputs.normalise_std:
        gaps = _standardised_gaps(inputs, groups)  # (B,)
    else:
        gaps = _score_gaps(inputs, groups)
    is_best = groups.counted & (gaps == 0)
    second = groups.max(torch.where(groups.counted & ~is_best, gaps, -torch.inf))
    leads = is_best & (groups.sum(is_best.double()) == 1) & (groups.sizes > 1)
    return _on_every_token(torch.where(leads, -second, 0.0), inputs)


def maxrl(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """`(S - mean) / mean` over the group, on every token; 0 where the mean is not above 0 (MaxRL,
    Tajwar et al. 2026, arXiv 2602.02710).

    For scores of 0 and 1 and n responses this is the gradient of the log of the success rate,
    truncated at order n - 1: of `-sum_(k=1)^(n-1) (1 - p)^k / k`, with p the success rate. Scores,
    before the KL penalty, must be 0 or above: with negative ones a mean close to 0 makes advantages
    huge. The penalty is subtracted as it is, compared within the group.
    """
    groups = Groups.of(inputs.groups, inputs.response_mask)
    scores = scores_before_penalty(inputs)  # (B,)
    gaps = groups.gaps(scores, _magnitudes(scores, inputs))
    mean = groups.best(scores) + groups.mean(gaps)
    advantages = torch.where(mean > 0, (gaps - groups.mean(gaps)) / mean, 0.0)
    return _less_penalty(advantages, inputs, groups)


def gdpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """`x / (std of x over the batch + epsilon)` on every token, with x the weighted sum over the
    reward sources k of `(r_k - mean) / (std + epsilon)` over the group (GDPO, Liu et al. 2026,
    arXiv 2601.05242).

    A source adds nothing to a row that it does not score. The paper subtracts the mean of x over
    the batch as well, which is 0 as it is in each group. Penalties are subtracted as they are,
    compared within the group.
    """
    assert inputs.source_scores is not None and inputs.source_weights is not None
    groups = Groups.of(inputs.groups, inputs.response_mask)
    mixed = torch.zeros_like(groups.sizes)  # (B,) x
    for weight, column in zip(inputs.source_weights, inputs.source_scores.double().T, strict=True):
        scored = Groups.of(inputs.groups, inputs.response_mask & ~column.isnan().unsqueeze(1))
        gaps = scored.gaps(column)  # (B,)
        standardised = (gaps - scored.mean(gaps)) / _divisor(scored.std(gaps), inputs)
        mixed += torch.where(scored.counted, weight * standardised, 0.0)
    return _less_penalty(mixed / _divisor(_batch_std(mixed, groups), inputs), inputs, groups)


def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """The return-to-go of the token rewards (REINFORCE++, Hu 2025)."""
    returns = returns_to_go(inputs.rewards, inputs.response_mask, inputs.gamma)
    return returns, returns


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """The return-to-go, with the mean score of the group as the baseline (REINFORCE++-baseline, Hu
    2025)."""
    groups = Groups.of(inputs.groups, inputs.response_mask)
    gaps = _score_gaps(inputs, groups)
    # The mean of the group; and of a group with equal scores each row's own, without rounding.
    baselines = _row_scores(inputs) - (gaps - groups.mean(gaps))  # (B,) fp64
    advantages, returns = _above_baseline(baselines, inputs)
    has_mates = groups.sizes.unsqueeze(1) > 1  # (B, 1)
    return torch.where(has_mates, advantages, 0.0), returns


def remax(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """The return-to-go, with the score of the greedy response as the baseline (ReMax, Li et al.
    2024)."""
    assert inputs.baselines is not None
    return _above_baseline(inputs.baselines, inputs)


def none(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Advantages and returns of 0, for runs without a policy loss of their own."""
    return torch.zeros_like(inputs.rewards), torch.zeros_like(inputs.rewards)


def _row_scores(inputs: AdvantageInputs) -> Tensor:
    """S: (B, R) token rewards -> (B,) fp64 sums over the mask."""
    return zero_outside(inputs.rewards, inputs.response_mask).double().sum(dim=1)


def scores_before_penalty(inputs: AdvantageInputs) -> Tensor:
    """(B,) fp64, S without the KL penalty."""
    if inputs.scores is None:
        return _row_scores(inputs)
    return inputs.scores.double()


def _score_gaps(inputs: AdvantageInputs, groups: Groups) -> Tensor:
    """(B,) fp64 gaps of S."""
    scores = _row_scores(inputs)
    return groups.gaps(scores, _magnitudes(scores, inputs))


def _penalty_gaps(inputs: AdvantageInputs, groups: Groups) -> Tensor:
    """(B,) fp64 gaps of what the penalties add to S. They are differences of numbers of the size of
    S, and so have its rounding."""
    scores = scores_before_penalty(inputs)
    return groups.gaps(_row_scores(inputs) - scores, _magnitudes(scores, inputs))


def _magnitudes(scores: Tensor, inputs: AdvantageInputs) -> Tensor:
    """(B,) fp64, the sizes that bound the rounding of `scores` (B,) fp64."""
    if inputs.magnitudes is None:
        return scores.abs()
    return torch.maximum(scores.abs(), inputs.magnitudes)


def _divisor(std: Tensor, inputs: AdvantageInputs) -> Tensor:
    """`std + epsilon`; 1 where the deviation is 0."""
    return torch.where(std > 0, std + inputs.epsilon, 1.0)


def _batch_std(values: Tensor, groups: Groups) -> Tensor:
    """Unbiased standard deviation of `values` (B,) fp64 over the counted rows of all groups, (); 0
    for one row."""
    counted = values[groups.counted]
    if len(counted) > 1:
        return counted.std()
    return values.new_zeros(())


def _less_penalty(
    advantages: Tensor, inputs: AdvantageInputs, groups: Groups
) -> tuple[Tensor, Tensor]:
    """The advantages of rows (B,), less the penalty in the rewards minus its mean over the group,
    on every token."""
    gaps = _penalty_gaps(inputs, groups)
    return _on_every_token(advantages + gaps - groups.mean(gaps), inputs)


def _on_every_token(advantages: Tensor, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """(B,) advantages of rows -> (B, R) advantages of tokens, with the returns-to-go."""
    tokens = advantages.unsqueeze(1).expand_as(inputs.rewards).to(inputs.rewards.dtype)
    returns = returns_to_go(inputs.rewards, inputs.response_mask, inputs.gamma)
    return zero_outside(tokens, inputs.response_mask), returns


def _above_baseline(baselines: Tensor, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Returns-to-go (B, R) of the rewards less the row's baseline (B,), and of the rewards.

    The baseline is subtracted at the last token, where the score is: gamma discounts both alike,
    and a score equal to its baseline gives exactly 0.
    """
    mask = inputs.response_mask
    # (B, 1) over (B, R)
    rewards = inputs.rewards - torch.where(is_last_token(mask), baselines.unsqueeze(1), 0.0)
    advantages = returns_to_go(rewards, mask, inputs.gamma).to(inputs.rewards.dtype)
    return advantages, returns_to_go(inputs.rewards, mask, inputs.gamma)


ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "grpo_pass_at_k": grpo_pass_at_k,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "none": none,
}
