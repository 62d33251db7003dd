"""Small training runs through the public flags, several in one process: python -m gpu_checks.train_runs FOLDER NAME ...

The models, the data and the order of the rows come from seeds on the CPU, so every process that makes them in a folder
of its own has the same.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from fault_outcomes import metrics_of as lines_of
from transformers import AutoConfig, AutoModelForSequenceClassification

from dschat_ppo.config.cli import parse
from dschat_ppo.ppo.train_ppo import train_ppo
from dschat_ppo.supervised.sft import train_sft
from dschat_ppo.tools.toy import (
    COLOURS,
    NAMES,
    THINGS,
    Question,
    curt_answer,
    kind_answer,
    make_tokenizer,
    untrained_llama,
)

TRAIN = {"sft": train_sft, "ppo": train_ppo}

# The policy is far from uniform, so that rounding seldom decides which token is drawn.
SHAPE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
ROLLOUT = (
    "--actor_model_name_or_path {made}/lm --data_path {made}/prompts.jsonl --data_split 0,0,1 --max_prompt_seq_len 64 "
    "--max_answer_seq_len 24 --actor_learning_rate 1e-4 --num_warmup_steps 0 --enable_test_mode"
)
PPO = (
    f"{ROLLOUT} --critic_model_name_or_path {{made}}/reward --per_device_generation_batch_size 16 "
    "--per_device_training_batch_size 8 --ppo_epochs 2 --critic_learning_rate 1e-4"
)
GRPO = (
    f"{ROLLOUT} --use_reward_model False --reward_function {{made}}/scores.py:vowels --reward_workers 1 "
    "--advantage_estimator grpo --kl_loss_coef 0.05 --n_samples_per_prompt 4 --per_device_generation_batch_size 4 "
    "--per_device_training_batch_size 8 --ppo_epochs 2"
)
SFT = (
    "--model_name_or_path {made}/lm --data_path {made}/sft.jsonl --data_split 1,0,0 --max_seq_len 128 "
    "--apply_chat_template False --per_device_train_batch_size 8 --learning_rate 3e-4 --num_warmup_steps 0 "
    "--num_train_epochs 1 --dtype fp32"
)
SAVED = "--dtype bf16" if torch.cuda.is_available() else "--dtype fp32"  # many a CPU has no arithmetic in bf16
SAVED += " --test_stop_step 4 --save_steps 2 --save_total_limit 9 --keep_final_checkpoint"
# name -> (step, flags)
RUNS = {
    "sft": ("sft", SFT),
    "ppo": ("ppo", f"{PPO} --dtype fp32 --test_stop_step 2"),
    "grpo": ("ppo", f"{GRPO} --dtype fp32 --test_stop_step 2"),
    "whole": ("ppo", f"{PPO} {SAVED}"),
    "again": ("ppo", f"{PPO} {SAVED}"),
    "resumed": ("ppo", f"{PPO} {SAVED} --resume {{made}}/whole/checkpoints/step_000002"),
}
NOT_COMPARABLE = 1e9
SCORES = """def vowels(response: str) -> float:
    return sum(letter in "aeiou" for letter in response) / (1 + len(response))
"""


def make_inputs(made: Path) -> None:
    """Write models and data to `made`, unless they are there."""
    if (made / "scores.py").exists():
        return
    rng, tokenizer = random.Random(0), make_tokenizer(["a few words to merge"])
    lm = untrained_llama(tokenizer, 0, **SHAPE)
    for weight in lm.parameters():
        weight.data.mul_(4 if weight.dim() > 1 else 1)
    lm.save_pretrained(made / "lm")
    config = AutoConfig.from_pretrained(made / "lm", num_labels=1)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(made / "reward")
    for name in ("lm", "reward"):
        tokenizer.save_pretrained(made / name)
    asked = [Question(rng.choice(NAMES), rng.choice(COLOURS), rng.choice(THINGS), rng.randrange(3)) for _ in range(64)]
    rows: dict[str, list[dict[str, Any]]] = {
        "prompts": [{"prompt": question.text[:40]} for question in asked],
        "sft": [
            {"prompt": question.text[:40], "response": rng.choice((kind_answer, curt_answer))(question, rng)[:60]}
            for question in asked
        ],
    }
    for name, part in rows.items():
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    (made / "scores.py").write_text(SCORES, encoding="utf-8")


def train(made: Path, names: list[str]) -> None:
    """Make the runs; their outputs are the folders of their names in `made`."""
    make_inputs(made)
    for name in names:
        step, flags = RUNS[name]
        print(f"--- {name}", flush=True)
        TRAIN[step](parse(step, [*flags.format(made=made).split(), "--output_dir", str(made / name)]))


def metrics_of(output: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics of a run, without times and memory."""
    lines = lines_of(output)
    return {line["step"]: {name: value for name, value in line.items() if isinstance(value, float)} for line in lines}


def largest_difference(one: dict[str, float], other: dict[str, float]) -> tuple[float, str]:
    """The largest `|x - y| / max(1, |x|)` of the metrics of two runs at one step, and its name.

    That of a metric that only one run has, or that is not finite, is `NOT_COMPARABLE`.
    """
    worst = (0.0, "")
    for name in sorted(one.keys() | other.keys()):
        x, y = one.get(name, math.nan), other.get(name, math.nan)
        distance = abs(x - y) / max(1.0, abs(x))
        worst = max(worst, (distance if math.isfinite(distance) else NOT_COMPARABLE, name))
    return worst


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # no teardown of DeepSpeed's process groups
