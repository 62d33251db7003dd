"""Advantages of whole answers from a comparison with the other answers to the same prompt.

A row's score is S, the sum of its token rewards, so the KL penalty is inside it before any baseline is subtracted;
only `standardised_scores` treats the two apart. Rows without a response token have no score: they are not counted in
their group and get 0. A group with one counted row has nothing to be compared with, so its advantage is 0. Equal scores
give exactly 0: no formula here changes when a group's scores are shifted, and they are computed from the distances to
its best one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dschat_ppo.algorithms.masked import zero_outside
from dschat_ppo.algorithms.token_rewards import AdvantageInputs


@dataclass(frozen=True)
class GroupScores:
    """Scores of rows and what groups they fall into. Floating tensors are float64: then the order of rows, which a
    scatter on a GPU does not fix, does not show in fp32.

    Attributes:
        best: (B,) highest score of the row's group.
        behind: (B,) `S - best`, 0 or less; 0 for rows that are not counted.
        counted: (B,) bool, True for rows with a response token.
        lengths: (B,) response tokens.
        index: (B,) int64, number of the group from 0 on.
        sizes: (B,) counted rows of the row's group.
    """

    best: Tensor
    behind: Tensor
    counted: Tensor
    lengths: Tensor
    index: Tensor
    sizes: Tensor


def group_scores(inputs: AdvantageInputs) -> GroupScores:
    """Sums of the token rewards of each row, put into groups."""
    return _grouped(_totals(inputs), inputs)


def standardised_scores(inputs: AdvantageInputs) -> GroupScores:
    """`Z = S / (std(S) + epsilon) - KL penalty`, over `max(1, std(Z))`, with S the scores before the penalty.

    Each division is by the spread of what is divided, so a row of a group of n is at most `(n - 1) / sqrt(n)` from its
    group's mean (Samuelson 1968, "How deviant can you be?"). The penalty is not divided by the spread of the scores:
    where they are nearly equal, that would blow the noise of the KL up without bound. Where they are equal, the
    penalties alone are compared, as they are. Without a penalty this is `S / (std(S) + epsilon)`.
    """
    totals = _totals(inputs)
    scores = totals if inputs.scores is None else inputs.scores.double()
    group = _grouped(scores, inputs)
    deviation = standard_deviation(group)
    standardised = group.behind / torch.where(deviation > 0, deviation + inputs.epsilon, 1.0)
    penalised = _grouped(standardised - (scores - totals), inputs)
    return _grouped(penalised.behind / standard_deviation(penalised).clamp_min(1), inputs)


def _totals(inputs: AdvantageInputs) -> Tensor:
    return zero_outside(inputs.rewards, inputs.response_mask).double().sum(dim=1)


def _grouped(scores: Tensor, inputs: AdvantageInputs) -> GroupScores:
    mask = inputs.response_mask
    index = torch.unique(inputs.groups, return_inverse=True)[1]
    counted = mask.any(dim=1)
    sizes = _spread_sum(counted.double(), index)
    best = torch.where(sizes > 0, _spread_max(scores.masked_fill(~counted, -torch.inf), index), 0.0)
    behind = torch.where(counted, scores - best, 0.0)
    return GroupScores(best, behind, counted, mask.sum(dim=1).double(), index, sizes)


def mean_behind(group: GroupScores) -> Tensor:
    """(B,) mean of the group's scores, less its best one."""
    return _spread_sum(group.behind, group.index) / group.sizes.clamp_min(1)


def standard_deviation(group: GroupScores) -> Tensor:
    """(B,) unbiased standard deviation of the group's scores; 0 for a group of one."""
    squares = torch.where(group.counted, (group.behind - mean_behind(group)) ** 2, 0.0)
    return torch.sqrt(_spread_sum(squares, group.index) / (group.sizes - 1).clamp_min(1))


def centred(group: GroupScores) -> Tensor:
    """(B,) `S - mean` (Dr. GRPO, Liu et al. 2025)."""
    return torch.where(group.counted, group.behind - mean_behind(group), 0.0)


def leave_one_out(group: GroupScores) -> Tensor:
    """(B,) S minus the mean of the group's other scores, `n / (n - 1) (S - mean)` (RLOO, Ahmadian et al. 2024)."""
    return centred(group) * group.sizes / (group.sizes - 1).clamp_min(1)


def length_weighted(group: GroupScores) -> Tensor:
    """(B,) `S - sum(length S) / sum(length)` over the group (OPO, Hao et al. 2025)."""
    baseline = _spread_sum(group.lengths * group.behind, group.index) / _spread_sum(group.lengths, group.index)
    return torch.where(group.counted, group.behind - baseline, 0.0)


def rescaled_to_informative(group: GroupScores) -> Tensor:
    """(B,) `alpha (S - mean)`, alpha = counted rows / rows of groups whose scores are not all equal (Chu et al. 2025).

    A group with equal scores (all right or all wrong) adds nothing to the gradient but counts in its denominator; alpha
    makes the estimate what it would be over the other groups alone. The alpha of the GPG paper is therefore B / (B - M)
    with M the rows of such groups. Rows with a score of 0, which some implementations take for M, are something else:
    each wrong answer in a mixed group has one and teaches; no answer in a group of ones has one, and none teaches. Give
    all rows of all ranks: alpha is a property of the whole batch. A KL penalty inside S makes scores differ, hence
    alpha 1.
    """
    worst = -_spread_max(-group.behind, group.index)
    informative = group.counted & (worst < 0)
    alpha = group.counted.sum() / informative.sum().clamp_min(1)
    return alpha * centred(group)


def lead_of_the_best(group: GroupScores) -> Tensor:
    """(B,) for a group's best answer its lead over the second, 0 for the others and for ties at the top.

    That is the group's best score minus the best without this row: leave-one-out for the maximum (Tang et al. 2025,
    "Optimizing language models for inference time objectives using reinforcement learning").
    """
    is_best = group.counted & (group.behind == 0)
    others = torch.where(group.counted & ~is_best, group.behind, -torch.inf)
    alone = (_spread_sum(is_best.double(), group.index) == 1) & (group.sizes > 1)
    return torch.where(is_best & alone, -_spread_max(others, group.index), 0.0)


def groups_that_differ(scores: Tensor, groups: Tensor) -> Tensor:
    """(B,) bool, True on rows of a group whose scores are not all equal, or not all finite.

    Args:
        scores: (B,) fp32.
        groups: (B,) int64, any number for each group, rows in any order.
    """
    index = torch.unique(groups, return_inverse=True)[1]
    spread = _spread_max(scores, index) + _spread_max(-scores, index)
    return (spread > 0) | ~spread.isfinite()


def _spread_sum(values: Tensor, index: Tensor) -> Tensor:
    """(B,) each row's group's sum of `values`."""
    return torch.zeros_like(values).index_add(0, index, values)[index]


def _spread_max(values: Tensor, index: Tensor) -> Tensor:
    """(B,) each row's group's largest of `values`."""
    return torch.full_like(values, -torch.inf).scatter_reduce(0, index, values, "amax")[index]
