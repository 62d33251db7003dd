"""Values that follow from several flags: defaults by method, folders, rates, the best metric; batch
plans by hand."""

from dataclasses import replace
from typing import get_args

import pytest
from command_lines import NEEDED, config_of, read

from dschat_ppo.algorithms.actor_critic_losses import POLICY_LOSSES
from dschat_ppo.algorithms.advantage_estimators import ESTIMATORS
from dschat_ppo.algorithms.aggregation import LossAggregation
from dschat_ppo.algorithms.kl import KL_ESTIMATORS
from dschat_ppo.config.algorithm_flags import (
    AGGREGATION,
    ESTIMATOR,
    KL_FORM,
    POLICY_LOSS,
    WITHIN_A_GROUP,
    AlgorithmFlags,
)
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.config.health_flags import FitHealthFlags, PPOHealthFlags, thresholds
from dschat_ppo.config.ppo_flags import PPOFlags
from dschat_ppo.config.run_flags import ConsoleFlags
from dschat_ppo.config.supervised_flags import BestFlags, BestMetric, SupervisedFlags
from dschat_ppo.errors import UserError
from dschat_ppo.supervised.training_plan import SupervisedPlan


def test_the_choices_are_the_implemented_estimators_losses_and_kl_forms():
    assert set(get_args(ESTIMATOR)) == set(ESTIMATORS) and set(get_args(POLICY_LOSS)) == set(
        POLICY_LOSSES
    )
    assert get_args(AGGREGATION) == get_args(LossAggregation)
    assert set(get_args(KL_FORM)) == {*KL_ESTIMATORS, "full"}
    assert set(WITHIN_A_GROUP) == set(ESTIMATORS) - {"gae", "reinforce_plus_plus", "remax", "none"}
    assert [name for name in ESTIMATORS if AlgorithmFlags(advantage_estimator=name).has_critic] == [
        "gae"
    ]


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


@pytest.mark.parametrize("estimator", sorted({*ESTIMATORS} - {"none"}))
def test_group_estimators_have_no_kl_in_the_reward_by_default_and_then_no_reference(estimator):
    def flags(**given: float) -> tuple[float, bool]:
        found = AlgorithmFlags(advantage_estimator=estimator, **given)
        return found.kl_reward_coef, found.has_reference

    assert flags() == ((0.0, False) if estimator in WITHIN_A_GROUP else (0.1, True))
    assert flags(kl_coef=0.3) == (0.3, True) and flags(kl_coef=0.0) == (0.0, False)
    assert flags(kl_coef=0.0, kl_loss_coef=0.01) == (0.0, True)


ALONE = "--use_reward_model False --reward_function exact_match"
GRPO = "--advantage_estimator grpo --n_samples_per_prompt 2"


@pytest.mark.parametrize(
    ("words", "clip"),
    [
        ("", 5.0),
        ("--reward_clip 0", 0.0),
        ("--advantage_estimator remax", 0.0),
        (
            "--reward_model_sources a --reward_function length:0 exact_match?strip=1:0.0",
            5.0,
        ),  # these are only logged
        ("--remote_reward_url http://a/b --remote_reward_weight 0", 5.0),
        ("--remote_reward_url http://a/b", 0.0),
        ("--reward_function length:0 exact_match?strip=1:0.5", 0.0),
        ("--reward_function a,b=exact_match", 0.0),
        (ALONE, 0.0),
        (f"{ALONE} --reward_clip 5", 5.0),
        (GRPO, 0.0),
        (f"{GRPO} --reward_clip 3", 3.0),
    ],
)
def test_scores_are_clipped_by_default_for_ppo_with_the_learned_reward_alone(words, clip):
    assert config_of("ppo", *words.split()).score_clip == clip


@pytest.mark.parametrize(
    ("named", "critic", "reward"),
    [
        ("--critic_model_name_or_path c", "critic", "critic"),
        ("--reward_model_name_or_path r", "reward", "reward"),
        ("--critic_model_name_or_path c --reward_model_name_or_path r", "critic", "reward"),
        (ALONE, "actor", None),
    ],
)
def test_folders_of_critic_and_reward_and_the_flags_that_name_them(named, critic, reward):
    words = [
        "--actor_model_name_or_path",
        "a",
        "--data_path",
        "d",
        "--output_dir",
        "out",
        *named.split(),
    ]
    config = parse("ppo", words)
    assert config.models["critic"] == (f"--{critic}_model_name_or_path", critic[0])
    assert config.models.get("reward") == (reward and (f"--{reward}_model_name_or_path", reward[0]))


def test_the_reference_has_the_actors_folder_or_its_own():
    for words, folder in (("", "a"), ("--ref_model_name_or_path r", "r"), ("--kl_coef 0", None)):
        assert config_of("ppo", *words.split()).models.get("reference", (None, None))[1] == folder


