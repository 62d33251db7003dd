"""Step 3 with a tool: samples per second, ours beside the GRPO trainer of TRL, at several latencies
of the tool.

    python benchmarks/tool_turns.py [--latencies 0 0.2 1] [--larger] [--steps 4] [--work DIR]

Both train the SFT model of `training_scripts/examples/calculator`, which is made first (some
minutes), in one process with one thread: 16 prompts a step, 8 answers each, one update, no KL, and
the same functions as tool and reward. An answer calls the tool up to a few times, and the calls of
all answers may run at once. That model has 0.25 M parameters; with `--larger` 10 M, which change
nothing in what it says. Needs `pip install trl==1.16.0`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from measure import ROOT, environment, launcher
from trl_step import StepTimes

EXAMPLE = ROOT / "training_scripts/examples/calculator"
PROMPTS, ANSWERS, LONGEST = 16, 8, 128
FLAGS = (
    "--actor_model_name_or_path {work}/sft --advantage_estimator grpo --kl_coef 0"
    f" --max_prompt_seq_len 48 --max_answer_seq_len {LONGEST} --n_samples_per_prompt {ANSWERS}"
    f" --per_device_generation_batch_size {PROMPTS} --per_device_training_batch_size"
    f" {PROMPTS * ANSWERS} --max_steps {{steps}} --tools {{tool}}:calculate --reward_function"
    f" {{tool}}:right_sum --environment_workers {PROMPTS * ANSWERS}"
)
TOOL = """
import sys, time
sys.path.append({folder!r})
from calculator import right_sum  # the reward
def calculate(expression: str) -> int:
    '''Add numbers.

    Args:
        expression: the sum, such as 12+7+30.
    '''
    time.sleep({seconds})
    return sum(int(number) for number in expression.split("+"))
"""


def make_larger(model: Path, width: int = 4096) -> None:
    """More layers and wider ones whose additional weights add 0: the same model, whose passes cost
    more. `width`: numbers between the matrices of an MLP."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    small = AutoModelForCausalLM.from_pretrained(model)
    shape = {"num_hidden_layers": 8, "intermediate_size": width}
    large, given = (
        AutoModelForCausalLM.from_config(LlamaConfig(**{**small.config.to_dict(), **shape})),
        small.state_dict(),
    )
    weights = large.state_dict()
    for name, weight in weights.items():
        if name in given or "o_proj" in name or "down_proj" in name:
            weight.zero_()
        if name in given:
            weight[tuple(map(slice, given[name].shape))] = given[name]
    large.load_state_dict(weights)
    large.save_pretrained(model)


def ours(work: Path, flags: str) -> list[float]:
    """Seconds of each step of `training/step3_ppo/main.py` with `flags` after the first."""
    output = Path(tempfile.mkdtemp(dir=work))
    flags += (
        f" --data_path {work}/prompts.jsonl --data_split 0,0,1 --use_reward_model False"
        " --actor_learning_rate 1e-6"
    )
    flags += f" --dtype fp32 --output_dir {output} --save_minutes 0"
    run([*launcher(1), str(ROOT / "training/step3_ppo/main.py"), *flags.split()])
    return differences(
        [json.loads(line)["time"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    )


def differences(ends: list[float]) -> list[float]:
    return [end - start for start, end in itertools.pairwise(ends)]


def run(command: list[str]) -> None:
    subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)


def by_trl(work: Path, tool: Path, steps: int) -> list[float]:
    """The same as `ours` by TRL. The process must be a new one: TRL and the tool stay imported."""
    sys.path.insert(0, str(tool.parent))
    functions = __import__(tool.stem)
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    times = StepTimes()

    def reward(completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float]:
        said = [messages[-1].get("content") or "" for messages in completions]
        return [
            float(functions.right_sum(text, right))
            for text, right in zip(said, answer, strict=True)
        ]

    tokenizer = AutoTokenizer.from_pretrained(work / "sft", padding_side="left")
    marks = (
        json.dumps(qwen3_template)
        .replace("<|im_start|>assistant\\n", "<|assistant|>")
        .replace("im_end", "end")
    )
    tokenizer.response_template = json.loads(marks)
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work / "sft"),
        reward_funcs=reward,
        tools=[functions.calculate],
        args=GRPOConfig(
            output_dir=str(work / "trl"),
            per_device_train_batch_size=PROMPTS * ANSWERS,
            bf16=False,
            use_cpu=True,
            max_steps=steps,
            beta=0.0,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            learning_rate=1e-6,
            gradient_checkpointing=False,
            num_generations=ANSWERS,
            max_completion_length=LONGEST,
        ),
        train_dataset=load_dataset("json", data_files=str(work / "prompts.jsonl"), split="train"),
        processing_class=tokenizer,
        callbacks=[times],
    ).train()
    return differences(times.ends)


def in_new_process(function: Callable[..., list[float]], *given: Any) -> list[float]:
    """The result of a function that runs in a process of its own, with one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


def main() -> None:
    """Alternate between the two, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--latencies", type=float, nargs="+", default=[0.0, 0.2, 1.0], help="seconds of a call"
    )
    parser.add_argument(
        "--larger", action="store_true", help="with 10 M parameters; give it a --work of its own"
    )
    parser.add_argument("--steps", type=int, default=4, help="of each; the first is not counted")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tool_turns")
    chosen = parser.parse_args()
    if not (chosen.work / "sft/result.json").exists():
        run(
            [
                "bash",
                str(EXAMPLE / "run.sh"),
                str(chosen.work),
                "--max_steps",
                "1",
                "--output_dir",
                f"{chosen.work}/x",
            ]
        )
        if chosen.larger:
            make_larger(chosen.work / "sft")
    shutil.copy(chosen.work / "task/data/prompts.jsonl", chosen.work)
    for latency in chosen.latencies:
        tool = chosen.work / f"tool_{int(latency * 1000)}.py"
        tool.write_text(TOOL.format(folder=str(EXAMPLE), seconds=latency), encoding="utf-8")
        flags = FLAGS.format(work=chosen.work, tool=tool, steps=chosen.steps)
        seconds = ours(chosen.work, flags), in_new_process(by_trl, chosen.work, tool, chosen.steps)
        own, theirs = (PROMPTS * ANSWERS / statistics.median(each) for each in seconds)
        print({"latency": latency, "ours": own, "trl": theirs, "ratio": own / theirs}, flush=True)


if __name__ == "__main__":
    main()
