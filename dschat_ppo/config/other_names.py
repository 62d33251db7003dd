"""Names that other trainers and other steps give to the usual settings, for the message about an unknown flag. Names of
TRL 1.x, OpenRLHF 0.8 to 0.11 and peft; docs/from-trl.md and docs/from-openrlhf.md have all of them."""

from __future__ import annotations

from collections.abc import Collection

ROLES = ("actor_", "critic_")  # whose flags in step 3 are those of steps 1 and 2 with a prefix

# Our flags, of which a step may have only some -> their names for them, with _ for - and .
THEIR_NAMES = {
    "model_name_or_path": "pretrain",
    "critic_model_name_or_path reward_model_name_or_path": "reward_model_path",
    "lora_dim": "lora_r lora_rank use_peft",
    "lora_module_name": "lora_target lora_target_modules target_modules",
    "data_path": "dataset dataset_name prompt_data prompt_dataset dataset_train_split dataset_split",
    "eval_data_path": "eval_dataset",
    "max_seq_len max_prompt_seq_len max_answer_seq_len": "max_length max_len",
    "packing": "packing_samples padding_free",
    "per_device_train_batch_size per_device_training_batch_size": "micro_train_batch_size micro_batch_size",
    "per_device_training_batch_size": "per_device_train_batch_size",
    "per_device_generation_batch_size generation_batches": "rollout_batch_size generation_batch_size",
    "gradient_accumulation_steps": "train_batch_size num_mini_batches",
    "ppo_epochs num_train_epochs": "max_epochs",
    "num_train_epochs": "num_episodes",
    "ppo_epochs": "num_iterations num_ppo_epochs",
    "learning_rate": "adam_lr",
    "warmup_ratio": "lr_warmup_ratio",
    "num_warmup_steps": "warmup_steps",
    "n_samples_per_prompt": "num_generations",
    "max_answer_seq_len": "max_completion_length max_new_tokens response_length generate_max_len",
    "max_prompt_seq_len": "max_prompt_length prompt_max_len",
    "objective policy_loss loss_aggregation": "loss_type",
    "clip_eps": "epsilon eps_clip cliprange",
    "clip_eps_high": "epsilon_high",
    "value_clip_eps": "cliprange_value value_clip",
    "gae_lambda": "lam lambd",
    "normalize_group_std": "scale_rewards",
    "kl_loss_coef kl_coef": "beta",
    "kl_coef": "init_kl_coef kl_init_coef",
    "reward_function": "reward_funcs agent_func_path",
    "remote_reward_url reward_function": "remote_url remote_rm_url",
    "output_dir": "save_path ckpt_path",
    "resume": "resume_from_checkpoint load_checkpoint",
    "eval_interval": "eval_steps",
    "report_to": "use_wandb",
    # whose last words mean something else
    "offload_reference_model": "ref_offload",
    "offload_reward_model": "reward_offload",
    "micro_batch_tokens": "rollout_micro_batch_size",
    "eval_samples": "num_generations_eval eval_n_samples_per_prompt",
    # our other steps
    "max_prompt_seq_len max_answer_seq_len": "max_seq_len",
    "max_seq_len": "max_prompt_seq_len max_answer_seq_len",
    "eval_batch_size": "per_device_eval_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
}
OUR_NAMES = {name: ours for ours, theirs in THEIR_NAMES.items() for name in theirs.split()}


def flags_for(given: str, known: Collection[str]) -> list[str]:
    """The flags among `known`, those of a step, for a setting of another step or trainer; [] if none is known. `given`
    has _ for -; OpenRLHF's names have dots, as in "rollout.n_samples_per_prompt"."""
    parts = given.split(".")
    for first in range(len(parts)):
        name = "_".join(parts[first:])
        if name in known:
            return [name]
        role = next((role for role in ROLES if name.startswith(role)), "")
        bare = name.removeprefix(role)
        meant = OUR_NAMES.get(name, OUR_NAMES.get(bare, bare)).split()
        found = [whole for ours in meant for whole in (ours, *(role + ours for role in ROLES)) if whole in known]
        if found:
            return [flag for flag in found if role and flag.startswith(role)] or found
    return []
