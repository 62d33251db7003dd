"""Supervised fine-tuning with and without `--packing` on rows of wide-spread lengths, in one run.

    python benchmarks/packing.py [--json FILE] [--repeats 5] [--rows 256]

Lengths are lognormal with median 40, at most 512 tokens (`--max_seq_len`); 31.6 M random fp32 parameters; an epoch of
`SupervisedTrainer` on one rank, at `--per_device_train_batch_size 8`. "packing": micro-batches of up to 8 x 512
tokens. "rows": micro-batches of 8 rows, which the model lays end to end where its kernels can. "padded": the same, with
padding. Tokens are real tokens. CPU seconds are those of the process with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from measure import costs, markdown
from models import config_of
from transformers import AutoModelForCausalLM

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import sample_tokens
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.supervised.sft import sft_objective
from dschat_ppo.supervised.trainer import SupervisedTrainer, TrainerFlags, fit_ds_config

LONGEST, MICRO_BATCH, VOCABULARY = 512, 8, 8192


def token_rows(count: int) -> Dataset:
    """Rows of which the answer is half."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(40), 1.0, count), 4, LONGEST).astype(int)
    ids = [random.integers(2, VOCABULARY, length).tolist() for length in lengths]
    return Dataset.from_list([{"prompt_ids": x[: len(x) // 2], "answers": [x[len(x) // 2 :]]} for x in ids])


def trainer_of(rows: Dataset, packing: bool, packs: bool = True) -> SupervisedTrainer[Any]:
    """A trainer of a new model; without `packs` its model pads rows."""
    words = f"--model_name_or_path m --data_path d --output_dir o --dtype fp32 --max_seq_len {LONGEST}"
    words += f" --per_device_train_batch_size {MICRO_BATCH} --packing {packing}"
    config = parse("sft", words.split())
    torch.manual_seed(0)
    model = PolicyModel(AutoModelForCausalLM.from_config(config_of(VOCABULARY), dtype=torch.float32))
    trainer = SupervisedTrainer(
        model, fit_ds_config(config.fit, config.run), TokenRows(rows, None), sft_objective(0, False, dist.device()),
        TrainerFlags.of(config),
    )  # fmt: skip
    module = trainer.engine.module
    module.layout = replace(module.layout, packed=module.layout.packed and packs)
    return trainer


def epoch_of(trainer: SupervisedTrainer[Any]) -> Callable[[], object]:
    """Trains one epoch."""
    return lambda: [trainer.train_step(micro_batches) for micro_batches in trainer.steps_left()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    parser.add_argument("--repeats", type=int, default=5, help="epochs of each way, of which the median counts")
    parser.add_argument("--rows", type=int, default=256, help="training rows")
    arguments = parser.parse_args()
    quiet_libraries()
    init_process_group()
    rows, cores = token_rows(arguments.rows), len(os.sched_getaffinity(0))
    tokens = int(sample_tokens(rows).sum())
    trainers = {
        "padded": trainer_of(rows, packing=False, packs=False),
        "rows": trainer_of(rows, packing=False),
        "packing": trainer_of(rows, packing=True),
    }
    found = costs({name: epoch_of(trainer) for name, trainer in trainers.items()}, arguments.repeats, cores)
    results = {
        name: {
            "steps": trainers[name].plan.steps_per_epoch,
            "tokens_per_s": tokens / cost.wall,
            "tokens_per_cpu_s": tokens / cost.cpu,
            "ratio_wall": cost.wall / found["packing"].wall,
            "ratio_cpu": cost.cpu / found["packing"].cpu,
        }
        for name, cost in found.items()
    }
    shown = [[name, f"{line['steps']}", f"{line['tokens_per_s']:.0f}", f"{line['tokens_per_cpu_s']:.0f}",
              f"{line['ratio_wall']:.2f}", f"{line['ratio_cpu']:.2f}"] for name, line in results.items()]  # fmt: skip
    header = ["way", "steps", "tokens/s", "tokens/CPU s", "packing is faster (wall)", "packing is faster (CPU)"]
    print(markdown(header, shown))
    print(json.dumps(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    dist.shutdown()
    leave(0)


if __name__ == "__main__":
    main()
