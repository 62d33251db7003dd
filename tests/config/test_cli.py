"""Flags, YAML and their checks; DeepSpeed-Chat's command lines go on working."""

import pytest

from dschat_ppo.config.cli import flatten, notes, parse
from dschat_ppo.errors import UserError

NEEDED = {
    "sft": ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"],
    "reward": ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"],
    "ppo": "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o".split(),
}

# DeepSpeed-Chat's flags: name -> (default, words that a script might give it). Switches take no word.
REQUIRED = "required"
SHARED = {
    "data_path": (["Dahoas/rm-static"], ["a.jsonl", "b.jsonl"]),
    "data_split": ("2,4,4", ["1,0,0"]),
    "data_output_path": ("a folder under the temp dir", ["cache"]),
    "lr_scheduler_type": ("cosine", ["constant_with_warmup"]),
    "num_train_epochs": (1, ["3"]),
    "gradient_accumulation_steps": (1, ["2"]),
    "output_dir": (None, ["out"]),
    "local_rank": (-1, ["0"]),
    "dtype": ("fp16", ["fp16"]),
    "compute_fp32_loss": (False, []),
    "enable_tensorboard": (False, []),
    "add_eot_token": (False, []),
    "deepspeed": (False, []),
    "deepspeed_config": (None, ["ds.json"]),
}
FIT = {
    **SHARED,
    "model_name_or_path": (REQUIRED, ["m"]),
    "per_device_train_batch_size": (16, ["4"]),
    "per_device_eval_batch_size": (16, ["4"]),
    "max_seq_len": (512, ["1024"]),
    "weight_decay": (0.0, ["0.1"]),
    "num_warmup_steps": (0, ["10"]),
    "seed": (1234, ["7"]),
    "gradient_checkpointing": (False, []),
    "dropout": (None, ["0.1"]),
    "zero_stage": (0, ["3"]),
    "offload": (False, ["--zero_stage", "2"]),
    "lora_dim": (0, ["8"]),
    "lora_module_name": ("decoder.layers.", ["layers."]),
    "only_optimize_lora": (False, []),
    "lora_learning_rate": (5e-4, ["1e-3"]),
}
DEEPSPEED_CHAT = {
    "sft": {
        **FIT,
        "sft_only_data_path": ([], ["c.jsonl"]),
        "learning_rate": (1e-3, ["9.65e-6"]),
        "tensorboard_path": ("step1_tensorboard", ["board"]),
        "eot_token": ("<|endoftext|>", ["<|end|>"]),
        "print_loss": (False, []),
    },
    "reward": {
        **FIT,
        "num_padding_at_beginning": (1, ["0"]),
        "learning_rate": (5e-5, ["9.65e-6"]),
        "eval_interval": (0, ["50"]),
        "eval_iters": (100, ["10"]),
        "tensorboard_path": ("step2_tensorboard", ["board"]),
        # of its separate DPO step, whose learning rate was 1e-3 by default; here it is that of the reward model
        "beta": (0.1, ["0.3", "--objective", "dpo"]),
        "label_smoothing": (0.0, ["0.1", "--objective", "cdpo"]),
        "offload_reference_model": (False, []),
        "print_loss": (False, []),
    },
    "ppo": {
        **SHARED,
        "unsupervised_dataset_name": (None, ["wikitext"]),
        "unsupervised_dataset_config_name": (None, ["wikitext-103-raw-v1"]),
        "unsup_coef": (27.8, ["10"]),
        "actor_model_name_or_path": (REQUIRED, ["a"]),
        "critic_model_name_or_path": (REQUIRED, ["c"]),
        "num_padding_at_beginning": (1, ["0"]),
        "per_device_generation_batch_size": (16, ["4"]),
        "per_device_training_batch_size": (16, ["4"]),
        "generation_batches": (1, ["2"]),
        "ppo_epochs": (1, ["4"]),
        "max_prompt_seq_len": (256, ["512"]),
        "max_answer_seq_len": (256, ["512"]),
        "actor_learning_rate": (9.65e-6, ["5e-7"]),
        "critic_learning_rate": (5e-6, ["5e-7"]),
        "actor_weight_decay": (0.0, ["0.1"]),
        "critic_weight_decay": (0.0, ["0.1"]),
        "num_warmup_steps": (100, ["0"]),
        "seed": (None, ["7"]),
        "preprocessing_num_workers": (None, ["2"]),
        "enable_hybrid_engine": (False, []),
        "unpin_actor_parameters": (False, []),
        "release_inference_cache": (False, []),
        "inference_tp_size": (1, ["2"]),
        "tp_gather_partition_size": (8, ["4"]),
        "offload": (False, ["--actor_zero_stage", "2", "--critic_zero_stage", "2"]),
        "offload_reference_model": (False, ["--actor_zero_stage", "3"]),
        "offload_reward_model": (False, ["--critic_zero_stage", "3"]),
        "actor_zero_stage": (0, ["3"]),
        "critic_zero_stage": (0, ["3"]),
        "actor_gradient_checkpointing": (False, []),
        "critic_gradient_checkpointing": (False, []),
        "actor_dropout": (None, ["0.1"]),
        "critic_dropout": (None, ["0.1"]),
        "actor_lora_dim": (0, ["8"]),
        "actor_lora_module_name": ("decoder.layers.", ["layers."]),
        "critic_lora_dim": (0, ["8"]),
        "critic_lora_module_name": ("decoder.layers.", ["layers."]),
        "only_optimize_lora": (False, []),
        "actor_lora_learning_rate": (5e-4, ["1e-3"]),
        "critic_lora_learning_rate": (5e-4, ["1e-3"]),
        "enable_ema": (False, []),
        "enable_mixed_precision_lora": (False, []),
        "tensorboard_path": ("step3_tensorboard", ["board"]),
        "align_overflow": (False, []),
        "print_answers": (False, []),
        "print_answers_interval": (1, ["5"]),
        "enable_test_mode": (False, ["--test_stop_step", "2"]),
        "test_stop_step": (0, ["2", "--enable_test_mode"]),
    },
}
FLAGS = [(step, name, *entry) for step, flags in DEEPSPEED_CHAT.items() for name, entry in flags.items()]