@pytest.mark.parametrize(
    ("objective", "beta", "nll"),
    [
        ("dpo", 0.1, 0.0),
        ("dpo_nll", 0.1, 0.2),
        ("kto", 0.1, 0.0),
        ("simpo", 2.0, 0.0),
        ("cpo", 0.1, 1.0),
    ],
)
def test_beta_and_the_weight_of_the_nll_term_have_defaults_by_objective(objective, beta, nll):
    flags = config_of("reward", "--objective", objective).reward
    assert (flags.strength, flags.nll_weight) == (beta, nll)
    assert config_of("reward", "--objective", objective, "--beta", "0.7").reward.strength == 0.7


def test_the_dpo_step_differs_only_in_the_default_objective():
    assert read("dpo") == {**read("reward"), "objective": "dpo"}
    assert read("dpo", "--objective", "ipo")["objective"] == "ipo"


@pytest.mark.parametrize(
    ("ratio", "number", "total", "steps"),
    [
        (0.0, 7, 100, 7),
        (0.1, 0, 30, 3),
        (0.1, 0, 31, 4),
        (0.07, 100, 100, 7),
        (0.5, 0, 1, 1),
    ],
)
def test_the_ratio_of_the_warm_up_is_rounded_up_and_replaces_the_number(
    ratio, number, total, steps
):
    words = ["--warmup_ratio", str(ratio)] if ratio else ["--num_warmup_steps", str(number)]
    assert config_of("sft", *words).warmup_steps(total) == steps
    assert config_of("ppo", "--lr_scheduler_type", "constant").warmup_steps(total) == 0


@pytest.mark.parametrize(
    ("words", "trackers"),
    [
        ("", ()),
        ("--enable_tensorboard", ("tensorboard",)),
        ("--report_to wandb trackio", ("wandb", "trackio")),
        ("--report_to wandb wandb --enable_tensorboard", ("wandb", "tensorboard")),
        ("--report_to none --enable_tensorboard", ()),
    ],
)
def test_enable_tensorboard_adds_to_report_to_and_none_turns_all_trackers_off(words, trackers):
    assert config_of("sft", *words.split()).run.trackers == trackers


def test_a_tilde_in_output_dir_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert config_of("sft", "--output_dir=~/out").run.folder == "/home/ada/out"


def test_steps_1_and_2_print_every_tenth_step_step_3_every_one_and_all_the_first_and_last():
    assert {step: read(step)["logging_steps"] for step in NEEDED} == {
        "sft": 10,
        "reward": 10,
        "ppo": 1,
    }
    flags = ConsoleFlags(logging_steps=4)
    assert [step for step in range(1, 11) if flags.prints(step, 10)] == [1, 4, 8, 10]


@pytest.mark.parametrize(
    ("text", "name", "higher"),
    [
        (None, "eval_loss", False),
        ("loss", "eval_loss", False),
        ("eval_perplexity", "eval_perplexity", False),
        ("accuracy", "eval_accuracy", True),
        ("eval_accuracy/helpful", "eval_accuracy/helpful", True),
        ("loss/accuracy", "eval_loss/accuracy", False),  # a data set of that name
        ("chosen_score:max", "eval_chosen_score", True),
        ("accuracy:min", "eval_accuracy", False),
        ("loss/a:b", "eval_loss/a:b", False),
    ],
)
def test_the_direction_of_the_best_metric_follows_from_its_name_or_is_given(text, name, higher):
    assert BestFlags(text).best_metric == BestMetric(name, higher)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("sft", "eval_perplexity"),
        ("sft", "loss/name"),
        ("reward", "accuracy/name"),
        ("reward", "chosen_score:max"),
        ("reward", "centering_loss --center_rewards_coef 0.1"),
        ("reward", "margin --objective dpo"),
        ("reward", "nll --objective orpo"),
    ],
)
def test_metrics_that_the_evaluation_of_the_step_has_are_accepted(step, words):
    assert (
        config_of(step, "--metric_for_best", *words.split()).best.metric_for_best
        == words.split()[0]
    )


def test_thresholds_of_health_rules_and_windows():
    read("ppo", "--health", "kl_spike=0.6,window=20", "scores_equal=off", "kl_negative=-0.1")
    window, limits, off = thresholds(
        PPOHealthFlags(health=["kl_spike=0.6", "window=20", "scores_equal=off"])
    )
    assert (window, limits["kl_spike"], off) == (20, 0.6, {"scores_equal"})
    # the last word counts
    assert thresholds(PPOHealthFlags(health=["kl_spike=off", "kl_spike=0.7"]))[2] == set()
    assert (thresholds(PPOHealthFlags())[0], thresholds(FitHealthFlags())[0]) == (10, 50)


