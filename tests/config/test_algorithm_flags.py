"""Flags of the algorithm: what they agree on with the formulas, and combinations that are refused."""

from typing import get_args

import pytest

from dschat_ppo.algorithms.advantage_estimators import ESTIMATORS
from dschat_ppo.algorithms.aggregation import LossAggregation
from dschat_ppo.algorithms.kl import KL_ESTIMATORS
from dschat_ppo.algorithms.policy_loss import POLICY_LOSSES
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
from dschat_ppo.config.cli import parse
from dschat_ppo.config.evaluation_flags import EvaluationFlags
from dschat_ppo.errors import UserError


def test_the_flags_offer_what_there_is():
    assert set(get_args(ESTIMATOR)) == set(ESTIMATORS)
    assert set(get_args(POLICY_LOSS)) == set(POLICY_LOSSES)
    assert get_args(AGGREGATION) == get_args(LossAggregation)
    assert set(get_args(KL_FORM)) == {*KL_ESTIMATORS, "full"}


def test_which_estimators_and_losses_are_alike():
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
def test_the_usual_aggregation(flags, aggregation):
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
def test_a_reference_is_there_only_for_a_kl(flags, reference):
    assert AlgorithmFlags(**flags).has_reference is reference


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_that_compare_answers_have_no_kl_in_the_reward_unless_it_is_named(estimator):
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
        ({"policy_loss": "clip_cov", "kl_cov_coef": 2.0}, "it is for --policy_loss kl_cov"),
        ({"policy_loss": "clip_cov", "clip_cov_low": 6.0}, "--clip_cov_low must be below --clip_cov_high"),
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
def test_options_without_effect_or_out_of_range_are_refused(flags, message):
    with pytest.raises(UserError) as problem:
        AlgorithmFlags(**flags)
    assert message in str(problem.value)


@pytest.mark.parametrize("given", [{"eval_batch_size": 8}, {"eval_pass_score": 0.5}, {"save_best": False}])
def test_flags_of_an_evaluation_need_its_data(given):
    with pytest.raises(UserError, match=f"--{next(iter(given))}: .*--eval_data_path"):
        EvaluationFlags(**given)
    EvaluationFlags(eval_data_path=["prompts.jsonl"], **given)


@pytest.mark.parametrize(
    ("named", "critic", "reward"),
    [
        ("--critic_model_name_or_path c", "critic", "critic"),
        ("--reward_model_name_or_path r", "reward", "reward"),
        ("--critic_model_name_or_path c --reward_model_name_or_path r", "critic", "reward"),
        ("--use_reward_model False --reward_function exact_match", "actor", None),
    ],
)
def test_messages_name_the_flag_that_named_the_folder(named, critic, reward):
    config = parse(
        "ppo", ["--actor_model_name_or_path", "a", "--data_path", "d", "--output_dir", "out", *named.split()]
    )
    assert config.critic_flag == f"--{critic}_model_name_or_path"
    assert config.critic_folder == critic[0]
    if reward is not None:
        assert config.reward_flag == f"--{reward}_model_name_or_path"
        assert config.reward_folder == reward[0]