# Defaults that differ from DeepSpeed-Chat's, on purpose.
DEVIATIONS = {
    "dtype": "bf16",  # fp16 needs loss scaling and skips steps
    "data_output_path": None,  # the cache of `datasets`, whose key is the content, instead of a folder by name
}
SFT_DEVIATIONS = {
    "learning_rate": 2e-5,  # 1e-3 is for LoRA, and ruins a pretrained model whose weights are all trained
}
PPO_DEVIATIONS = {
    "seed": 1234,  # a run is reproducible without asking for it
}

NOT_YET = {
    "sft": ("lora_dim", "lora_module_name", "only_optimize_lora", "lora_learning_rate"),
    "reward": ("lora_dim", "lora_module_name", "only_optimize_lora", "lora_learning_rate"),
    "ppo": (
        "actor_lora_dim", "actor_lora_module_name", "actor_lora_learning_rate", "critic_lora_dim",
        "critic_lora_module_name", "critic_lora_learning_rate", "only_optimize_lora",
        "enable_mixed_precision_lora",
        "inference_tp_size", "tp_gather_partition_size",
    ),
}  # fmt: skip
NOTED = {
    "sft": ("compute_fp32_loss", "deepspeed", "add_eot_token", "eot_token", "print_loss"),
    "reward": (
        "compute_fp32_loss", "deepspeed", "add_eot_token", "num_padding_at_beginning", "offload_reference_model",
        "print_loss",
    ),
    "ppo": (
        "compute_fp32_loss", "deepspeed", "add_eot_token", "num_padding_at_beginning", "enable_hybrid_engine",
        "release_inference_cache", "align_overflow",
    ),
}  # fmt: skip


def read(step: str, *words: str) -> dict:
    return flatten(parse(step, [*NEEDED[step], *words]))


def deviations_of(step: str) -> dict:
    return {**DEVIATIONS, **{"sft": SFT_DEVIATIONS, "ppo": PPO_DEVIATIONS}.get(step, {})}


