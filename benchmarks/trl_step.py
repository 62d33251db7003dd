"""TRL's GRPO trainer on the models and the workload of `ppo_step.py`. Needs `pip install
trl==1.12.0`."""

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
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

STEPS = 3
ROWS = 32  # of a forward and backward pass, as in `plain.py`


class StepTimes(TrainerCallback):
    """Records when each training step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def samples_per_second(lm: Path, work: Workload, cores: int, dtype: torch.dtype) -> float:
    """Samples (generated, scored and trained on) per second of wall time, after the first step.

    The KL is in the loss, with one update for the answers to the prompts of `work`, all of one
    length, and a reward without cost. Capital letters are tokens of one letter each. `ImportError`
    if TRL is not installed.
    """
    from trl import GRPOConfig, GRPOTrainer

    count, prompt = work.prompts.prompt_ids.shape
    rng, answer, rows = (
        np.random.default_rng(0),
        int(work.answer_lengths.max()),
        len(work.answer_lengths),
    )
    texts = [
        "".join(rng.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), prompt))
        for _ in range(count * STEPS)
    ]
    times = StepTimes()
    with tempfile.TemporaryDirectory() as output, threads(cores):
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(lm, dtype=dtype),
            reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
            args=GRPOConfig(
                output_dir=output,
                per_device_train_batch_size=min(rows, ROWS),
                bf16=dtype == torch.bfloat16,
                seed=0,
                max_steps=STEPS,
                gradient_accumulation_steps=max(1, rows // ROWS),
                use_cpu=not torch.cuda.is_available(),
                beta=0.05,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                gradient_checkpointing=False,
                num_generations=work.samples,
                max_completion_length=answer,
                generation_kwargs={"min_new_tokens": answer},
            ),
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=AutoTokenizer.from_pretrained(lm, padding_side="left"),
            callbacks=[times],
        ).train()
    return rows * (len(times.ends) - 1) / (times.ends[-1] - times.ends[0])
