"""TRL's trainers on the models and workloads of `ppo_step.py`, for comparison. Needs `pip install trl==1.12.0`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from measure import threads
from models import Workload
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

STEPS = 3
ROWS = 32  # of a forward and backward pass, as in `plain.py`


class StepTimes(TrainerCallback):
    """Records when each training step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer."""
        self.ends.append(time.perf_counter())


def _common(output: str, rows: int) -> dict[str, Any]:
    return {
        "output_dir": output, "per_device_train_batch_size": min(rows, ROWS), "bf16": True, "seed": 0,
        "gradient_accumulation_steps": max(1, rows // ROWS), "use_cpu": not torch.cuda.is_available(),
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip


def ppo(lm: Path, reward: Path, output: str, work: Workload, times: StepTimes) -> Any:
    """A PPO trainer: one update for the prompts of a workload with answers of one length."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    rows, prompt = work.prompts.prompt_ids.shape
    tokenizer = AutoTokenizer.from_pretrained(lm, padding_side="left")
    ids = np.random.default_rng(0).integers(5, 300, (rows * STEPS, prompt)).tolist()
    scalar, causal = AutoModelForSequenceClassification, AutoModelForCausalLM
    policy, reference = (causal.from_pretrained(lm, dtype=torch.bfloat16) for _ in range(2))
    reward_model, critic = (scalar.from_pretrained(reward, dtype=torch.bfloat16, num_labels=1) for _ in range(2))
    arguments = PPOConfig(
        **_common(output, rows), total_episodes=rows * STEPS, response_length=int(work.answer_lengths.max()),
        num_ppo_epochs=1, num_mini_batches=1, local_rollout_forward_batch_size=rows, temperature=1.0,
        num_sample_generations=0,
    )  # fmt: skip
    data = Dataset.from_dict({"input_ids": ids})
    return PPOTrainer(
        arguments, tokenizer, policy, reference, reward_model, data, critic, eval_dataset=data, callbacks=[times]
    )


def grpo(lm: Path, output: str, work: Workload, times: StepTimes) -> Any:
    """A GRPO trainer with the KL in the loss: one update for the answers to the prompts of a workload, and a reward
    without cost. Capital letters are tokens of one letter each."""
    from trl import GRPOConfig, GRPOTrainer

    count, prompt = work.prompts.prompt_ids.shape
    rng, answer = np.random.default_rng(0), int(work.answer_lengths.max())
    texts = ["".join(rng.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), prompt)) for _ in range(count * STEPS)]
    arguments = GRPOConfig(
        **_common(output, count * work.samples), max_steps=STEPS, num_generations=work.samples, beta=0.05,
        max_completion_length=answer, generation_kwargs={"min_new_tokens": answer},
    )  # fmt: skip
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(lm, dtype=torch.bfloat16),
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=AutoTokenizer.from_pretrained(lm, padding_side="left"),
        callbacks=[times],
    )


def samples_per_second(name: str, folder: Path, work: Workload, cores: int) -> float:
    """Samples (generated, scored and trained on) per second of wall time, after the first step.

    Args:
        name: "ppo" or "grpo".
        folder: holds the models `lm` and `reward`.
        work: answers of one length.
        cores: threads.

    Raises:
        ImportError: TRL is not installed.
    """
    times = StepTimes()
    with tempfile.TemporaryDirectory() as output, threads(cores):
        if name == "ppo":
            trainer = ppo(folder / "lm", folder / "reward", output, work, times)
        else:
            trainer = grpo(folder / "lm", output, work, times)
        trainer.train()
    return len(work.answer_lengths) * (len(times.ends) - 1) / (times.ends[-1] - times.ends[0])
