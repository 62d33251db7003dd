"""Flags of step 3 and of its evaluation: ranges and combinations that are refused."""

import pytest
from command_lines import NEEDED, read

from dschat_ppo.config.cli import parse
from dschat_ppo.config.ppo_flags import EvaluationFlags
from dschat_ppo.errors import UserError


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--offload"], "--actor_zero_stage and --critic_zero_stage"),
        (["--offload", "--actor_zero_stage", "3"], "--actor_zero_stage and --critic_zero_stage"),
        (["--offload_reference_model"], "--actor_zero_stage 3"),
        (["--offload_reference_model", "--critic_zero_stage", "3"], "--actor_zero_stage 3"),
        (["--offload_reward_model", "--actor_zero_stage", "3"], "--critic_zero_stage 3"),
        (["--enable_test_mode"], "--test_stop_step"),
        (["--offload_optimizer"], "--actor_zero_stage and --critic_zero_stage 1, 2 or 3"),
        (["--offload_optimizer", "--actor_zero_stage", "2"], "--actor_zero_stage and --critic_zero_stage 1, 2 or 3"),
        (["--inference_tp_size", "2", "--unpin_actor_parameters"], "use one of the two"),
        (
            ["--zero_hpz_partition_size", "2"],
            r"--zero_hpz.* \(ZeRO.*--actor_zero_stage or --critic_zero_stage 3",
        ),
        (["--enable_mixed_precision_lora"], "--actor_zero_stage 3, --actor_lora_dim above 0 and --dtype fp16"),
    ],
)
def test_offload_and_test_mode_name_the_flags_that_they_need(words, named):
    with pytest.raises(UserError, match=named):
        read("ppo", *words)


def test_memory_flags_that_fit_together_are_accepted():
    stages = ["--actor_zero_stage", "3", "--critic_zero_stage", "2"]
    for words in (
        ["--sleep_in_rollout"],
        ["--sleep_in_rollout", "--offload", *stages],
        ["--offload_optimizer", "--experience_on_host", *stages],
        ["--zero_hpz_partition_size", "2", *stages],
        ["--inference_tp_size", "2", *stages],
        ["--inference_tp_size", "2", "--actor_lora_dim", "8"],
        ["--enable_mixed_precision_lora", "--actor_lora_dim", "8", "--only_optimize_lora", "--dtype", "fp16", *stages],
    ):
        read("ppo", *words)


def test_the_layers_gathered_at_a_time_have_no_effect_without_tensor_parallelism():
    def idle(*words: str) -> dict[str, str]:
        return parse("ppo", [*NEEDED["ppo"], *words]).idle()

    assert idle() == idle("--inference_tp_size", "2", "--tp_gather_partition_size", "4") == {}
    assert set(idle("--tp_gather_partition_size", "4")) == {"tp_gather_partition_size"}


@pytest.mark.parametrize("given", [{"eval_batch_size": 8}, {"eval_pass_score": 0.5}, {"save_best": False}])
def test_evaluation_flags_need_eval_data_path(given):
    with pytest.raises(UserError, match=f"--{next(iter(given))}: .*--eval_data_path"):
        EvaluationFlags(**given)
    EvaluationFlags(eval_data_path=["prompts.jsonl"], **given)


def test_validation_needs_held_out_prompts():
    with pytest.raises(UserError, match="^--validate_only needs held-out prompts: give --eval_data_path$"):
        EvaluationFlags(validate_only=True)
    assert EvaluationFlags(eval_data_path=["e"], validate_only=True).validate_only


def test_greedy_evaluation_of_several_samples_is_refused():
    with pytest.raises(UserError, match="--eval_greedy .*omit --eval_samples"):
        EvaluationFlags(eval_data_path=["e"], eval_greedy=True, eval_samples=2)
