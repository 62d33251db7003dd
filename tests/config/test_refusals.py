"""What the flags alone decide: what is refused before anything is loaded, notes about flags without
effect, and whether the update of a PPO step gives old log-probs and values."""

import pytest
from command_lines import NEEDED, config_of, noted, read

from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.config.on_policy import describe, old_logprobs_source
from dschat_ppo.errors import UserError

GRPO = "--advantage_estimator grpo --n_samples_per_prompt 2"
FUNCTION = "--use_reward_model False --reward_function exact_match"
CASES: list[tuple[str, str | list[str], str]] = [  # step, what is given, a part of the message
    # schedule and reference
    (
        "sft",
        "--warmup_ratio 0.1 --num_warmup_steps 5",
        "--warmup_ratio 0.1 and --num_warmup_steps 5 both set",
    ),
    (
        "ppo",
        "--warmup_ratio 0.1 --num_warmup_steps 5",
        "--warmup_ratio 0.1 and --num_warmup_steps 5 both set",
    ),
    (
        "reward",
        "--warmup_ratio 0.1 --lr_scheduler_type constant",
        "--lr_scheduler_type constant has no warm-up",
    ),
    (
        "sft",
        "--min_lr_ratio 0.1 --lr_scheduler_type constant",
        "--lr_scheduler_type constant does not decay",
    ),
    (
        "ppo",
        "--min_lr_ratio 0.1 --lr_scheduler_type constant_with_warmup",
        "constant_with_warmup does not decay",
    ),
    (
        "ppo",
        "--kl_coef 0 --ref_model_name_or_path r",
        "--ref_model_name_or_path r has no effect: it is for the",
    ),
    # several groups
    (
        "ppo",
        "--advantage_estimator grpo",
        "--advantage_estimator grpo compares the answers to one prompt: set --n_samples",
    ),
    (
        "ppo",
        "--old_logprobs rollout --importance_correction token",
        "--old_logprobs rollout skips the forward pass that",
    ),
    ("ppo", "--overlong_buffer 257", "--overlong_buffer 257 is above --max_answer_seq_len 256"),
    (
        "ppo",
        "--kl_coef 0 --offload_reference_model --actor_zero_stage 3",
        "--offload_reference_model True has no effect: it is for the reference",
    ),
    (
        "ppo",
        f"{FUNCTION} --offload_reward_model --critic_zero_stage 3",
        "it is for --use_reward_model",
    ),
    (
        "ppo",
        f"{FUNCTION} --normalize_rewards model",
        "--normalize_rewards model needs a learned reward",
    ),
    (
        "ppo",
        "--use_reward_model False",
        "--use_reward_model False leaves no reward: give --reward_function",
    ),
    # memory
    ("ppo", "--offload", "--actor_zero_stage and --critic_zero_stage"),
    ("ppo", "--offload --actor_zero_stage 3", "--actor_zero_stage and --critic_zero_stage"),
    ("ppo", "--offload_reference_model", "--actor_zero_stage 3"),
    ("ppo", "--offload_reward_model --actor_zero_stage 3", "--critic_zero_stage 3"),
    ("ppo", "--enable_test_mode", "--test_stop_step"),
    ("sft", "--attn_implementation flex_attention", "auto computes packed rows"),
    ("ppo", "--offload_optimizer", "--actor_zero_stage and --critic_zero_stage 1, 2 or 3"),
    (
        "ppo",
        "--offload_optimizer --actor_zero_stage 2",
        "--actor_zero_stage and --critic_zero_stage 1, 2 or 3",
    ),
    (
        "ppo",
        "--zero_hpz_partition_size 2",
        "--zero_hpz_partition_size (ZeRO++) needs --actor_zero_stage or --critic_zero_stage 3",
    ),
    (
        "ppo",
        "--kl_estimator full --old_logprobs recompute --sequence_parallel_size 2",
        "--kl_estimator full needs whole rows",
    ),
    (
        "ppo",
        "--kl_loss_coef 0.1 --kl_loss_estimator full --sequence_parallel_size 2",
        "--kl_loss_estimator full needs whole rows",
    ),
    # data
    ("sft", "--input_template Question:", "must contain {}"),
    ("sft", ["--input_template", "Q: {}\\nA:"], "backslash and the letter n; in bash, $'...'"),
    ("sft", ["--chat_template_kwargs", "[" * 9999], "--chat_template_kwargs is not JSON"),
    ("sft", "--answer_column a --answer_pattern ####", "needs a group"),
    ("sft", "--answer_column a --answer_pattern (x", "--answer_pattern"),
    ("sft", ["--prompt_column", ""], "--prompt_column is empty"),
    # health
    ("ppo", "--health window=1", "--health window=1: window takes a whole number of 2 or more"),
    ("ppo", "--health gradient_explodes=inf", "takes 1 or above, or off"),
    ("ppo", "--health entropy_collapse=0", "takes 1 or above, or off"),
    ("sft", "--health overfitting=0", "takes whole numbers of 1 or above, or off"),
    ("sft", "--health overfitting=1.5", "takes whole numbers of 1 or above, or off"),
    ("ppo", "--health reward_faults=-0.1", "takes 0 or above, or off"),
    ("ppo", "--health kl_spike", "kl_spike takes a number, or off"),
    ("ppo", "--health kl_negative=0.02", "takes 0 or below, or off"),
    ("ppo", "--health reward_exploited=2", "reward_exploited takes off"),
    (
        "ppo",
        "--health kl_spikes=1",
        "there is no rule 'kl_spikes', but window, kl_negative, kl_spike",
    ),
    (
        "sft",
        "--health kl_spike=1",
        "there is no rule 'kl_spike', but window, loss_grows, overfitting",
    ),
    # algorithm
    (
        "ppo",
        "--policy_loss reinforce --clip_eps 0.3",
        "--clip_eps 0.3 has no effect: it is for --policy_loss ppo or",
    ),
    ("ppo", "--sapo_tau_negative 2.0", "it is for --policy_loss sapo"),
    ("ppo", "--covariance_share 0.1", "it is for --policy_loss clip_cov or kl_cov"),
    ("ppo", "--policy_loss cispo --dual_clip 3.0", "--dual_clip 3.0 has no effect"),
    ("ppo", "--advantage_estimator grpo --gae_lambda 1.0", "it is for --advantage_estimator gae"),
    ("ppo", "--advantage_estimator rloo --gamma 0.9", "--gamma 0.9 has no effect"),
    (
        "ppo",
        "--advantage_estimator grpo --whiten_advantages False",
        "--whiten_advantages False has no effect",
    ),
    (
        "ppo",
        "--advantage_estimator gdpo",
        "--advantage_estimator gdpo compares the answers to one prompt",
    ),
    *[
        (
            "ppo",
            f"--advantage_estimator gdpo --n_samples_per_prompt 2 {words}",
            "gdpo standardises each reward source",
        )
        for words in ("--reward_clip 5", "--normalize_rewards running")
    ],
    (
        "ppo",
        "--normalize_group_std False",
        "it is for --advantage_estimator grpo or grpo_pass_at_k",
    ),
    *[
        (
            "ppo",
            f"--group_std batch --advantage_estimator {words}",
            "it is for --normalize_group_std of grpo",
        )
        for words in ("rloo", "grpo --normalize_group_std False")
    ],
    (
        "ppo",
        "--kl_coef 0.0 --kl_target 0.1",
        "--kl_target 0.1 has no effect: it is for a --kl_coef above 0",
    ),
    (
        "ppo",
        "--advantage_estimator grpo --kl_target 0.1",
        (
            "--kl_target 0.1 has no effect: it is for a --kl_coef above 0 (for grpo it is 0 unless"
            " given)"
        ),
    ),
    ("ppo", "--kl_horizon 5", "it is for --kl_target"),
    ("ppo", "--kl_loss_estimator k2", "it is for --kl_loss_coef above 0"),
    (
        "ppo",
        "--kl_loss_coef 0.1 --kl_loss_estimator full --kl_straight_through False",
        "a KL loss k1, k3 or abs",
    ),
    ("ppo", "--kl_coef 0.0 --kl_estimator full", "it is for --kl_coef above 0"),
    ("ppo", "--importance_cap 3.0", "it is for --importance_correction"),
    (
        "ppo",
        "--importance_correction token --importance_cap 0.5",
        "--importance_cap must be above 1",
    ),
    ("ppo", "--importance_floor 0.5", "it is for --importance_correction"),
    (
        "ppo",
        "--importance_correction token --importance_floor 2",
        "--importance_floor 2.0 must be below",
    ),
    ("ppo", "--entropy_delta 0.1", "it is for --entropy_target"),
    (
        "ppo",
        "--entropy_target 1.0 --entropy_coef 2.0",
        "--entropy_coef 2.0 is above --entropy_coef_max 1.0",
    ),
    ("ppo", "--overlong_penalty 2.0", "it is for --overlong_buffer"),
    # evaluation
    ("ppo", "--eval_batch_size 8", "--eval_batch_size 8 has no effect: it is for --eval_data_path"),
    ("ppo", "--save_best False", "--save_best False has no effect: it is for --eval_data_path"),
    ("ppo", "--validate_only", "--validate_only needs held-out prompts: give --eval_data_path"),
    (
        "ppo",
        "--eval_data_path e --eval_greedy --eval_samples 2",
        "--eval_greedy gives the same answer every time: omit --eval_samples",
    ),
    ("sft", "--tracker t.py", "--tracker t.py: expected FILE.py:CLASS"),
    # early stop
    ("sft", "--early_stop_patience 0", "must be finite and above 0"),
    ("sft", "--early_stop_min_delta 0.1", "it is for --early_stop_patience; omit it"),
    ("ppo", "--early_stop_patience 3", "which --eval_data_path and --eval_interval make; omit it"),
    (
        "ppo",
        "--early_stop_patience 3 --eval_data_path e",
        "which --eval_data_path and --eval_interval make; omit it",
    ),
    # rewards
    ("ppo", "--remote_reward_sources a", "it is for --remote_reward_url"),
    # objectives
    (
        "reward",
        "--objective dpo_nll --nll_coef 0",
        "--nll_coef must be above 0 for --objective dpo_nll",
    ),
    *[
        (
            "reward",
            f"--objective {objective} --label_smoothing {share}",
            f"--label_smoothing must be above 0 and below 0.5 for --objective {objective}",
        )
        for objective in ("cdpo", "robust_dpo")
        for share in ("0", "0.5")
    ],
    (
        "reward",
        "--no_use_margin --objective dpo",
        "--use_margin False has no effect: it is for --objective reward",
    ),
    ("reward", "--beta 0.3", "it is for --objective dpo or cdpo or ipo"),
    ("reward", "--nll_coef 1 --objective ipo", "it is for --objective dpo_nll or cpo or simpo"),
    ("reward", "--label_smoothing 0.2 --objective dpo", "it is for --objective cdpo or robust_dpo"),
    # the best metric
    (
        "sft",
        "--metric_for_best chosen_score:up",
        "is a higher or a lower value better? Write eval_chosen_score:up",
    ),
    (
        "sft",
        "--metric_for_best accuracy",
        (
            "--metric_for_best accuracy: the evaluation has no eval_accuracy; it has eval_loss,"
            " eval_perplexity"
        ),
    ),
    ("reward", "--metric_for_best centering_loss", "the evaluation has no eval_centering_loss"),
    ("reward", "--metric_for_best nll --objective dpo", "the evaluation has no eval_nll"),
    # what other programs take for off, and words that are no value
    ("ppo", "--top_k -1", "0 = off"),
    ("ppo", "--temperature 0", "above 0; --top_k 1"),
    ("sft", "--max_steps -1", "0 = --num_train_epochs"),
    ("ppo", "--eval_interval -1 --eval_data_path e", "0 = "),
    (
        "sft",
        "--report_to tensorboard,wand",
        "--report_to wand: expected one of none, tensorboard, wandb",
    ),
    ("ppo", ["--health", ""], "--health needs a value"),
    ("sft", "--config", "--config needs a value"),
    ("sft", "--offload", "--offload needs --zero_stage 1, 2 or 3"),
]


