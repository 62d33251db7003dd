"""Advantage estimators by name: one line here for each, and one function of `AdvantageInputs`.

Each returns (advantages, returns), both (B, R) fp32 and 0 outside the mask. `returns` are the critic's targets for gae;
the others report the discounted return-to-go there. Nothing is whitened here: the caller does it, over the tokens of
all ranks (`WHITENED` in `config/algorithm_flags.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dschat_ppo.algorithms import group_advantages as group
from dschat_ppo.algorithms.masked import zero_outside
from dschat_ppo.algorithms.token_rewards import AdvantageInputs, returns_to_go, token_rewards
from dschat_ppo.algorithms.token_rewards import gae as generalised_advantages

Estimator = Callable[[AdvantageInputs], tuple[Tensor, Tensor]]


def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation with the critic's values (Schulman et al. 2016).

    Raises:
        ValueError: there are no values.
    """
    if inputs.values is None:
        raise ValueError("gae needs the values of a critic")
    return generalised_advantages(inputs.rewards, inputs.values, inputs.response_mask, inputs.gamma, inputs.lam)


def grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """`(S - mean) / (std + epsilon)` on every token of the row (GRPO, Shao et al. 2024); with a KL penalty see
    `group_advantages.standardised_scores`; without `normalise_std` as dr_grpo."""
    return _on_every_token(group.centred(_scores_to_compare(inputs)), inputs)


def dr_grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """`group_advantages.centred` on every token of the row."""
    return _on_every_token(group.centred(group.group_scores(inputs)), inputs)


def rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """`group_advantages.leave_one_out` on every token of the row."""
    return _on_every_token(group.leave_one_out(group.group_scores(inputs)), inputs)


def opo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """`group_advantages.length_weighted` on every token of the row."""
    return _on_every_token(group.length_weighted(group.group_scores(inputs)), inputs)


def gpg(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """`group_advantages.rescaled_to_informative` on every token of the row."""
    return _on_every_token(group.rescaled_to_informative(group.group_scores(inputs)), inputs)


def grpo_pass_at_k(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """`group_advantages.lead_of_the_best` of the scores that `grpo` compares, on every token of the row."""
    return _on_every_token(group.lead_of_the_best(_scores_to_compare(inputs)), inputs)


def _scores_to_compare(inputs: AdvantageInputs) -> group.GroupScores:
    return group.standardised_scores(inputs) if inputs.normalise_std else group.group_scores(inputs)


def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """The return-to-go of the token rewards (REINFORCE++, Hu 2025)."""
    returns = _returns(inputs)
    return returns, returns


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """The return-to-go of the token rewards above the mean score of the row's group (REINFORCE++-baseline, Hu 2025).

    0 for a group of one, as for every estimator that compares answers.
    """
    scores = group.group_scores(inputs)
    apart = _returns_above(scores.best + group.mean_behind(scores), inputs)
    return _inside(torch.where(scores.sizes.unsqueeze(1) > 1, apart, 0.0), inputs), _returns(inputs)


def remax(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """The return-to-go of the token rewards above the score of the greedy answer (ReMax, Li et al. 2024).

    Raises:
        ValueError: there are no baselines.
    """
    if inputs.baselines is None:
        raise ValueError("remax needs the scores of the greedy answers")
    return _inside(_returns_above(inputs.baselines, inputs), inputs), _returns(inputs)


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
}


def _returns(inputs: AdvantageInputs) -> Tensor:
    return returns_to_go(inputs.rewards, inputs.response_mask, inputs.gamma)


def _returns_above(baselines: Tensor, inputs: AdvantageInputs) -> Tensor:
    """(B, R) the return-to-go with the row's baseline, (B,), taken off its last token, where the score stands.

    So gamma discounts both alike, and a score that equals its baseline gives 0.
    """
    baseline = token_rewards(baselines, torch.zeros_like(inputs.rewards), inputs.response_mask, kl_coef=0.0)
    return returns_to_go(inputs.rewards - baseline, inputs.response_mask, inputs.gamma)


def _on_every_token(rows: Tensor, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """(B,) advantages of rows put on each token, and the returns."""
    return _inside(rows.unsqueeze(1).expand_as(inputs.rewards), inputs), _returns(inputs)


def _inside(advantages: Tensor, inputs: AdvantageInputs) -> Tensor:
    """(B, R) in the number format of the rewards, 0 outside the mask."""
    return zero_outside(advantages.to(inputs.rewards.dtype), inputs.response_mask)
