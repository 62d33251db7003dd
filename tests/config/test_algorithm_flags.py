"""Flags of the algorithm: choices, defaults, and combinations that are refused."""

from typing import get_args

import pytest

from dschat_ppo.algorithms.actor_critic_losses import POLICY_LOSSES
from dschat_ppo.algorithms.advantage_estimators import ESTIMATORS
from dschat_ppo.algorithms.aggregation import LossAggregation
from dschat_ppo.algorithms.kl import KL_ESTIMATORS
from dschat_ppo.config.algorithm_flags import (
    AGGREGATION,
    ESTIMATOR,
    KL_FORM,
    POLICY_LOSS,
    SEQUENCE_LOSSES,
    WHITENED,
    WITHIN_A_GROUP,
    AlgorithmFlags,
)


def test_the_choices_are_the_implemented_estimators_losses_and_kl_forms():
    assert set(get_args(ESTIMATOR)) == set(ESTIMATORS)
    assert set(get_args(POLICY_LOSS)) == set(POLICY_LOSSES)
    assert get_args(AGGREGATION) == get_args(LossAggregation)
    assert set(get_args(KL_FORM)) == {*KL_ESTIMATORS, "full"}


def test_groups_of_estimators_and_losses():
    critics = [name for name in ESTIMATORS if AlgorithmFlags(advantage_estimator=name).has_critic]
    by_token = {"gae", "reinforce_plus_plus", "remax"}
    assert critics == ["gae"]
    assert set(WITHIN_A_GROUP) == set(ESTIMATORS) - by_token
    assert set(WHITENED) == {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
    assert set(SEQUENCE_LOSSES) == {"gspo", "gmpo", "sapo"}


@pytest.mark.parametrize(
    ("flags", "aggregation"),
    [
        ({}, "token_mean"),
        ({"policy_loss": "gspo"}, "seq_mean_token_mean"),
        ({"advantage_estimator": "dr_grpo"}, "constant"),
        ({"advantage_estimator": "dr_grpo", "policy_loss": "gmpo"}, "seq_mean_token_mean"),
        ({"policy_loss": "gspo", "loss_aggregation": "token_mean"}, "token_mean"),
    ],
)
def test_the_default_aggregation_depends_on_loss_and_estimator(flags, aggregation):
    assert AlgorithmFlags(**flags).aggregation == aggregation


@pytest.mark.parametrize(
    ("flags", "reference"),
    [
        ({}, True), ({"kl_coef": 0.0}, False), ({"kl_coef": 0.0, "kl_loss_coef": 0.1}, True),
        ({"advantage_estimator": "remax"}, True), ({"advantage_estimator": "grpo"}, False),
        ({"advantage_estimator": "grpo", "kl_coef": 0.01}, True),
        ({"advantage_estimator": "rloo", "kl_loss_coef": 0.01}, True),
    ],
)  # fmt: skip
def test_a_reference_is_needed_only_for_a_kl(flags, reference):
    assert AlgorithmFlags(**flags).has_reference is reference


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_group_estimators_have_no_kl_in_the_reward_by_default(estimator):
    usual = 0.0 if estimator in WITHIN_A_GROUP else 0.1
    assert AlgorithmFlags(advantage_estimator=estimator).kl_reward_coef == usual
    assert AlgorithmFlags(advantage_estimator=estimator, kl_coef=0.3).kl_reward_coef == 0.3
    assert AlgorithmFlags(advantage_estimator=estimator, kl_coef=0.0).kl_reward_coef == 0.0