# flag=value, out of the range of the flag
RANGES = {
    "ppo": (
        """
        gamma=1.1 gae_lambda=-0.1 clip_eps=0 clip_eps=1 dual_clip=0.5 value_clip_eps=-1
        kl_coef=-0.1 reward_clip=-1
        temperature=0 top_p=0 top_p=1.1 top_k=-1 min_p=1 min_p=-0.1 repetition_penalty=0
        n_samples_per_prompt=0
        rollout_engine=fast old_logprobs=never min_answer_seq_len=257 stop_token_ids=-1
        stop_token_ids=x stop_strings=
        micro_batch_tokens=-1 ppo_epochs=0 actor_learning_rate=0 critic_learning_rate=1.5
        actor_dropout=1.0
        critic_dropout=-0.5 actor_zero_stage=5 test_stop_step=3 reward_timeout=1e7
        high_entropy_share=0
    """
    ),
    "reward": (
        """
        objective=ppo center_rewards_coef=nan beta=0 beta=inf
        label_smoothing=-0.1 max_seq_len=-5
    """
    ),
    "sft": (
        """
        collective_timeout=0.9 collective_timeout=1e9 per_device_train_batch_size=0
        max_seq_len=0 learning_rate=nan
        learning_rate=fast learning_rate=1.01 adam_beta1=-0.1 adam_beta2=1 adam_epsilon=0
        num_train_epochs=0
        weight_decay=-0.1 eval_fraction=1 zero_stage=4 truncation=sideways seed=-1
        data_split=2,4 data_split=0,0,0
        data_split=1,-1,1 data_split=a,b,c data_split=inf,1,1 data_format=parquet warmup_ratio=1
    """
    ),
}
# Flags of all steps, each with a value that is wrong by itself
WRONG_EVERYWHERE = """
    dtype=bfloat16 data_split=2,4 data_split=0,0,0 prompt_column= label_column= better_column=a,
    role_names=a=b answer_pattern=( answer_pattern=a input_template=a chat_template_kwargs=[1]
    chat_template_kwargs={ report_to=none,wandb collective_timeout=0.5
    health=no_rule health=window=x seed=-1 bad_rows=all data_path= max_steps=x
"""
WRONG = {
    "sft": (
        """
        max_seq_len=1 metric_for_best=chosen_score eval_fraction=2 train_on=none
    """
    ),
    "reward": "max_seq_len=0 metric_for_best=kl objective=ppo beta=0",
    "ppo": (
        """
        reward_default=many reward_default=inf reward_default=nan reward_function=
        reward_function=exact_match:nan remote_reward_url= remote_reward_url=localhost:5000
        remote_reward_url=ftp://h reward_timeout=1e7 remote_reward_timeout=0 stop_strings=
        stop_token_ids=-1 temperature=0 dual_clip=0.5 importance_cap=1 clip_eps=1 clip_eps_low=1
        gamma=2 advantage_estimator=ppo top_k=-1
    """
    ),
}


