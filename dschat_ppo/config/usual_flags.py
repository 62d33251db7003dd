"""The flags that `--help` shows first, by step: those that most runs set. Each has a text of one line with its unit."""

from __future__ import annotations

TITLES = {  # step -> what it does, and the path of its program
    "sft": ("Step 1: supervised fine-tuning of a language model on answers", "training/step1_sft/main.py"),
    "reward": (
        "Step 2: train a reward model, or the policy itself, on preference pairs",
        "training/step2_reward/main.py",
    ),
    "dpo": (
        "Step 2 without a reward model: train the policy itself on preference pairs",
        "training/step2_dpo/main.py",
    ),
    "ppo": ("Step 3: train a policy with rewards, by PPO, GRPO and related methods", "training/step3_ppo/main.py"),
}

Usual = dict[str, dict[str, str]]  # heading -> flag -> text, without the default

_STEPS_1_AND_2: Usual = {
    "length": {
        "num_train_epochs": "passes over the training rows",
        "max_steps": "optimizer steps; 0 = use epochs",
    },
    "updates": {
        "per_device_train_batch_size": "rows per micro-batch and device",
        "gradient_accumulation_steps": "micro-batches per optimizer step",
        "learning_rate": "peak learning rate",
        "num_warmup_steps": "warm-up, in optimizer steps",
        "dtype": "bf16, fp16 or fp32",
    },
    "memory": {
        "zero_stage": "0 to 3; 3 shards the weights",
        "gradient_checkpointing": "less memory, about a third slower",
        "lora_dim": "rank of LoRA; 0 = train all weights",
    },
    "output": {
        "logging_steps": "optimizer steps per printed line",
        "save_steps": "steps between checkpoints; 0 = off",
    },
}
_ROWS = {
    "data_split": "shares of the rows for steps 1, 2, 3",
    "eval_data_path": "rows for evaluation",
    "max_seq_len": "tokens, prompt and answer together",
}
_NEEDED = {
    "model_name_or_path": "model: a folder or a hub name",
    "data_path": "files, folders or hub names",
    "output_dir": "folder for model, metrics and report",
}

USUAL: dict[str, Usual] = {
    "sft": {
        "needed": _NEEDED,
        "data": {**_ROWS, "truncation": "for longer rows: left, drop, ...", "packing": "several samples per row"},
        **_STEPS_1_AND_2,
    },
    "reward": {
        "needed": _NEEDED,
        "what is trained": {
            "objective": "see --help objective",
            "beta": "strength of the KL constraint (dpo, ...)",
        },
        "data": _ROWS,
        **_STEPS_1_AND_2,
    },
    "ppo": {
        "needed": {
            "actor_model_name_or_path": "SFT model: actor and reference",
            "critic_model_name_or_path": "reward model; also initialises the critic",
            "data_path": "prompts: files or hub names",
            "output_dir": "models, metrics and report",
        },
        "reward and algorithm": {
            "reward_function": "rules or file.py:function",
            "advantage_estimator": "gae, grpo, rloo, ...",
            "kl_coef": "weight of the KL in the reward",
        },
        "rollout": {
            "max_prompt_seq_len": "tokens of a prompt",
            "max_answer_seq_len": "new tokens of an answer",
            "per_device_generation_batch_size": "prompts per device and batch",
            "n_samples_per_prompt": "answers to each prompt",
        },
        "updates": {
            "per_device_training_batch_size": "rows per micro-batch and device",
            "ppo_epochs": "passes over a rollout",
            "actor_learning_rate": "peak learning rate",
            "critic_learning_rate": "peak learning rate",
            "num_train_epochs": "passes over the prompts",
        },
        "memory and output": {
            "actor_zero_stage": "0 to 3; 3 shards the weights",
            "dtype": "bf16, fp16 or fp32",
            "eval_data_path": "held-out prompts",
            "logging_steps": "PPO steps per printed line",
        },
    },
}
USUAL["dpo"] = USUAL["reward"]