def words_for(step: str, name: str) -> list[str]:
    return [f"--{name}", *DEEPSPEED_CHAT[step][name][1]]


# DeepSpeed-Chat's flags


@pytest.mark.parametrize(("step", "count"), [("sft", 32 + 2), ("reward", 32 + 4 + 2), ("ppo", 60 + 2)])
def test_the_table_above_is_complete(step, count):
    # Its main.py count (step 2: and what only its DPO has) plus --deepspeed and --deepspeed_config.
    assert len(DEEPSPEED_CHAT[step]) == count


@pytest.mark.parametrize(("step", "name", "default", "words"), FLAGS)
def test_every_flag_of_deepspeed_chat_is_accepted(step, name, default, words):
    if name in NOT_YET[step]:
        with pytest.raises(UserError, match=rf"--{name} .*not available yet"):
            read(step, f"--{name}", *words)
        return
    value = read(step, f"--{name}", *words)[name]
    if default is False:
        assert value is True
    elif isinstance(default, list):
        assert value == words
    else:
        assert str(value) == words[0] or float(value) == float(words[0])


@pytest.mark.parametrize(("step", "name", "default", "words"), FLAGS)
def test_defaults_are_those_of_deepspeed_chat(step, name, default, words):
    if default == REQUIRED or name in ("output_dir", "data_path"):  # ours requires both, see below
        return
    assert read(step)[name] == deviations_of(step).get(name, default)


@pytest.mark.parametrize("step", NEEDED)
def test_deviations_do_deviate(step):
    deviations = deviations_of(step)
    assert all(DEEPSPEED_CHAT[step][name][0] != value for name, value in deviations.items())


@pytest.mark.parametrize(("step", "name"), [(step, name) for step, names in NOT_YET.items() for name in names])
def test_flags_of_later_are_accepted_at_their_default(step, name):
    default = DEEPSPEED_CHAT[step][name][0]
    words = [] if default is None else [f"--{name}", str(default)]
    assert read(step, *words)[name] == default


@pytest.mark.parametrize(("step", "name"), [(step, name) for step, names in NOTED.items() for name in names])
def test_flags_that_change_nothing_are_noted(step, name):
    lines = notes(step, parse(step, [*NEEDED[step], *words_for(step, name)]))
    assert len(lines) == 1
    assert lines[0].startswith(f"--{name} changes nothing")


def test_aligned_overflow_needs_two_models_in_fp16():
    for how, effective in (
        ("--dtype fp16", True), ("--dtype bf16", False), ("--dtype fp16 --advantage_estimator remax", False),
    ):  # fmt: skip
        config = parse("ppo", [*NEEDED["ppo"], "--align_overflow", *how.split()])
        assert config.aligns_overflow is effective
        assert len(notes("ppo", config)) == (0 if effective else 1)
    assert not parse("ppo", [*NEEDED["ppo"], "--dtype", "fp16"]).aligns_overflow


@pytest.mark.parametrize("step", NEEDED)
def test_no_note_without_such_a_flag(step):
    assert notes(step, parse(step, NEEDED[step])) == []


def test_a_deepspeed_chat_script_parses():
    values = read(
        "ppo", "--data_path", "Dahoas/rm-static", "--data_split", "2,4,4", "--num_padding_at_beginning", "1",
        "--per_device_generation_batch_size", "4", "--per_device_training_batch_size", "4", "--generation_batches", "1",
        "--ppo_epochs", "1", "--max_answer_seq_len", "256", "--max_prompt_seq_len", "256", "--actor_learning_rate",
        "9.65e-6", "--critic_learning_rate", "5e-6", "--actor_weight_decay", "0.1", "--lr_scheduler_type", "cosine",
        "--gradient_accumulation_steps", "1", "--actor_dropout", "0.0", "--num_warmup_steps", "100", "--deepspeed",
        "--seed", "1234", "--actor_zero_stage", "3", "--critic_zero_stage", "3", "--enable_hybrid_engine",
    )  # fmt: skip
    assert values["actor_zero_stage"] == 3
    assert values["actor_dropout"] == 0.0


