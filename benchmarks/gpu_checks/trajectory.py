"""Training runs on this device against the same runs on the CPU, and resumed against uninterrupted
ones.

Runs go through the public flags, several in one process: python -m gpu_checks.trajectory FOLDER
NAME ... The models, the data and the order of the rows come from seeds on the CPU, so every process
that makes them in a folder of its own has the same."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from measure import metrics_of as lines_of
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from dschat_ppo.config.cli import parse
from dschat_ppo.ppo.train_ppo import train_ppo
from dschat_ppo.run.session import join_ranks
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
from gpu_checks.parts import Findings

COMPARED = ("sft", "ppo", "grpo")
FURTHER = 3
# which a process group leaves behind
LAUNCHED = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"


def in_another_process(folder: Path, names: tuple[str, ...], **env: str) -> subprocess.Popen[bytes]:
    """Start `train` on the runs `names`."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return subprocess.Popen(
        [sys.executable, "-m", "gpu_checks.trajectory", folder, *names], env=inherited | env
    )


def trajectory(found: Findings, tiny: bool) -> None:
    """SFT, PPO and GRPO in fp32 on this device and on the CPU, at the same time.

    A PPO step makes four updates on the same answers, so that of the first step compares four
    optimizer steps. In the next rollout the smallest difference of a weight may draw another token:
    its metrics are shown, and not judged.
    """
    here, cpu = Path.cwd() / "device", Path.cwd() / "cpu"
    other = in_another_process(
        cpu, COMPARED, DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="2"
    )
    train(here, list(COMPARED))
    if other.wait():
        raise RuntimeError(f"the runs on the CPU ended with exit code {other.returncode}")
    for name in COMPARED:
        found.add(name, compared(metrics_of(cpu / name), metrics_of(here / name)))


def compared(
    expected: dict[int, dict[str, float]], actual: dict[int, dict[str, float]]
) -> dict[str, Any]:
    """The largest difference in the first step and in all steps, and the metrics in which they
    are."""
    by_step = {
        step: largest_difference(expected.get(step, {}), actual.get(step, {}))
        for step in expected | actual
    }
    first, worst = by_step[min(by_step)], max(by_step.values())
    return {
        "first_step": first[0],
        "in": first[1],
        "all_steps": worst[0],
        "all_in": worst[1],
        "steps": len(by_step),
    }


def weights_apart(one: Path, other: Path) -> float:
    """The largest absolute difference of a saved weight of the actors of two runs."""
    pairs = zip(load_file(one).items(), load_file(other).items(), strict=True)
    return max(float((x.float() - y.float()).abs().max()) for (_, x), (_, y) in pairs)


def resume(found: Findings, tiny: bool) -> None:
    """A PPO run, on a GPU in bf16, the same again, and one resumed in a new process from the
    checkpoint in its middle.

    On a CPU all three are equal. On a GPU sums in another order may make equal runs differ, and
    chance decides which is further from the first: then the resumed run must be at most `FURTHER`
    times as far from it as the second one.
    """
    folder = Path.cwd() / "resume"
    train(folder, ["whole", "again"])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if code := in_another_process(folder, ("resumed",)).wait():
        raise RuntimeError(f"the resumed run ended with exit code {code}")
    whole, apart = metrics_of(folder / "whole"), {}
    for name in ("again", "resumed"):
        metrics = metrics_of(folder / name)
        last = max(whole)
        apart[name] = max(
            largest_difference(whole[last], metrics[last])[0], weights_of(folder, name)
        )
        found.add(
            name,
            {
                "metrics": largest_difference(whole[last], metrics[last])[0],
                "weights": weights_of(folder, name),
                "steps": sorted(metrics),
            },
        )
    found.add(
        "compared",
        {
            "bit_exact": apart["resumed"] == 0,
            "beyond_again": beyond_again(apart["again"], apart["resumed"]),
        },
    )


def beyond_again(again: float, resumed: float) -> float:
    """How much further a resumed run is from the first one than chance explains, if an equal run is
    `again` from it."""
    return max(0.0, resumed - FURTHER * again)


def weights_of(folder: Path, name: str) -> float:
    """How far the actor of a run is from that of the first."""
    return weights_apart(*(folder / run / "actor" / "model.safetensors" for run in ("whole", name)))


TRAIN = {"sft": train_sft, "ppo": train_ppo}

# The policy is far from uniform, so that rounding seldom decides which token is drawn.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
ROLLOUT = (
    "--actor_model_name_or_path {made}/lm --data_path {made}/prompts.jsonl --data_split 0,0,1"
    " --max_prompt_seq_len 64 --max_answer_seq_len 24 --actor_learning_rate 1e-4 --num_warmup_steps"
    " 0 --enable_test_mode"
)
PPO = (
    f"{ROLLOUT} --critic_model_name_or_path {{made}}/reward --per_device_generation_batch_size 16 "
    "--per_device_training_batch_size 8 --ppo_epochs 2 --critic_learning_rate 1e-4"
)
GRPO = (
    f"{ROLLOUT} --use_reward_model False --reward_function {{made}}/scores.py:vowels"
    " --reward_workers 1 --advantage_estimator grpo --kl_loss_coef 0.05 --n_samples_per_prompt 4"
    " --per_device_generation_batch_size 4 --per_device_training_batch_size 8 --ppo_epochs 2"
)
SFT = (
    "--model_name_or_path {made}/lm --data_path {made}/sft.jsonl --data_split 1,0,0 --max_seq_len"
    " 128 --apply_chat_template False --per_device_train_batch_size 8 --learning_rate 3e-4"
    " --num_warmup_steps 0 --num_train_epochs 1 --dtype fp32"
)
# many a CPU has no arithmetic in bf16
SAVED = "--dtype bf16" if torch.cuda.is_available() else "--dtype fp32"
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
    asked = [
        Question(rng.choice(NAMES), rng.choice(COLOURS), rng.choice(THINGS), rng.randrange(3))
        for _ in range(64)
    ]
    rows: dict[str, list[dict[str, Any]]] = {
        "prompts": [{"prompt": question.text[:40]} for question in asked],
        "sft": [
            {
                "prompt": question.text[:40],
                "response": rng.choice((kind_answer, curt_answer))(question, rng)[:60],
            }
            for question in asked
        ],
    }
    for name, part in rows.items():
        (made / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in part), encoding="utf-8"
        )
    (made / "scores.py").write_text(SCORES, encoding="utf-8")


def train(made: Path, names: list[str]) -> None:
    """Make the runs; their outputs are the folders of their names in `made`."""
    make_inputs(made)
    for name in names:
        step, flags = RUNS[name]
        print(f"--- {name}", flush=True)
        config = parse(step, [*flags.format(made=made).split(), "--output_dir", str(made / name)])
        join_ranks(config)
        TRAIN[step](config)


def metrics_of(output: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics of a run, without times and memory."""
    lines = lines_of(output)
    return {
        line["step"]: {name: value for name, value in line.items() if isinstance(value, float)}
        for line in lines
    }


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
