"""Distillation: a step of ours beside TRL's DistillationTrainer, and the memory of the divergence beside whole logits.

    python benchmarks/distillation.py [--steps 4] [--tokens 1024] [--vocabulary 152000] [--only memory] [--json FILE]

*speed*: student and teacher are Llamas of 57 M parameters (vocabulary 32768) with random weights, in one process with
one thread and in fp32; 16 prompts of 64 tokens a step, one answer of 128 tokens to each, one update, JSD. Needs `pip
install trl==1.16.0`. *memory*: peak of forward and backward pass of the loss alone, from hidden states of width 896.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from fault_outcomes import ROOT, launcher
from measure import peak_memory
from models import config_of
from tool_turns import differences, run
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_step import StepTimes

from dschat_ppo.algorithms.divergence import Divergence, OutputLayer, dense_divergence, fused_divergence
from dschat_ppo.tools.toy import make_tokenizer

PROMPTS, PROMPT, ANSWER, HIDDEN = 16, 64, 128, 896


def make(work: Path) -> None:
    """Write student, teacher and prompts, all of one length."""
    tokenizer, rng = make_tokenizer(["a few words to merge"]), random.Random(0)
    for name, seed in (("student", 0), ("teacher", 1)):
        torch.manual_seed(seed)
        config = config_of(32768)
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(work / name)
        tokenizer.save_pretrained(work / name)
    texts = ("".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=PROMPT)) for _ in range(512))
    (work / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def ours(work: Path, steps: int) -> list[float]:
    """Seconds of each step of `training/step3_ppo/main.py` after the first."""
    output = Path(tempfile.mkdtemp(dir=work))
    flags = (
        f"--actor_model_name_or_path {work}/student --teacher_model_name_or_path {work}/teacher --distill_loss jsd "
        f"--advantage_estimator none --use_reward_model False --data_path {work}/prompts.jsonl --data_split 0,0,1 "
        f"--max_prompt_seq_len {PROMPT} --max_answer_seq_len {ANSWER} --per_device_generation_batch_size {PROMPTS} "
        f"--per_device_training_batch_size {PROMPTS} --actor_learning_rate 1e-6 --max_steps {steps} --dtype fp32 "
        f"--output_dir {output} --save_minutes 0"
    )
    run([*launcher(1), str(ROOT / "training/step3_ppo/main.py"), *flags.split()])
    return differences([json.loads(line)["time"] for line in (output / "metrics.jsonl").read_text().splitlines()])


def by_trl(work: Path, steps: int) -> list[float]:
    """The same by TRL."""
    from datasets import load_dataset
    from trl import DistillationConfig, DistillationTrainer

    times = StepTimes()
    models = {name: AutoModelForCausalLM.from_pretrained(work / name) for name in ("student", "teacher")}
    DistillationTrainer(
        model=models["student"], teacher_model=models["teacher"],
        args=DistillationConfig(
            output_dir=str(work / "trl"), per_device_train_batch_size=PROMPTS, bf16=False, use_cpu=True,
            max_steps=steps, beta=0.5, report_to="none", save_strategy="no", disable_tqdm=True, learning_rate=1e-6,
            gradient_checkpointing=False, max_completion_length=ANSWER,
        ),
        train_dataset=load_dataset("json", data_files=str(work / "prompts.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(work / "student", padding_side="left"), callbacks=[times],
    ).train()  # fmt: skip
    return differences(times.ends)


def speed(work: Path, steps: int) -> dict[str, float]:
    """Seconds of a step of both, in turn."""
    os.environ["OMP_NUM_THREADS"] = "1"
    make(work)
    own = ours(work, steps)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        theirs = pool.submit(by_trl, work, steps).result()
    own += ours(work, steps)
    found = {"ours": statistics.median(own), "trl": statistics.median(theirs)}
    return found | {"ratio": found["trl"] / found["ours"]}


def memory(tokens: int, vocabulary: int) -> dict[str, float]:
    """Peak GiB of the loss and its gradients, by blocks and by whole logits, and how far gradients differ."""
    torch.manual_seed(0)
    hidden, others = torch.randn(tokens, HIDDEN, requires_grad=True), torch.randn(tokens, HIDDEN)
    weight, teacher = (
        torch.randn(vocabulary, HIDDEN).mul_(0.02).requires_grad_(),
        0.02 * torch.randn(vocabulary, HIDDEN),
    )
    gradients: dict[str, Any] = {}

    def by_blocks() -> None:
        found = fused_divergence(hidden, weight, None, OutputLayer(others, teacher), Divergence("jsd"))
        gradients["blocks"] = torch.autograd.grad(found.mean(), (hidden, weight))[0]

    def whole() -> None:
        log_p, log_q = (torch.log_softmax(x @ w.T, dim=1) for x, w in ((hidden, weight), (others, teacher)))
        gradients["whole"] = torch.autograd.grad(dense_divergence(log_p, log_q, "jsd").mean(), (hidden, weight))[0]

    found = {"blocks": peak_memory(by_blocks), "whole": peak_memory(whole)}
    difference = (gradients["blocks"] - gradients["whole"]).abs().max() / gradients["whole"].abs().max()
    return found | {"ratio": found["blocks"] / found["whole"], "relative_difference": float(difference)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="of each; the first is not counted")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--only", nargs="+", choices=["speed", "memory"], default=["memory", "speed"])
    parser.add_argument("--json", type=Path)
    chosen, found = parser.parse_args(), dict[str, dict[str, float]]()
    if "memory" in chosen.only:
        found["memory"] = memory(chosen.tokens, chosen.vocabulary)
        print(found, flush=True)
    if "speed" in chosen.only:
        with tempfile.TemporaryDirectory() as work:
            found["speed"] = speed(Path(work), chosen.steps)
        print(found["speed"])
    if chosen.json:
        chosen.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