# Checks


@pytest.mark.parametrize("step", NEEDED)
def test_unknown_flags_are_refused(step):
    with pytest.raises(UserError, match="--no_such_flag"):
        read(step, "--no_such_flag", "1")


@pytest.mark.parametrize("step", NEEDED)
def test_abbreviated_flags_are_refused(step):
    with pytest.raises(UserError, match="--num_train_epo"):
        read(step, "--num_train_epo", "2")


@pytest.mark.parametrize(("step", "missing"), [
    ("sft", "--model_name_or_path"), ("reward", "--model_name_or_path"), ("ppo", "--actor_model_name_or_path"),
    ("ppo", "--critic_model_name_or_path"), ("sft", "--output_dir"), ("ppo", "--output_dir"),
    ("sft", "--data_path"), ("reward", "--data_path"), ("ppo", "--data_path"),
])  # fmt: skip
def test_required_flags_are_named(step, missing):
    words = list(NEEDED[step])
    position = words.index(missing)
    with pytest.raises(UserError, match=missing):
        parse(step, words[:position] + words[position + 2 :])


@pytest.mark.parametrize(
    ("step", "name", "value"),
    [
        ("sft", "per_device_train_batch_size", "0"),
        ("sft", "per_device_eval_batch_size", "-1"),
        ("sft", "gradient_accumulation_steps", "0"),
        ("sft", "max_seq_len", "0"),
        ("sft", "learning_rate", "0"),
        ("sft", "learning_rate", "nan"),
        ("sft", "learning_rate", "fast"),
        ("sft", "learning_rate", "1.01"),
        ("sft", "learning_rate", "1e6"),
        ("sft", "weight_decay", "1e6"),
        ("sft", "max_grad_norm", "1e-7"),
        ("sft", "adam_beta1", "-0.1"),
        ("sft", "adam_beta1", "0.99"),
        ("sft", "adam_beta1", "0.9999999"),
        ("sft", "adam_beta2", "0"),
        ("sft", "adam_beta2", "0.8"),
        ("sft", "adam_beta2", "1"),
        ("sft", "adam_beta2", "0.9999999"),
        ("sft", "adam_epsilon", "0"),
        ("sft", "adam_epsilon", "1e-300"),
        ("sft", "adam_epsilon", "1e-19"),
        ("sft", "adam_epsilon", "2"),
        ("sft", "num_train_epochs", "0"),
        ("sft", "num_train_epochs", "1.5"),
        ("sft", "weight_decay", "-0.1"),
        ("sft", "num_warmup_steps", "-1"),
        ("sft", "max_grad_norm", "-1"),
        ("sft", "eval_interval", "-1"),
        ("sft", "eval_iters", "-1"),
        ("sft", "dropout", "1"),
        ("sft", "eval_fraction", "1"),
        ("sft", "eval_fraction", "-0.1"),
        ("sft", "zero_stage", "4"),
        ("sft", "dtype", "int8"),
        ("sft", "lr_scheduler_type", "step"),
        ("sft", "truncation", "right"),
        ("sft", "seed", "-1"),
        ("sft", "data_split", "2,4"),
        ("sft", "data_split", "0,0,0"),
        ("sft", "data_split", "1,-1,1"),
        ("sft", "data_split", "a,b,c"),
        ("sft", "data_split", "inf,1,1"),
        ("sft", "data_split_seed", "-1"),
        ("sft", "preprocessing_num_workers", "0"),
        ("reward", "max_seq_len", "-5"),
        ("reward", "objective", "kto"),
        ("reward", "center_rewards_coef", "-0.1"),
        ("reward", "center_rewards_coef", "nan"),
        ("reward", "beta", "0"),
        ("reward", "beta", "-0.1"),
        ("reward", "beta", "1e31"),
        ("sft", "learning_rate", "1e-31"),
        ("ppo", "reward_clip", "1e308"),
        ("ppo", "clip_eps_high", "1e308"),
        ("sft", "seed", str(2**63)),
        ("sft", "max_seq_len", str(2**31)),
        ("sft", "preprocessing_num_workers", "1025"),
        ("ppo", "reward_workers", "1025"),
        ("ppo", "reward_timeout", "1e7"),
        ("ppo", "remote_reward_timeout", "1e7"),
        ("sft", "collective_timeout", "0.9"),
        ("sft", "collective_timeout", "1e9"),
        ("sft", "output_dir", "a" * 256),
        ("sft", "data_path", "b/" * 1751),
        ("sft", "data_path", "line\nbreak"),
        ("sft", "model_name_or_path", "\ud800"),
        ("reward", "beta", "inf"),
        ("reward", "label_smoothing", "-0.1"),
        ("reward", "nll_coef", "0"),
        ("reward", "nll_coef", "-1"),
        ("ppo", "temperature", "0"),
        ("ppo", "top_p", "0"),
        ("ppo", "top_p", "1.1"),
        ("ppo", "top_k", "-1"),
        ("ppo", "min_p", "1"),
        ("ppo", "min_p", "-0.1"),
        ("ppo", "repetition_penalty", "0"),
        ("ppo", "n_samples_per_prompt", "0"),
        ("ppo", "rollout_rows", "-1"),
        ("ppo", "rollout_engine", "fast"),
        ("ppo", "old_logprobs", "never"),
        ("ppo", "min_answer_seq_len", "-1"),
        ("ppo", "min_answer_seq_len", "257"),
        ("ppo", "stop_token_ids", "-1"),
        ("ppo", "stop_token_ids", "x"),
        ("ppo", "stop_strings", ""),
        ("ppo", "micro_batch_tokens", "-1"),
        ("ppo", "gamma", "1.1"),
        ("ppo", "gae_lambda", "-0.1"),
        ("ppo", "clip_eps", "0"),
        ("ppo", "value_clip_eps", "-1"),
        ("ppo", "kl_coef", "-0.1"),
        ("ppo", "reward_clip", "-1"),
        ("ppo", "missing_eos_penalty", "-1"),
        ("ppo", "entropy_coef", "-1"),
        ("ppo", "ppo_epochs", "0"),
        ("ppo", "generation_batches", "0"),
        ("ppo", "per_device_generation_batch_size", "0"),
        ("ppo", "per_device_training_batch_size", "0"),
        ("ppo", "max_prompt_seq_len", "0"),
        ("ppo", "max_answer_seq_len", "0"),
        ("ppo", "actor_learning_rate", "0"),
        ("ppo", "critic_learning_rate", "-1"),
        ("ppo", "actor_learning_rate", "1e6"),
        ("ppo", "critic_learning_rate", "1.5"),
        ("ppo", "actor_weight_decay", "1e6"),
        ("ppo", "critic_weight_decay", "1e6"),
        ("ppo", "max_grad_norm", "1e-300"),
        ("ppo", "adam_epsilon", "1e-300"),
        ("reward", "adam_beta2", "0"),
        ("reward", "learning_rate", "1e6"),
        ("ppo", "actor_dropout", "1.0"),
        ("ppo", "critic_dropout", "-0.5"),
        ("ppo", "print_answers_interval", "0"),
        ("ppo", "actor_zero_stage", "5"),
        ("ppo", "test_stop_step", "3"),
        ("ppo", "test_stop_step", "-1"),
    ],
)
def test_values_out_of_range_are_refused_by_name(step, name, value):
    with pytest.raises(UserError, match=f"--{name}"):
        read(step, f"--{name}", value)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--offload"], "--actor_zero_stage and --critic_zero_stage"),
        (["--offload", "--actor_zero_stage", "3"], "--actor_zero_stage and --critic_zero_stage"),
        (["--offload_reference_model"], "--actor_zero_stage 3"),
        (["--offload_reference_model", "--critic_zero_stage", "3"], "--actor_zero_stage 3"),
        (["--offload_reward_model", "--actor_zero_stage", "3"], "--critic_zero_stage 3"),
        (["--enable_test_mode"], "--test_stop_step"),
        (["--sleep_in_rollout", "--actor_zero_stage", "3"], "--critic_zero_stage 3"),
        (["--sleep_in_rollout", "--actor_zero_stage", "3", "--critic_zero_stage", "3", "--offload"], "no --offload"),
    ],
)
def test_flags_without_effect_under_the_others_are_refused(words, named):
    with pytest.raises(UserError, match=named):
        read("ppo", *words)


