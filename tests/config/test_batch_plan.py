"""Batch plans by hand, and plans that are refused."""

import pytest

from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.ppo_flags import PPOFlags
from dschat_ppo.config.supervised_flags import SupervisedFlags
from dschat_ppo.errors import UserError
from dschat_ppo.supervised.trainer import SupervisedPlan


def ppo_flags(**settings) -> PPOFlags:
    return PPOFlags(actor_model_name_or_path="a", critic_model_name_or_path="c", **settings)


def supervised_flags(micro_batch: int, accumulation: int, epochs: float) -> SupervisedFlags:
    return SupervisedFlags(
        model_name_or_path="m",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=epochs,
    )


@pytest.mark.parametrize(
    ("rows", "world_size", "micro_batch", "accumulation", "epochs", "global_batch", "per_epoch", "total"),
    [
        (100, 1, 10, 1, 1, 10, 10, 10),
        (100, 2, 4, 3, 2, 24, 5, 10),  # 100 / 24 = 4.17: the fifth step is short, not left out
        (24, 2, 4, 3, 3, 24, 1, 3),
        (1, 4, 8, 2, 1, 64, 1, 1),
        (65, 4, 8, 2, 1, 64, 2, 2),
    ],
)
def test_supervised_plan_by_hand(rows, world_size, micro_batch, accumulation, epochs, global_batch, per_epoch, total):
    plan = SupervisedPlan(supervised_flags(micro_batch, accumulation, epochs), rows, world_size)
    assert (plan.global_batch, plan.steps_per_epoch, plan.total_steps) == (global_batch, per_epoch, total)


@pytest.mark.parametrize(("epochs", "most", "total", "shown"), [
    (2.0, 0, 10, "10, 2 epochs"), (0.5, 0, 3, "3, 0.6 epochs"), (1.5, 0, 8, "8, 1.6 epochs"),
    (0.6, 0, 3, "3, 0.6 epochs"), (1e-5, 0, 1, "1, 0.2 epochs"), (2, 3, 3, "3, 0.6 epochs"),
    (2, 12, 12, "12, 2.4 epochs"),  # --max_steps replaces the epochs
])  # fmt: skip
def test_fractions_of_an_epoch_are_rounded_up_to_optimizer_steps(epochs, most, total, shown):
    for ranks, shared, of_ranks in ((2, 1, "2 ranks"), (4, 2, "2 groups")):  # ranks that share rows count as one
        plan = SupervisedPlan(supervised_flags(4, 3, epochs), 100, ranks, shared=shared, max_steps=most)
        assert (plan.steps_per_epoch, plan.total_steps) == (5, total)
        table = dict(plan.table())
        assert table["optimizer steps in all"] == shown
        assert table["global batch"] == f"4 rows x 3 micro-batches x {of_ranks} = 24"
        assert table["optimizer steps per epoch"] == "ceil(100 / 24) = 5"


@pytest.mark.parametrize(
    ("epochs", "most", "stop", "steps"),
    [
        (0.5, 0, 0, 2), (1.5, 0, 0, 4), (0.01, 0, 0, 1), (2.0, 0, 0, 5),  # 100 prompts, 40 in a step
        (1, 7, 0, 7), (5, 1, 0, 1), (1, 7, 2, 2), (1, 1, 2, 1), (1, 0, 9, 3),  # --test_stop_step only shortens
    ],
)  # fmt: skip
def test_ppo_steps_by_fractions_and_by_max_steps(epochs, most, stop, steps):
    flags = ppo_flags(
        per_device_generation_batch_size=20, per_device_training_batch_size=20, num_train_epochs=epochs,
        enable_test_mode=stop > 0, test_stop_step=stop,
    )  # fmt: skip
    plan = plan_ppo(flags, 100, 2, max_steps=most)
    assert (plan.ppo_steps, plan.total_updates, plan.actor_updates) == (steps, steps, steps)
    assert dict(plan.table())["PPO steps"] == (f"{steps} (--max_steps)" if most == steps else f"{steps}")


