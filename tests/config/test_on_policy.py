"""Which flags let the update of a PPO step give old log-probs and values."""

import pytest

from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.config.on_policy import describe, old_logprobs_source

ONE_UPDATE = (
    "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o "
    "--per_device_generation_batch_size 4 --per_device_training_batch_size 4 "
)
GROUPS = "--advantage_estimator grpo --n_samples_per_prompt 2 --per_device_generation_batch_size 2 "
LLAMA = {"model_type": "llama", "id2label": {0: "LABEL_0"}, "rope_parameters": {"rope_type": "default"}}


def source(words: str = "", *models: dict, ranks: int = 1, shared: int = 1) -> tuple:
    config = parse("ppo", (ONE_UPDATE + words).split())
    return old_logprobs_source(config, plan_ppo(config.ppo, 64, ranks, shared=shared), models or (LLAMA, LLAMA))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("words", [
    "", GROUPS, "--per_device_training_batch_size 1 --gradient_accumulation_steps 4",
    "--max_log_ratio 0.1 --target_kl 0.1 --off_policy_delta 0.1 --kl_loss_coef 0.1 --kl_loss_estimator full",
    "--kl_target 0.1 --entropy_target 1 --critic_warmup_rollouts 1 --actor_dropout 0 --router_loss_coef 0.1",
    GROUPS + "--critic_dropout 0.1",  # there is no critic
])  # fmt: skip
def test_the_only_update_of_a_step_gives_them(words, dtype):
    assert source(f"{words} --dtype {dtype}") == ("update", None)


def test_rows_of_ranks_and_of_groups_that_share_rows_are_counted():
    assert source("", ranks=2)[0] == "update"
    assert source("", ranks=2, shared=2)[1] == "a PPO step makes 2 optimizer steps"
    assert source("--gradient_accumulation_steps 2", ranks=2, shared=2)[0] == "update"


@pytest.mark.parametrize(("words", "reason"), [
    ("--ppo_epochs 2", "a PPO step makes 2 optimizer steps"),
    ("--per_device_training_batch_size 1", "a PPO step makes 4 optimizer steps"),
    (GROUPS + "--dynamic_sampling", "--dynamic_sampling keeps answers"),
    ("--importance_correction token", "--importance_correction compares"),
    ("--high_entropy_share 0.5", "--high_entropy_share selects tokens"),
    ("--policy_loss clip_cov", "--policy_loss clip_cov selects tokens"),
    ("--kl_estimator full", "--kl_estimator full compares"), ("--actor_dropout 0.1", "--actor_dropout changes them"),
    ("--critic_dropout 0.1", "--critic_dropout changes values"),
    ("--actor_lora_dim 4 --lora_dropout 0.1", "--lora_dropout changes them"),
])  # fmt: skip
def test_what_is_needed_before_the_update_is_scored(words, reason):
    in_bf16, why = source(f"{words} --dtype bf16")
    assert in_bf16 == "recompute" and why.startswith(reason)
    needs_pass = any(flag in words for flag in ("importance", "entropy_share", "full"))
    in_fp32, also = source(f"{words} --dtype fp32")
    assert (in_fp32, also) == ("recompute" if needs_pass else "rollout", why)
    assert why in describe(in_fp32, why) and "--old_logprobs auto" in describe(in_fp32, why)


def test_the_absolute_kl_is_scored_where_rounding_would_count():
    reason = "--kl_estimator abs measures rounding in bf16"
    assert source("--kl_estimator abs --dtype bf16") == ("recompute", reason)
    assert source("--kl_estimator abs --dtype fp32") == source("--kl_estimator k3 --dtype bf16") == ("update", None)


@pytest.mark.parametrize("noise", [{"router_jitter_noise": 0.01}, {"ffn_config": {"moe_jitter_eps": 0.01}}])
def test_a_router_that_adds_noise_in_training_needs_scoring(noise):
    assert source("--dtype bf16", {**LLAMA, **noise}, LLAMA)[0] == "recompute"
    assert source("--dtype bf16", LLAMA, {**LLAMA, **noise}) == (
        "recompute", "the router of a model adds noise in training",
    )  # fmt: skip
    assert source("", {"router_jitter_noise": 0.0, "ffn_config": {"moe_jitter_eps": None}}) == ("update", None)


@pytest.mark.parametrize("asked", ["recompute", "rollout"])
def test_an_explicit_source_is_kept(asked):
    assert source(f"--old_logprobs {asked}") == (asked, None)
    assert "auto" not in describe(*source(f"--old_logprobs {asked}"))
