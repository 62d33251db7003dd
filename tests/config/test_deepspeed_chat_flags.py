"""Scripts of DeepSpeed-Chat keep working: its flags, their defaults, and those without effect."""

import pytest
from command_lines import NEEDED, read

from dschat_ppo.config.cli import notes, parse

# Flags of DeepSpeed-Chat: name -> (default, arguments that a script may give it). Switches take none.
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
    "only_optimize_lora": (False, ["--lora_dim", "8"]),
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
        # flags of its separate DPO step, whose default learning rate was 1e-3; here it is that of the reward model
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
        "only_optimize_lora": (False, ["--critic_lora_dim", "8"]),
        "actor_lora_learning_rate": (5e-4, ["1e-3"]),
        "critic_lora_learning_rate": (5e-4, ["1e-3"]),
        "enable_ema": (False, []),
        "enable_mixed_precision_lora": (
            False,
            ["--actor_zero_stage", "3", "--actor_lora_dim", "8", "--only_optimize_lora", "--dtype", "fp16"],
        ),
        "tensorboard_path": ("step3_tensorboard", ["board"]),
        "align_overflow": (False, []),
        "print_answers": (False, []),
        "print_answers_interval": (1, ["5"]),
        "enable_test_mode": (False, ["--test_stop_step", "2"]),
        "test_stop_step": (0, ["2", "--enable_test_mode"]),
    },
}
FLAGS = [(step, name, *entry) for step, flags in DEEPSPEED_CHAT.items() for name, entry in flags.items()]

# Defaults that differ from DeepSpeed-Chat on purpose.
DEVIATIONS = {
    "dtype": "bf16",  # fp16 needs loss scaling and skips steps
    "data_output_path": None,  # the cache of `datasets`, whose key is the content, instead of a folder by name
}
FIT_DEVIATIONS = {
    "lora_module_name": None,  # all linear layers of the blocks, under any name; decoder.layers. is OPT's
}
SFT_DEVIATIONS = {
    **FIT_DEVIATIONS,
    "learning_rate": 2e-5,  # 1e-3 is meant for LoRA, and ruins a pretrained model if all weights are trained
}
PAIR_DEVIATIONS = {
    **FIT_DEVIATIONS,
    "beta": None,  # the default depends on the objective; 0.1 for dpo
}
PPO_DEVIATIONS = {
    "seed": 1234,  # runs are reproducible by default
    "actor_lora_module_name": None,
    "critic_lora_module_name": None,
}

NO_EFFECT = {
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


def deviations_of(step: str) -> dict:
    return {**DEVIATIONS, **{"sft": SFT_DEVIATIONS, "reward": PAIR_DEVIATIONS, "ppo": PPO_DEVIATIONS}.get(step, {})}


def words_for(step: str, name: str) -> list[str]:
    return [f"--{name}", *DEEPSPEED_CHAT[step][name][1]]


@pytest.mark.parametrize(("step", "count"), [("sft", 32 + 2), ("reward", 32 + 4 + 2), ("ppo", 60 + 2)])
def test_the_table_lists_every_flag_of_deepspeed_chat(step, count):
    # Flags of its main.py (step 2: plus those only in its DPO step), plus --deepspeed and --deepspeed_config.
    assert len(DEEPSPEED_CHAT[step]) == count


@pytest.mark.parametrize(("step", "name", "default", "words"), FLAGS)
def test_every_flag_of_deepspeed_chat_is_accepted(step, name, default, words):
    value = read(step, f"--{name}", *words)[name]
    if default is False:
        assert value is True
    elif isinstance(default, list):
        assert value == words
    else:
        assert str(value) == words[0] or float(value) == float(words[0])


@pytest.mark.parametrize(("step", "name", "default", "words"), FLAGS)
def test_defaults_are_those_of_deepspeed_chat(step, name, default, words):
    if default == REQUIRED or name in ("output_dir", "data_path"):  # this project requires both
        return
    assert read(step)[name] == deviations_of(step).get(name, default)


@pytest.mark.parametrize("step", NEEDED)
def test_listed_deviations_differ_from_deepspeed_chat(step):
    deviations = deviations_of(step)
    assert all(DEEPSPEED_CHAT[step][name][0] != value for name, value in deviations.items())


@pytest.mark.parametrize(("step", "name"), [(step, name) for step, names in NO_EFFECT.items() for name in names])
def test_flags_without_effect_print_a_note(step, name):
    lines = notes(step, parse(step, [*NEEDED[step], *words_for(step, name)]))
    assert len(lines) == 1
    assert lines[0].startswith(f"--{name} has no effect: ")


@pytest.mark.parametrize("step", NEEDED)
def test_no_note_without_a_flag_that_has_no_effect(step):
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