def ppo_flags(**settings) -> PPOFlags:
    return PPOFlags(actor_model_name_or_path="a", critic_model_name_or_path="c", **settings)


def supervised_flags(micro_batch: int, accumulation: int, epochs: float) -> SupervisedFlags:
    sizes = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
    }
    return SupervisedFlags(model_name_or_path="m", num_train_epochs=epochs, **sizes)


@pytest.mark.parametrize(
    ("rows", "ranks", "flags", "numbers"),
    [
        (100, 1, (10, 1, 1), (10, 10, 10)),
        (24, 2, (4, 3, 3), (24, 1, 3)),
        (1, 4, (8, 2, 1), (64, 1, 1)),
        (65, 4, (8, 2, 1), (64, 2, 2)),
        (100, 2, (4, 3, 2), (24, 5, 10)),  # 100 / 24 = 4.17: the fifth step is short, not left out
    ],
)
def test_supervised_plan_by_hand(rows, ranks, flags, numbers):
    plan = SupervisedPlan(supervised_flags(*flags), rows, ranks)
    assert (plan.global_batch, plan.steps_per_epoch, plan.total_steps) == numbers


@pytest.mark.parametrize(
    ("epochs", "most", "total", "shown"),
    [
        (2.0, 0, 10, "10, 2 epochs"),
        (0.5, 0, 3, "3, 0.6 epochs"),
        (1.5, 0, 8, "8, 1.6 epochs"),
        (0.6, 0, 3, "3, 0.6 epochs"),
        (1e-5, 0, 1, "1, 0.2 epochs"),
        (2, 3, 3, "3, 0.6 epochs"),
        (2, 12, 12, "12, 2.4 epochs"),  # --max_steps replaces the epochs
    ],
)
def test_fractions_of_an_epoch_are_rounded_up_to_optimizer_steps(epochs, most, total, shown):
    # ranks that share rows count as one
    for ranks, shared, of_ranks in ((2, 1, "2 ranks"), (4, 2, "2 groups")):
        plan = SupervisedPlan(
            supervised_flags(4, 3, epochs), 100, ranks, shared=shared, max_steps=most
        )
        assert (plan.steps_per_epoch, plan.total_steps) == (5, total)
        table = dict(plan.table())
        assert table["optimizer steps in all"] == shown
        assert table["global batch"] == f"4 rows x 3 micro-batches x {of_ranks} = 24"
        assert table["optimizer steps per epoch"] == "ceil(100 / 24) = 5"


@pytest.mark.parametrize(
    ("epochs", "most", "stop", "steps"),
    [
        (0.5, 0, 0, 2),
        (1.5, 0, 0, 4),
        (0.01, 0, 0, 1),
        (2.0, 0, 0, 5),  # 100 prompts, 40 in a step
        (1, 7, 0, 7),
        (5, 1, 0, 1),
        (1, 7, 2, 2),
        (1, 1, 2, 1),
        (1, 0, 9, 3),  # --test_stop_step only shortens
    ],
)
def test_ppo_steps_by_fractions_and_by_max_steps(epochs, most, stop, steps):
    flags = ppo_flags(
        per_device_generation_batch_size=20,
        per_device_training_batch_size=20,
        num_train_epochs=epochs,
        enable_test_mode=stop > 0,
        test_stop_step=stop,
    )
    plan = plan_ppo(flags, 100, 2, max_steps=most)
    assert (plan.ppo_steps, plan.total_updates, plan.actor_updates) == (steps, steps, steps)
    assert dict(plan.table())["PPO steps"] == (
        f"{steps} (--max_steps)" if most == steps else f"{steps}"
    )


SIZES = (
    "per_device_generation_batch_size generation_batches per_device_training_batch_size"
    " gradient_accumulation_steps"
)


