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
from dschat_ppo.errors import UserError


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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"policy_loss": "reinforce", "clip_eps": 0.3}, "--clip_eps 0.3 has no effect: it is for --policy_loss ppo or"),
        ({"policy_loss": "kl_cov", "clip_eps_high": 0.3}, "--clip_eps_high 0.3 has no effect"),
        ({"sapo_tau_negative": 2.0}, "it is for --policy_loss sapo"),
        ({"covariance_share": 0.1}, "it is for --policy_loss clip_cov or kl_cov"),
        ({"policy_loss": "cispo", "dual_clip": 3.0}, "--dual_clip 3.0 has no effect"),
        ({"dual_clip": 0.5}, "--dual_clip must be 0 (off) or above 1"),
        ({"advantage_estimator": "grpo", "gae_lambda": 1.0}, "it is for --advantage_estimator gae"),
        ({"advantage_estimator": "rloo", "gamma": 0.9}, "--gamma 0.9 has no effect"),
        ({"advantage_estimator": "grpo", "whiten_advantages": False}, "--whiten_advantages False has no effect"),
        ({"normalize_group_std": False}, "it is for --advantage_estimator grpo or grpo_pass_at_k"),
        ({"kl_coef": 0.0, "kl_target": 0.1}, "--kl_target 0.1 has no effect: it is for a --kl_coef above 0"),
        (
            {"advantage_estimator": "grpo", "kl_target": 0.1},
            "--kl_target 0.1 has no effect: it is for a --kl_coef above 0 (for grpo it is 0 unless given)",
        ),
        ({"advantage_estimator": "gpg", "kl_estimator": "k3"}, "above 0 (for gpg it is 0 unless given)"),
        ({"kl_horizon": 5}, "it is for --kl_target"),
        ({"kl_loss_estimator": "k2"}, "it is for --kl_loss_coef above 0"),
        ({"kl_loss_coef": 0.1, "kl_loss_estimator": "full", "kl_straight_through": False}, "a KL loss k1, k3 or abs"),
        ({"kl_coef": 0.0, "kl_estimator": "full"}, "it is for --kl_coef above 0"),
        ({"importance_cap": 3.0}, "it is for --importance_correction"),
        ({"importance_correction": "token", "importance_cap": 0.5}, "--importance_cap must be above 1"),
        ({"entropy_delta": 0.1}, "it is for --entropy_target"),
        ({"entropy_target": 1.0, "entropy_coef": 2.0}, "--entropy_coef 2.0 is above --entropy_coef_max 1.0"),
        ({"overlong_penalty": 2.0}, "it is for --overlong_buffer"),
        ({"dynamic_sampling_rounds": 2}, "it is for --dynamic_sampling"),
        ({"clip_eps": 1.0}, "must be below 1"),
        ({"high_entropy_share": 0.0}, "--high_entropy_share must be above 0 and at most 1"),
        ({"gamma": 1.5}, "--gamma must lie between 0 and 1"),
    ],
)
def test_flags_without_effect_or_out_of_range_are_refused(flags, message):
    with pytest.raises(UserError) as problem:
        AlgorithmFlags(**flags)
    assert message in str(problem.value)
