"""TRL's trainers on the models and prompts of `ppo_step.py`, for comparison. Needs `pip install trl==1.12.0`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from measure import threads
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

PROMPT, ANSWER, BATCH, STEPS = 128, 128, 32, 3


class StepTimes(TrainerCallback):
    """Records when each training step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer."""
        self.ends.append(time.perf_counter())


def _common(output: str) -> dict[str, Any]:
    return {
        "output_dir": output, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1, "bf16": True,
        "use_cpu": not torch.cuda.is_available(), "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "gradient_checkpointing": False, "seed": 0,
    }  # fmt: skip


def ppo(lm: Path, reward: Path, output: str, times: StepTimes) -> Any:
    """A PPO trainer: 32 prompts of 128 tokens, 128 new tokens, one update."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(lm, padding_side="left")
    ids = np.random.default_rng(0).integers(5, 300, (BATCH * STEPS, PROMPT)).tolist()
    scalar, causal = AutoModelForSequenceClassification, AutoModelForCausalLM
    policy, reference = (causal.from_pretrained(lm, dtype=torch.bfloat16) for _ in range(2))
    reward_model, critic = (scalar.from_pretrained(reward, dtype=torch.bfloat16, num_labels=1) for _ in range(2))
    arguments = PPOConfig(
        **_common(output), total_episodes=BATCH * STEPS, response_length=ANSWER, num_ppo_epochs=1,
        num_mini_batches=1, local_rollout_forward_batch_size=BATCH, temperature=1.0, num_sample_generations=0,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": ids})
    return PPOTrainer(
        arguments, tokenizer, policy, reference, reward_model, rows, critic, eval_dataset=rows, callbacks=[times]
    )


def grpo(lm: Path, output: str, times: StepTimes) -> Any:
    """A GRPO trainer: 4 prompts of about 128 tokens x 8 answers of 128 tokens, a reward without cost."""
    from trl import GRPOConfig, GRPOTrainer

    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), PROMPT)) for _ in range(BATCH // 8 * STEPS)]
    arguments = GRPOConfig(
        **_common(output), max_steps=STEPS, num_generations=8, max_completion_length=ANSWER, beta=0.05,
        generation_kwargs={"min_new_tokens": ANSWER},
    )  # fmt: skip
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(lm, dtype=torch.bfloat16),
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=AutoTokenizer.from_pretrained(lm, padding_side="left"),
        callbacks=[times],
    )


def samples_per_second(lm: Path, reward: Path, cores: int) -> dict[str, float]:
    """Samples (generated, scored and trained on) per second of wall time, after the first step.

    Raises:
        ImportError: TRL is not installed.
    """
    found = {}
    for name in ("ppo", "grpo"):
        times = StepTimes()
        with tempfile.TemporaryDirectory() as output, threads(cores):
            trainer = ppo(lm, reward, output, times) if name == "ppo" else grpo(lm, output, times)
            trainer.train()
        found[name] = BATCH * (len(times.ends) - 1) / (times.ends[-1] - times.ends[0])
    return found