@pytest.mark.parametrize(
    ("sizes", "more", "inputs", "numbers", "table"),
    [
        # 8 prompts x 3 calls = 24 rows a rank, 48 on two ranks. An update takes 4 x 2 x 2 = 16: 3 a
        # pass, 6 in 2 passes. 100 prompts x 2 epochs = 200 rows in ceil(200 / 48) = 5 PPO steps: 30
        # updates.
        (
            (8, 3, 4, 2),
            {"ppo_epochs": 2, "num_train_epochs": 2},
            (100, 2),
            (24, 48, 48, 16, 6, 5, 30),
            {
                "micro-batch per device": "up to 2048 tokens, padding included",  # 4 x (256 + 256)
                "global batch": "4 rows x 2 micro-batches x 2 ranks = 16",
                "rows per PPO step": "24 x 2 ranks = 48",
                "updates per PPO step": "48 / 16 x 2 epochs = 6",
                "optimizer steps in all": "5 x 6 = 30",
            },
        ),
        # Ranks that share rows generate their own: 4 ranks x 4 prompts x 3 batches = 48 rows in a
        # PPO step; an update takes 6 x 2 x 2 groups = 24: 2 updates.
        (
            (4, 3, 6, 2),
            {},
            (96, 4, 0, 2),
            (12, 48, 48, 24, 2, 2, 4),
            {
                "micro-batch per group": "up to 3072 tokens, padding included",  # 6 x (256 + 256)
                "global batch": "6 rows x 2 micro-batches x 2 groups = 24",
                "updates per PPO step": "48 / 24 x 1 epoch = 2",
            },
        ),
        # Samples multiply rows and not prompts: 4 prompts x 3 answers = 12 rows a rank, 24 on two.
        # 20 prompts: ceil(20 / 8) = 3 PPO steps, 24 / 12 = 2 updates.
        (
            (4, 1, 6, 1),
            {"n_samples_per_prompt": 3},
            (20, 2),
            (12, 24, 8, 12, 2, 3, 6),
            {"rows per rank": "4 x 1 prompts x 3 answers = 12"},
        ),
    ],
)
def test_ppo_plan_by_hand(sizes, more, inputs, numbers, table):
    plan = plan_ppo(ppo_flags(**dict(zip(SIZES.split(), sizes, strict=True)), **more), *inputs)
    assert (
        plan.rows_per_rank,
        plan.rollout_rows,
        plan.rollout_prompts,
        plan.global_batch,
    ) == numbers[:4]
    assert (plan.updates_per_rollout, plan.ppo_steps, plan.total_updates) == numbers[4:]
    assert table.items() <= dict(plan.table()).items()


@pytest.mark.parametrize(
    ("rows", "given", "ranks", "tokens"),
    [
        (1, 0, 1, 512),
        (2, 0, 1, 1024),
        (9, 0, 1, 1024),
        (9, 0, 2, 2048),
        (9, 0, 8, 2048),
        (9, 700, 1, 700),
        (9, 4096, 1, 4096),
    ],
)
def test_a_cpu_has_small_micro_batches_of_whole_rows(rows, given, ranks, tokens):
    flags = ppo_flags(
        per_device_training_batch_size=rows, generation_batches=rows, micro_batch_tokens=given
    )
    assert plan_ppo(flags, 10_000, ranks, on_gpu=False).micro_batch_tokens == tokens
    assert plan_ppo(flags, 10_000, ranks).micro_batch_tokens == (given or 512 * rows)
    long = replace(flags, max_answer_seq_len=5000)
    assert plan_ppo(long, 10_000, ranks, on_gpu=False).micro_batch_tokens == (given or 5256)


@pytest.mark.parametrize(
    ("most", "stop", "warmup"), [(2, 0, 1), (1, 0, 0), (3, 2, 1), (20, 0, 5), (0, 4, 3), (0, 0, 5)]
)
def test_a_trial_ends_the_warm_up_of_the_critic_before_its_last_step(most, stop, warmup):
    flags = {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 4}
    trial = ppo_flags(enable_test_mode=stop > 0, test_stop_step=stop, **flags)
    plan = plan_ppo(trial, 1000, 1, 5, 1, most)
    assert plan.warmup_rollouts == warmup and plan.actor_updates > 0
    with pytest.raises(UserError, match="--critic_warmup_rollouts 5 must be below the 5 PPO steps"):
        plan_ppo(ppo_flags(**flags), 20, 1, 5)


@pytest.mark.parametrize(
    ("generation", "batches", "micro_batch", "accumulation", "shared", "numbers"),
    [
        (8, 1, 3, 1, 1, ("= 8 rows", "= 3", "Set --generation_batches 3")),
        (4, 3, 4, 2, 1, ("= 12 rows", "= 8", "Set --generation_batches 4")),
        (
            3,
            1,
            4,
            1,
            2,
            ("x 2 ranks that share rows = 6 rows per group", "= 4", "Set --generation_batches 2"),
        ),
    ],
)
def test_a_ppo_step_must_be_a_whole_number_of_updates(
    generation, batches, micro_batch, accumulation, shared, numbers
):
    flags = ppo_flags(
        per_device_generation_batch_size=generation,
        generation_batches=batches,
        per_device_training_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
    )
    with pytest.raises(UserError) as problem:
        plan_ppo(flags, prompts=100, world_size=2 * shared, shared=shared)
    for part in (
        *numbers,
        f"--per_device_training_batch_size {micro_batch}",
        f"--generation_batches {batches}",
    ):
        assert part in str(problem.value)
