"""Flags that have no effect with the others: a note names each, with the reason; and none about flags that have one."""

import pytest
from command_lines import NEEDED, noted, read

LORA = "--actor_lora_dim 4 --critic_lora_dim 4 --only_optimize_lora"
SHARED = f"--share_base {LORA}"
STAGES = "--actor_zero_stage 3 --critic_zero_stage 2"
OFFLOAD = "--offload_reference_model --offload_reward_model --actor_zero_stage 3 --critic_zero_stage 3"
GRPO = "--advantage_estimator grpo --n_samples_per_prompt 2"
ALONE = "--lora_dim 8 --only_optimize_lora"
VALIDATE = "--validate_only --eval_data_path e"
CASES = [  # step, what is given, the flags without effect
    # trackers
    ("sft", "--report_to wandb --run_name a --project b", ""), ("sft", "--report_to trackio", ""),
    ("reward", "--report_to tensorboard --run_name a", "run_name"),
    ("ppo", "--project b --enable_tensorboard", "project"),
    ("ppo", "--report_to none --enable_tensorboard", "enable_tensorboard"),
    # schedule, length and reference
    ("sft", "--warmup_ratio 0.1", ""), ("sft", "--warmup_ratio 0 --num_warmup_steps 5", ""),
    ("ppo", "--warmup_ratio 0.1 --num_warmup_steps 100", ""),  # its default, as a resolved configuration has it
    ("ppo", "--ref_model_name_or_path r --ref_sync_interval 2 --ref_sync_mixup 0.6", ""),
    *[(step, *case) for step in NEEDED for case in (
        ("--max_steps 9 --num_train_epochs 2", "num_train_epochs"), ("--max_steps 9 --num_train_epochs 1", ""),
        ("--lr_scheduler_type constant --num_warmup_steps 7", "num_warmup_steps"),
        ("--lr_scheduler_type constant", ""), ("--lr_scheduler_type constant --num_warmup_steps 0", ""),
    )],
    # LoRA
    ("sft", "--lora_module_name decoder.layers.", "lora_module_name"),
    ("sft", "--lora_learning_rate 1e-3", "lora_learning_rate"), ("dpo", "--lora_alpha 16", "lora_alpha"),
    ("reward", "--lora_merge", "lora_merge"), ("sft", "--lora_dim 4 --lora_merge", "lora_merge"),
    ("ppo", "--actor_lora_module_name layers.", "actor_lora_module_name"),
    ("ppo", "--actor_lora_dim 8 --critic_lora_learning_rate 1e-3", "critic_lora_learning_rate"),
    ("ppo", f"{GRPO} --critic_lora_dim 8 --critic_lora_learning_rate 1e-3",
     "critic_lora_dim critic_lora_learning_rate"),
    ("sft", f"--learning_rate 2e-3 --lora_learning_rate 1e-3 {ALONE}", "learning_rate"),
    ("dpo", f"--learning_rate 2e-3 --lora_learning_rate 5e-4 {ALONE}", "learning_rate"),
    ("sft", f"--learning_rate 2e-3 {ALONE}", ""), ("sft", "--learning_rate 2e-3 --lora_dim 8", ""),
    ("reward", f"--learning_rate 2e-3 {ALONE}", ""),  # of the score head
    ("ppo", "--actor_learning_rate 1e-3 --actor_lora_learning_rate 2e-3 --actor_lora_dim 8 --only_optimize_lora",
     "actor_learning_rate"),
    ("ppo", "--actor_learning_rate 1e-3 --critic_lora_dim 8 --only_optimize_lora", ""),
    # memory
    ("ppo", "--inference_tp_size 2 --tp_gather_partition_size 4", ""),
    ("ppo", "--tp_gather_partition_size 4", "tp_gather_partition_size"),
    ("ppo", OFFLOAD, ""), ("ppo", f"{OFFLOAD} --actor_lora_dim 4", ""),
    ("ppo", f"{OFFLOAD} {LORA}", "offload_reference_model"),
    ("ppo", f"{OFFLOAD} {SHARED}", "offload_reference_model offload_reward_model"),
    ("ppo", "--align_overflow --dtype fp16", ""), ("ppo", "--align_overflow", "align_overflow"),
    ("ppo", "--align_overflow --dtype fp16 --advantage_estimator remax", "align_overflow"),
    # what follows training
    *[(step, f"--report_to tensorboard --profile 2 --stop_on_health error {VALIDATE}",
       "report_to profile stop_on_health") for step in NEEDED],
    ("ppo", f"{VALIDATE} --eval_interval 5", "eval_interval"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "words", "names"), CASES)
def test_a_note_names_each_flag_without_effect(step, words, names):
    lines = noted(step, *words.split())
    assert {line.split(" has no effect: ")[0] for line in lines} == {f"--{name}" for name in names.split()}


@pytest.mark.parametrize("words", [
    f"--sleep_in_rollout --offload {STAGES}", f"--offload_optimizer {STAGES}",
    f"--zero_hpz_partition_size 2 {STAGES}", f"--inference_tp_size 2 {STAGES} --actor_lora_dim 8",
    f"--enable_mixed_precision_lora --actor_lora_dim 8 --only_optimize_lora --dtype fp16 {STAGES}",
    f"{SHARED} --actor_zero_stage 1 --critic_zero_stage 2", f"{SHARED} --actor_dropout 0",
    f"--share_base --actor_lora_dim 4 --only_optimize_lora {GRPO} --actor_zero_stage 3",
    "--kl_estimator full --old_logprobs recompute", "--process_reward min --normalize_rewards running",
    "--actor_lora_dim 8 --only_optimize_lora --load_in_4bit --critic_zero_stage 3",
    f"{GRPO} --critic_lora_dim 8 --actor_lora_dim 8 --only_optimize_lora --load_in_4bit --critic_zero_stage 3",
])  # fmt: skip
def test_flags_that_fit_together_are_accepted(words):
    read("ppo", *words.split())