def test_ppo_plan_by_hand():
    # 8 prompts x 3 calls = 24 rows a rank, 48 on two ranks. An update takes 4 x 2 x 2 = 16: 3 a pass, 6 in 2 passes.
    # 100 prompts x 2 epochs = 200 rows in ceil(200 / 48) = 5 PPO steps: 30 updates.
    flags = ppo_flags(
        per_device_generation_batch_size=8, generation_batches=3, per_device_training_batch_size=4,
        gradient_accumulation_steps=2, ppo_epochs=2, num_train_epochs=2,
    )  # fmt: skip
    plan = plan_ppo(flags, prompts=100, world_size=2)
    assert (plan.rows_per_rank, plan.rollout_rows, plan.global_batch) == (24, 48, 16)
    assert (plan.updates_per_rollout, plan.ppo_steps, plan.total_updates) == (6, 5, 30)
    table = dict(plan.table())
    assert table["micro-batch per device"] == "up to 2048 tokens, padding included"  # 4 x (256 + 256)
    assert table["global batch"] == "4 rows x 2 micro-batches x 2 ranks = 16"
    assert table["rows per PPO step"] == "24 x 2 ranks = 48"
    assert table["updates per PPO step"] == "48 / 16 x 2 epochs = 6"
    assert table["optimizer steps in all"] == "5 x 6 = 30"


def test_ranks_that_share_rows_generate_their_own():
    # 4 ranks x 4 prompts x 3 batches = 48 rows in a PPO step; an update takes 6 x 2 x 2 groups = 24: 2 updates
    flags = ppo_flags(
        per_device_generation_batch_size=4, generation_batches=3, per_device_training_batch_size=6,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    plan = plan_ppo(flags, prompts=96, world_size=4, shared=2)
    assert (plan.rows_per_rank, plan.rollout_rows, plan.global_batch) == (12, 48, 24)
    assert (plan.updates_per_rollout, plan.ppo_steps, plan.total_updates) == (2, 2, 4)
    table = dict(plan.table())
    assert table["micro-batch per group"] == "up to 3072 tokens, padding included"  # 6 x (256 + 256)
    assert table["global batch"] == "6 rows x 2 micro-batches x 2 groups = 24"
    assert table["updates per PPO step"] == "48 / 24 x 1 epoch = 2"


def test_samples_per_prompt_multiply_rows_and_not_prompts():
    # 4 prompts x 3 answers = 12 rows a rank, 24 on two. 20 prompts: ceil(20 / 8) = 3 PPO steps, 24 / 12 = 2 updates.
    flags = ppo_flags(
        per_device_generation_batch_size=4, n_samples_per_prompt=3, per_device_training_batch_size=6
    )  # fmt: skip
    plan = plan_ppo(flags, prompts=20, world_size=2)
    assert (plan.prompts_per_rank, plan.rows_per_rank, plan.rollout_prompts, plan.rollout_rows) == (4, 12, 8, 24)
    assert (plan.ppo_steps, plan.updates_per_rollout) == (3, 2)
    assert dict(plan.table())["rows per rank"] == "4 x 1 prompts x 3 answers = 12"


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


@pytest.mark.parametrize(("generation", "batches", "micro_batch", "accumulation", "shared", "numbers"), [
    (8, 1, 3, 1, 1, ("= 8 rows", "= 3", "Set --generation_batches 3")),
    (4, 3, 4, 2, 1, ("= 12 rows", "= 8", "Set --generation_batches 4")),
    (3, 1, 4, 1, 2, ("x 2 ranks that share rows = 6 rows per group", "= 4", "Set --generation_batches 2")),
])  # fmt: skip
def test_a_ppo_step_must_be_a_whole_number_of_updates(generation, batches, micro_batch, accumulation, shared, numbers):
    flags = ppo_flags(
        per_device_generation_batch_size=generation, generation_batches=batches,
        per_device_training_batch_size=micro_batch, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    with pytest.raises(UserError) as problem:
        plan_ppo(flags, prompts=100, world_size=2 * shared, shared=shared)
    for part in (*numbers, f"--per_device_training_batch_size {micro_batch}", f"--generation_batches {batches}"):
        assert part in str(problem.value)
