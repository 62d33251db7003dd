"""Runs of steps 1 and 2 with `--packing` on rows of wide-spread lengths, for one rank or several."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from checkpoints import NO_CHECKPOINTS
from datasets import Dataset
from tiny_models import VOCABULARY, new_model
from transformers import AutoModelForSequenceClassification

from dschat_ppo.common import dist
from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.supervised.reward_objectives import reward_objective
from dschat_ppo.supervised.sft import sft_objective
from dschat_ppo.supervised.trainer import SupervisedTrainer, TrainerFlags, fit_ds_config

GLOBAL_BATCH = 2  # packed rows: two gradients add up to the same bits in either order
MEASURED = ("time", "time/", "memory/")


def rows_of(count: int, answers: int) -> Dataset:
    """Samples of 2 to 40 tokens, most of them short, from two data sets."""
    random = np.random.default_rng(0)

    def ids(most: int) -> list[int]:
        return random.integers(2, VOCABULARY, 1 + int(most * random.random() ** 3)).tolist()

    return Dataset.from_list([
        {"prompt_ids": ids(10), "answers": [ids(30) for _ in range(answers)], "margin": 0.0, "source": row % 2}
        for row in range(count)
    ])  # fmt: skip


def packed_run(task: str, folder: Path) -> dict:
    """Train for two epochs; the metrics of each step, and a fingerprint of the trained weights. Collective.

    Args:
        task: "sft" or "reward".
        folder: for the metrics.
    """
    words = "--model_name_or_path m --data_path d --dtype fp32 --zero_stage 0 --packing --max_seq_len 40"
    words += f" --per_device_train_batch_size 1 --gradient_accumulation_steps {GLOBAL_BATCH // dist.world_size()}"
    words += f" --num_train_epochs 2 --learning_rate 0.01 --output_dir {folder}"
    config = parse(task, words.split())
    rows = TokenRows(rows_of(32, 1 if task == "sft" else 2), None, ("even", "odd"))
    if task == "sft":
        model, objective = PolicyModel(new_model("llama")), sft_objective(0, False, dist.device())
    else:
        torch.manual_seed(1)
        model_config = new_model("llama").config
        model_config.num_labels = 1
        model = ScalarModel(AutoModelForSequenceClassification.from_config(model_config))
        objective = reward_objective(0, dist.device(), config)
    trainer = SupervisedTrainer(model, fit_ds_config(config.fit, config.run), rows, objective, TrainerFlags.of(config))
    with MetricsWriter(folder, None, None) as writer:
        trainer.run(writer, NO_CHECKPOINTS, task)
    weights = hashlib.sha256()
    for _, weight in sorted(trainer.engine.module.named_parameters()):
        weights.update(weight.detach().numpy().tobytes())
    found: dict = {"weights": weights.hexdigest(), "packed": trainer.packing.rows, "lines": []}
    if dist.is_main():
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found["lines"] = [{n: line[n] for n in line if not n.startswith(MEASURED)} for line in lines]
    return found