DIRECT = ["dpo", "cdpo", "ipo", "robust_dpo", "hinge", "dpo_nll"]
SMOOTHED = ["cdpo", "robust_dpo"]


def objective_words(objective: str) -> list[str]:
    """Words under which the objective is complete."""
    return ["--objective", objective, *(["--label_smoothing", "0.1"] if objective in SMOOTHED else [])]


@pytest.mark.parametrize(
    ("words", "known_to"),
    [
        (["--no_use_margin"], ["reward"]),
        (["--center_rewards_coef", "0.01"], ["reward"]),
        (["--beta", "0.3"], DIRECT),
        (["--label_smoothing", "0.2"], SMOOTHED),
        (["--nll_coef", "1.0"], ["dpo_nll"]),
    ],
)
@pytest.mark.parametrize("objective", ["reward", *DIRECT])
def test_flags_of_other_objectives_are_refused(objective, words, known_to):
    name = words[0].replace("--no_", "--")
    given = [*objective_words(objective), *words]
    if objective in known_to:
        assert read("reward", *given)["objective"] == objective
        return
    with pytest.raises(UserError, match=f"{name} .*no effect under --objective {objective}.*{known_to[0]}"):
        read("reward", *given)


@pytest.mark.parametrize("objective", SMOOTHED)
@pytest.mark.parametrize("share", ["0", "0.5", "0.9"])
def test_wrongly_labelled_pairs_are_fewer_than_half_and_more_than_none(objective, share):
    with pytest.raises(UserError, match=f"--label_smoothing .*0.5.*{objective}"):
        read("reward", "--objective", objective, "--label_smoothing", share)


