"""The flags of DeepSpeed-Chat's training steps, with their defaults there."""

# Flags of DeepSpeed-Chat: name -> (default, arguments that a script may give it). Switches take none.
REQUIRED = "required"
SHARED = {
    "data_path": (["Dahoas/rm-static"], ["a.jsonl", "b.jsonl"]), "data_split": ("2,4,4", ["1,0,0"]),
    "data_output_path": ("a folder under the temp dir", ["cache"]),
    "lr_scheduler_type": ("cosine", ["constant_with_warmup"]), "num_train_epochs": (1, ["3"]),
    "gradient_accumulation_steps": (1, ["2"]), "output_dir": (None, ["out"]), "local_rank": (-1, ["0"]),
    "dtype": ("fp16", ["fp16"]), "compute_fp32_loss": (False, []), "enable_tensorboard": (False, []),
    "add_eot_token": (False, []), "deepspeed": (False, []), "deepspeed_config": (None, ["ds.json"]),
}  # fmt: skip
FIT = {
    **SHARED, "model_name_or_path": (REQUIRED, ["m"]),
    "per_device_train_batch_size": (16, ["4"]), "per_device_eval_batch_size": (16, ["4"]),
    "max_seq_len": (512, ["1024"]), "weight_decay": (0.0, ["0.1"]), "num_warmup_steps": (0, ["10"]),
    "seed": (1234, ["7"]), "gradient_checkpointing": (False, []), "dropout": (None, ["0.1"]), "zero_stage": (0, ["3"]),
    "offload": (False, ["--zero_stage", "2"]), "lora_dim": (0, ["8"]),
    "lora_module_name": ("decoder.layers.", ["layers."]), "only_optimize_lora": (False, ["--lora_dim", "8"]),
    "lora_learning_rate": (5e-4, ["1e-3"]),
}  # fmt: skip
DEEPSPEED_CHAT = {
    "sft": {
        **FIT, "sft_only_data_path": ([], ["c.jsonl"]),
        "learning_rate": (1e-3, ["9.65e-6"]), "tensorboard_path": ("step1_tensorboard", ["board"]),
        "eot_token": ("<|endoftext|>", ["<|end|>"]), "print_loss": (False, []),
    },
    "reward": {
        **FIT, "num_padding_at_beginning": (1, ["0"]),
        "learning_rate": (5e-5, ["9.65e-6"]), "eval_interval": (0, ["50"]), "eval_iters": (100, ["10"]),
        "tensorboard_path": ("step2_tensorboard", ["board"]),
        # flags of its separate DPO step, whose default learning rate was 1e-3; here it is that of the reward model
        "beta": (0.1, ["0.3", "--objective", "dpo"]), "label_smoothing": (0.0, ["0.1", "--objective", "cdpo"]),
        "offload_reference_model": (False, []), "print_loss": (False, []),
    },
    "ppo": {
        **SHARED, "unsupervised_dataset_name": (None, ["wikitext"]),
        "unsupervised_dataset_config_name": (None, ["wikitext-103-raw-v1"]), "unsup_coef": (27.8, ["10"]),
        "actor_model_name_or_path": (REQUIRED, ["a"]), "critic_model_name_or_path": (REQUIRED, ["c"]),
        "num_padding_at_beginning": (1, ["0"]), "per_device_generation_batch_size": (16, ["4"]),
        "per_device_training_batch_size": (16, ["4"]), "generation_batches": (1, ["2"]), "ppo_epochs": (1, ["4"]),
        "max_prompt_seq_len": (256, ["512"]), "max_answer_seq_len": (256, ["512"]),
        "actor_learning_rate": (9.65e-6, ["5e-7"]), "critic_learning_rate": (5e-6, ["5e-7"]),
        "actor_weight_decay": (0.0, ["0.1"]), "critic_weight_decay": (0.0, ["0.1"]), "num_warmup_steps": (100, ["0"]),
        "seed": (None, ["7"]), "preprocessing_num_workers": (None, ["2"]), "enable_hybrid_engine": (False, []),
        "unpin_actor_parameters": (False, []), "release_inference_cache": (False, []), "inference_tp_size": (1, ["2"]),
        "tp_gather_partition_size": (8, ["4"]),
        "offload": (False, ["--actor_zero_stage", "2", "--critic_zero_stage", "2"]),
        "offload_reference_model": (False, ["--actor_zero_stage", "3"]),
        "offload_reward_model": (False, ["--critic_zero_stage", "3"]), "actor_zero_stage": (0, ["3"]),
        "critic_zero_stage": (0, ["3"]), "actor_gradient_checkpointing": (False, []),
        "critic_gradient_checkpointing": (False, []), "actor_dropout": (None, ["0.1"]),
        "critic_dropout": (None, ["0.1"]), "actor_lora_dim": (0, ["8"]),
        "actor_lora_module_name": ("decoder.layers.", ["layers."]), "critic_lora_dim": (0, ["8"]),
        "critic_lora_module_name": ("decoder.layers.", ["layers."]),
        "only_optimize_lora": (False, ["--critic_lora_dim", "8"]), "actor_lora_learning_rate": (5e-4, ["1e-3"]),
        "critic_lora_learning_rate": (5e-4, ["1e-3"]), "enable_ema": (False, []),
        "enable_mixed_precision_lora": (
            False,
            ["--actor_zero_stage", "3", "--actor_lora_dim", "8", "--only_optimize_lora", "--dtype", "fp16"],
        ),
        "tensorboard_path": ("step3_tensorboard", ["board"]), "align_overflow": (False, []),
        "print_answers": (False, []), "print_answers_interval": (1, ["5"]),
        "enable_test_mode": (False, ["--test_stop_step", "2"]), "test_stop_step": (0, ["2", "--enable_test_mode"]),
    },
}  # fmt: skip