def refused(step: str, *words: str) -> str:
    with pytest.raises(UserError) as problem:
        read(step, *words)
    assert "\n" not in str(problem.value)
    return str(problem.value)


@pytest.mark.parametrize(("step", "given", "message"), CASES)
def test_flags_that_do_not_go_together_are_refused(step, given, message):
    assert message in refused(step, *(given.split() if isinstance(given, str) else given))


@pytest.mark.parametrize(
    ("step", "case"), [(step, case) for step, text in RANGES.items() for case in text.split()]
)
def test_a_value_out_of_range_is_refused(step, case):
    name, _, value = case.partition("=")
    assert f"--{name}" in refused(step, f"--{name}", value)


@pytest.mark.parametrize(
    ("step", "case"),
    [(step, case) for step, text in WRONG.items() for case in f"{WRONG_EVERYWHERE} {text}".split()],
)
def test_every_wrong_value_is_in_the_one_message(step, case):
    """Beside a wrong choice before it, a wrong number behind it, and an unknown flag."""
    name, _, value = case.partition("=")
    words = ["--attn_implementation", "fast", f"--{name}", value, "--adam_beta1", "9", "--zz"]
    with pytest.raises(UserError) as problem:
        read(step, *words)
    lines = str(problem.value).splitlines()
    assert len(lines) == 4
    wanted = "--attn_implementation", f"--{name}", "--adam_beta1", "unknown flag or value: --zz"
    for line, start in zip(lines, wanted, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize("step", WRONG)
def test_many_wrong_values_have_a_line_each(step):
    cases = dict(case.split("=", 1) for case in f"{WRONG_EVERYWHERE} {WRONG[step]}".split())
    words = [word for name, value in cases.items() for word in (f"--{name}", value)]
    with pytest.raises(UserError) as problem:
        read(step, *words)
    lines = str(problem.value).splitlines()
    assert [line.split()[0].rstrip(":") for line in lines] == [f"--{name}" for name in cases]


def test_the_wrong_values_of_a_file_are_in_one_message(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("reward_default: many\ndtype: bfloat16\nstop_token_ids: some\n")
    with pytest.raises(UserError) as problem:
        read("ppo", "--config", str(path))
    message = str(problem.value)
    assert all(f"--{name} " in message for name in ("reward_default", "dtype", "stop_token_ids"))


@pytest.mark.parametrize(
    ("step", "words", "missing"),
    [
        ("sft", "", "--model_name_or_path, --data_path, --output_dir"),
        ("reward", "--model_name_or_path m", "--data_path, --output_dir"),
        (
            "ppo",
            "--use_reward_model False",
            "--actor_model_name_or_path, --data_path, --output_dir",
        ),
        (
            "ppo",
            "--data_path d",
            (
                "--actor_model_name_or_path, --output_dir, --critic_model_name_or_path (or "
                "--use_reward_model False with --reward_function)"
            ),
        ),
    ],
)
def test_all_missing_flags_are_named_in_one_line(step, words, missing):
    with pytest.raises(UserError) as problem:
        parse(step, words.split())
    named = missing.replace(
        "--data_path", "--data_path (DeepSpeed-Chat's default: Dahoas/rm-static)"
    )
    assert str(problem.value) == f"required: {named} (all flags: --help all)"


def test_an_empty_name_of_a_model_is_no_name():
    """As of a shell variable that is not set."""
    models = config_of(
        "ppo", "--critic_model_name_or_path", "", "--reward_model_name_or_path", "r"
    ).models
    assert models["critic"] == models["reward"] == ("--reward_model_name_or_path", "r")


STAGES = "--actor_zero_stage 3 --critic_zero_stage 2"
OFFLOAD = (
    "--offload_reference_model --offload_reward_model --actor_zero_stage 3 --critic_zero_stage 3"
)
VALIDATE = "--validate_only --eval_data_path e"
WITHOUT_EFFECT = [  # step, what is given, the flags without effect
    # trackers
    ("sft", "--report_to wandb --run_name a --project b", ""),
    ("sft", "--report_to trackio", ""),
    ("reward", "--report_to tensorboard --run_name a", "run_name"),
    ("ppo", "--project b --enable_tensorboard", "project"),
    ("ppo", "--report_to none --enable_tensorboard", "enable_tensorboard"),
    ("ppo", "--report_to none --tracker t.py:T", "tracker"),
    ("sft", "--tracker t.py:T --run_name a", ""),
    ("sft", "--tracker t.py:T --project b", "project"),
    # schedule, length and reference
    ("sft", "--warmup_ratio 0.1", ""),
    ("sft", "--warmup_ratio 0 --num_warmup_steps 5", ""),
    (
        "ppo",
        "--warmup_ratio 0.1 --num_warmup_steps 100",
        "",
    ),  # its default, as a resolved configuration has it
    ("ppo", "--ref_model_name_or_path r", ""),
    *[
        (step, *case)
        for step in NEEDED
        for case in (
            ("--max_steps 9 --num_train_epochs 2", "num_train_epochs"),
            ("--max_steps 9 --num_train_epochs 1", ""),
            ("--lr_scheduler_type constant --num_warmup_steps 7", "num_warmup_steps"),
            ("--lr_scheduler_type constant", ""),
            ("--lr_scheduler_type constant --num_warmup_steps 0", ""),
        )
    ],
    # memory
    ("ppo", OFFLOAD, ""),
    ("ppo", "--align_overflow --dtype fp16", ""),
    ("ppo", "--align_overflow", "align_overflow"),
    ("ppo", "--align_overflow --dtype fp16 --advantage_estimator remax", "align_overflow"),
    # what follows training
    *[
        (
            step,
            f"--report_to tensorboard --profile 2 --stop_on_health error {VALIDATE}",
            "report_to profile stop_on_health",
        )
        for step in NEEDED
    ],
    ("ppo", f"{VALIDATE} --eval_interval 5", "eval_interval"),
]


@pytest.mark.parametrize(("step", "words", "names"), WITHOUT_EFFECT)
def test_a_note_names_each_flag_without_effect(step, words, names):
    lines = noted(step, *words.split())
    assert {line.split(" has no effect: ")[0] for line in lines} == {
        f"--{name}" for name in names.split()
    }


@pytest.mark.parametrize(
    "words",
    [
        f"--offload {STAGES}",
        f"--offload_optimizer {STAGES}",
        f"--zero_hpz_partition_size 2 {STAGES}",
        "--kl_estimator full --old_logprobs recompute",
    ],
)
def test_flags_that_fit_together_are_accepted(words):
    read("ppo", *words.split())


ONE_UPDATE = (
    "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o "
    "--per_device_generation_batch_size 4 --per_device_training_batch_size 4 "
)
GROUPS = "--advantage_estimator grpo --n_samples_per_prompt 2 --per_device_generation_batch_size 2 "
LLAMA = {
    "model_type": "llama",
    "id2label": {0: "LABEL_0"},
    "rope_parameters": {"rope_type": "default"},
}


def source(words: str = "", *models: dict, ranks: int = 1, shared: int = 1) -> tuple:
    config = parse("ppo", (ONE_UPDATE + words).split())
    return old_logprobs_source(
        config, plan_ppo(config.ppo, 64, ranks, shared=shared), models or (LLAMA, LLAMA)
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "words",
    [
        "",
        GROUPS,
        "--per_device_training_batch_size 1 --gradient_accumulation_steps 4",
        (
            "--max_log_ratio 0.1 --target_kl 0.1 --off_policy_delta 0.1 --kl_loss_coef 0.1"
            " --kl_loss_estimator full"
        ),
        (
            "--kl_target 0.1 --entropy_target 1 --critic_warmup_rollouts 1 --actor_dropout 0"
            " --router_loss_coef 0.1"
        ),
        GROUPS + "--critic_dropout 0.1",  # there is no critic
    ],
)
def test_the_only_update_of_a_step_gives_them(words, dtype):
    assert source(f"{words} --dtype {dtype}") == ("update", None)


def test_rows_of_ranks_and_of_groups_that_share_rows_are_counted():
    assert source("", ranks=2)[0] == "update"
    assert source("", ranks=2, shared=2)[1] == "a PPO step makes 2 optimizer steps"
    assert source("--gradient_accumulation_steps 2", ranks=2, shared=2)[0] == "update"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--ppo_epochs 2", "a PPO step makes 2 optimizer steps"),
        ("--per_device_training_batch_size 1", "a PPO step makes 4 optimizer steps"),
        ("--importance_correction token", "--importance_correction compares"),
        ("--high_entropy_share 0.5", "--high_entropy_share selects tokens"),
        ("--policy_loss clip_cov", "--policy_loss clip_cov selects tokens"),
        ("--kl_estimator full", "--kl_estimator full compares"),
        ("--actor_dropout 0.1", "--actor_dropout changes them"),
        ("--critic_dropout 0.1", "--critic_dropout changes values"),
    ],
)
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
    assert (
        source("--kl_estimator abs --dtype fp32")
        == source("--kl_estimator k3 --dtype bf16")
        == ("update", None)
    )


@pytest.mark.parametrize(
    "noise", [{"router_jitter_noise": 0.01}, {"ffn_config": {"moe_jitter_eps": 0.01}}]
)
def test_a_router_that_adds_noise_in_training_needs_scoring(noise):
    assert source("--dtype bf16", {**LLAMA, **noise}, LLAMA)[0] == "recompute"
    assert source("--dtype bf16", LLAMA, {**LLAMA, **noise}) == (
        "recompute",
        "the router of a model adds noise in training",
    )
    assert source("", {"router_jitter_noise": 0.0, "ffn_config": {"moe_jitter_eps": None}}) == (
        "update",
        None,
    )


@pytest.mark.parametrize("asked", ["recompute", "rollout"])
def test_an_explicit_source_is_kept(asked):
    assert source(f"--old_logprobs {asked}") == (asked, None)
    assert "auto" not in describe(*source(f"--old_logprobs {asked}"))