def test_the_dpo_step_trains_the_policy_unless_asked_otherwise():
    """Every flag of DeepSpeed-Chat's DPO step, at the default of ours."""
    values = flatten(parse("dpo", NEEDED["reward"]))
    assert values == {**read("reward"), "objective": "dpo"}
    words = "--beta 0.2 --num_train_epochs 1 --offload_reference_model --print_loss --deepspeed --zero_stage 3".split()
    assert flatten(parse("dpo", [*NEEDED["reward"], *words]))["beta"] == 0.2
    assert flatten(parse("dpo", [*NEEDED["reward"], "--objective", "ipo"]))["objective"] == "ipo"


def test_a_reward_model_is_trained_unless_asked_otherwise():
    values = read("reward")
    assert values["objective"] == "reward"
    assert values["use_margin"] is True
    assert values["center_rewards_coef"] == 0.0
    assert values["nll_coef"] == 0.2


@pytest.mark.parametrize("step", ["sft", "reward"])
def test_offload_needs_a_zero_stage(step):
    with pytest.raises(UserError, match="--zero_stage"):
        read(step, "--offload")


def test_switches_that_are_on_can_be_turned_off():
    assert read("ppo")["whiten_advantages"] is True
    assert read("ppo", "--whiten_advantages", "False")["whiten_advantages"] is False
    assert read("ppo", "--no_whiten_advantages")["whiten_advantages"] is False


def test_a_tilde_in_an_output_folder_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    config = parse("sft", ["--model_name_or_path", "m", "--data_path", "d", "--output_dir=~/out"])
    assert config.run.folder == "/home/ada/out"


def test_configurations_are_frozen():
    config = parse("ppo", NEEDED["ppo"])
    with pytest.raises(AttributeError):
        config.ppo.gamma = 0.5


@pytest.mark.parametrize("step", NEEDED)
def test_help_lists_every_flag(step, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(step, ["--help"])
    assert leaving.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"--{name}" in printed for name in read(step))


def test_help_of_a_switch_off_does_not_say_what_the_switch_on_does(capsys):
    with pytest.raises(SystemExit):
        parse("ppo", ["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "--no_save_best, --no-save-best turn --save_best off data:" in printed
    assert "the reference stays it (required)" in printed
