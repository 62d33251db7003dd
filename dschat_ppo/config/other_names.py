"""Names that other trainers and other steps give to the usual settings, for the message about an unknown flag. Names of
TRL 1.x, OpenRLHF 0.8 to 0.11 and peft; docs/from-trl.md and docs/from-openrlhf.md have all of them."""

from __future__ import annotations

from collections.abc import Collection

ROLES = ("actor_", "critic_")  # whose flags in step 3 are those of steps 1 and 2 with a prefix

# Our flags, of which a step may have only some -> their names for them, with _ for - and .
THEIR_NAMES = {
    # models
    "model_name_or_path": "pretrain",
    "actor_model_name_or_path": "sft_model_path",
    "reward_model_name_or_path": "reward_pretrain",
    "critic_model_name_or_path reward_model_name_or_path": "reward_model_path",
    "critic_model_name_or_path": "critic_pretrain",
    "ref_model_name_or_path": "ref_pretrain",
    # LoRA
    "lora_dim": "lora_r lora_rank use_peft",
    "lora_module_name": "lora_target lora_target_modules target_modules",
    # data
    "data_path": (
        "dataset dataset_name prompt_data prompt_dataset dataset_probs prompt_data_probs prompt_probs "
        "dataset_config dataset_train_split dataset_split prompt_split"
    ),
    "eval_data_path": "eval_dataset",
    "prompt_column": "prompt_key",
    "max_seq_len max_prompt_seq_len max_answer_seq_len": "max_length max_len",
    "train_on_prompt": "completion_only_loss assistant_only_loss pretrain_mode pretrain_mode_enable",
    "packing": "packing_samples padding_free",
    # batches and length of the run
    "per_device_train_batch_size per_device_training_batch_size": (
        "micro_batch_size train_micro_batch_size micro_train_batch_size"
    ),
    "per_device_training_batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "train_batch_size num_mini_batches",
    "per_device_generation_batch_size generation_batches": "rollout_batch_size generation_batch_size",
    "generation_batches": "steps_per_generation",
    "micro_batch_tokens": (
        "rollout_micro_batch_size micro_rollout_batch_size local_rollout_forward_batch_size max_tokens_per_gpu "
        "train_max_tokens_per_gpu rollout_max_tokens_per_gpu"
    ),
    "ppo_epochs num_train_epochs": "max_epochs",
    "num_train_epochs": "num_episodes",
    "max_steps": "total_episodes",
    "ppo_epochs": "num_iterations num_ppo_epochs",
    # optimizer and schedule
    "learning_rate": "adam_lr",
    "adam_beta1 adam_beta2": "adam_betas",
    "max_grad_norm": "max_norm",
    "lr_scheduler_type": "lr_scheduler",
    "warmup_ratio": "lr_warmup_ratio",
    "num_warmup_steps": "warmup_steps",
    # generation
    "n_samples_per_prompt": "num_generations",
    "max_answer_seq_len": "max_completion_length max_new_tokens response_length generate_max_len",
    "max_prompt_seq_len": "max_prompt_length prompt_max_len",
    "eval_samples": "num_generations_eval eval_n_samples_per_prompt",
    "stop_strings": "stop_token",
    "stop_token_ids": "stop_token_id",
    # algorithm
    "objective policy_loss loss_aggregation": "loss_type",
    "policy_loss": "policy_loss_type importance_sampling_level",
    "clip_eps": "epsilon eps_clip cliprange",
    "clip_eps_high": "epsilon_high",
    "dual_clip": "delta",
    "value_clip_eps": "cliprange_value value_clip",
    "gae_lambda": "lam lambd",
    "normalize_group_std": "scale_rewards",
    "kl_loss_coef kl_coef": "beta",
    "kl_coef": "init_kl_coef kl_init_coef",
    "kl_loss_coef": "kl_use_loss use_kl_loss",
    "mask_truncated_answers": "mask_truncated_completions",
    "ref_sync_interval": "sync_ref_model ref_model_sync_steps",
    "importance_correction": "vllm_importance_sampling_correction enable_vllm_is_correction is_correction_level",
    "importance_cap": (
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_is_truncated_threshold "
        "is_correction_threshold"
    ),
    "dynamic_sampling": "dynamic_filtering dynamic_filtering_enable",
    "critic_warmup_rollouts": "freezing_steps freezing_actor_steps",
    "unsup_coef": "ptx_coef",
    "ema_decay": "ema_beta",
    # rewards
    "reward_function": "reward_funcs reward_weights agent_func_path",
    "remote_reward_url reward_function": "remote_url remote_rm_url",
    "reward_clip": "clip_range reward_clip_range",
    "normalize_rewards": "normalize_enable normalize_reward",
    "missing_eos_penalty": "stop_properly_penalty_coef",
    # preferences
    "objective": "ipo ipo_enable",
    "nll_coef": "rpo_alpha nll_loss_coef",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "use_margin": "margin_loss margin_loss_enable",
    # memory and devices
    "gradient_checkpointing": "gradient_checkpointing_enable",
    "offload_optimizer": "adam_offload",
    "offload_reference_model": "ref_offload",
    "offload_reward_model": "reward_offload",
    "offload_reference_model offload_reward_model": "ref_reward_offload",
    "attn_implementation": "flash_attn",
    "sequence_parallel_size": "ring_attn_size",
    # checkpoints, evaluation, log
    "output_dir": "save_path ckpt_path",
    "save_total_limit": "max_num max_ckpt_num",
    "resume": "resume_from_checkpoint load_enable load_checkpoint",
    "metric_for_best": "metric_for_best_model save_best",
    "eval_interval": "eval_steps",
    "report_to": "use_wandb wandb_key use_tensorboard",
    "project": "wandb_project",
    "run_name": "wandb_run_name",
    # our other steps
    "save_best": "metric_for_best",
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
