"""Distillation: a step of ours beside TRL's DistillationTrainer, and the memory of the divergence
beside whole logits.

    python benchmarks/distillation.py [--steps 4] [--tokens 1024] [--vocabulary 152000]
        [--only memory trl_loss]

*fixed*, *varied*: seconds of a step. Student and teacher are Llamas of 57 M parameters (vocabulary
32768) with random weights, in one process with one thread and in fp32; one answer to each prompt,
one update, JSD. *fixed*: 16 prompts of 64 tokens, answers of 128 tokens. *varied*: 64 prompts of 32
to 128 tokens; a token ends its answer with a chance of about 1/50, the 256th at the latest. Needs
`pip install trl==1.16.0`. *memory*: peak of forward and backward pass of the loss alone, from
hidden states of width 896. *trl_loss*: how far TRL's loss and its gradients are from ours,
relative.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import peak_memory
from models import config_of
from tool_turns import differences, in_new_process, ours
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_step import StepTimes

from dschat_ppo.algorithms.divergence import Divergence, dense_divergence, fused_divergence
from dschat_ppo.algorithms.fused_logprobs import OutputLayer
from dschat_ppo.tools.toy import make_tokenizer

HIDDEN = 896
FLAGS = (
    "--actor_model_name_or_path {work}/student --teacher_model_name_or_path {work}/teacher"
    " --distill_loss jsd --advantage_estimator none --max_prompt_seq_len {longest}"
    " --max_answer_seq_len {answer} --max_steps {steps} --per_device_generation_batch_size"
    " {prompts} --per_device_training_batch_size {prompts}"
)


@dataclass(frozen=True)
class Workload:
    """Prompts of a step, the fewest and most tokens of one, the longest answer, the chance that a
    token ends one."""

    prompts: int
    shortest: int
    longest: int
    answer: int
    end: float = 0.0


WORKLOADS = {"fixed": Workload(16, 64, 64, 128), "varied": Workload(64, 32, 128, 256, end=1 / 48)}


def make(work: Path, workload: Workload) -> None:
    """Write student, teacher and prompts."""
    tokenizer, rng = make_tokenizer(["a few words to merge"]), random.Random(0)
    for name, seed in (("student", 0), ("teacher", 1)):
        torch.manual_seed(seed)
        config = config_of(32768)
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        end_with(model, workload.end)
        model.save_pretrained(work / name)
        tokenizer.save_pretrained(work / name)
    lengths = (rng.randint(workload.shortest, workload.longest) for _ in range(1024))
    texts = ("".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=length)) for length in lengths)
    (work / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
    )


def end_with(model: Any, chance: float) -> None:
    """Make EOS the next token with about this chance after any text: one dimension of the hidden
    states is constant."""
    head, end = model.lm_head.weight.data, model.config.eos_token_id
    model.model.embed_tokens.weight.data[:, 0] = 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data[0] = layer.mlp.down_proj.weight.data[0] = 0.0
    head[:, 0] = head[end] = 0.0
    with torch.no_grad():
        states = model.model(torch.randint(len(head), (1, 128))).last_hidden_state[0]
        others = (states @ head.T).logsumexp(dim=1).mean()
    head[end, 0] = (others + math.log(max(chance, 1e-9))) / states[:, 0].mean()


def by_trl(work: Path, workload: Workload, steps: int) -> list[float]:
    """The same by TRL."""
    from datasets import load_dataset
    from trl import DistillationConfig, DistillationTrainer

    times = StepTimes()
    models = {
        name: AutoModelForCausalLM.from_pretrained(work / name) for name in ("student", "teacher")
    }
    DistillationTrainer(
        model=models["student"],
        teacher_model=models["teacher"],
        args=DistillationConfig(
            output_dir=str(work / "trl"),
            per_device_train_batch_size=workload.prompts,
            bf16=False,
            use_cpu=True,
            max_steps=steps,
            beta=0.5,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            learning_rate=1e-6,
            gradient_checkpointing=False,
            max_completion_length=workload.answer,
        ),
        train_dataset=load_dataset("json", data_files=str(work / "prompts.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(work / "student", padding_side="left"),
        callbacks=[times],
    ).train()
    return differences(times.ends)


def speed(workload: Workload, steps: int) -> dict[str, float]:
    """Seconds of a step of both, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make(work, workload)
        flags = FLAGS.format(work=work, steps=steps, **asdict(workload))
        own, theirs = ours(work, flags), in_new_process(by_trl, work, workload, steps)
        found = {
            "ours": statistics.median(own + ours(work, flags)),
            "trl": statistics.median(theirs),
        }
    return found | {"ratio": found["trl"] / found["ours"]}


def memory(tokens: int, vocabulary: int) -> dict[str, float]:
    """Peak GiB of the loss and its gradients, by blocks and by whole logits, and how far gradients
    differ."""
    torch.manual_seed(0)
    hidden, others = torch.randn(tokens, HIDDEN, requires_grad=True), torch.randn(tokens, HIDDEN)
    weight, teacher = (torch.randn(vocabulary, HIDDEN).mul_(0.02) for _ in range(2))
    weight.requires_grad_()
    gradients: dict[str, Any] = {}

    def by_blocks() -> None:
        found = fused_divergence(
            OutputLayer(hidden, weight), OutputLayer(others, teacher), Divergence("jsd")
        )
        gradients["blocks"] = torch.autograd.grad(found.mean(), (hidden, weight))[0]

    def whole() -> None:
        log_p, log_q = (
            torch.log_softmax(x @ w.T, dim=1) for x, w in ((hidden, weight), (others, teacher))
        )
        gradients["whole"] = torch.autograd.grad(
            dense_divergence(log_p, log_q, "jsd").mean(), (hidden, weight)
        )[0]

    found = {"blocks": peak_memory(by_blocks), "whole": peak_memory(whole)}
    difference = (gradients["blocks"] - gradients["whole"]).abs().max() / gradients[
        "whole"
    ].abs().max()
    return found | {
        "ratio": found["blocks"] / found["whole"],
        "relative_difference": float(difference),
    }


def trl_loss() -> dict[str, float]:
    """The largest difference from TRL's loss of values, and of gradients, relative, for each kind
    of divergence."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(64, 32, requires_grad=True),
        torch.randn(3001, 32, requires_grad=True),
    )
    teacher, chosen = OutputLayer(torch.randn(64, 24), torch.randn(3001, 24)), torch.rand(64) > 0.3
    found = {}
    for kind, beta in (("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.5), ("jsd", 0.1)):
        states, theirs = hidden[None], teacher.hidden[None]
        loss = _chunked_divergence_loss(states, theirs, weight, teacher.weight, chosen[None], beta)[
            0
        ]
        student = OutputLayer(hidden, weight)
        own = fused_divergence(student, teacher, Divergence(kind, beta))[chosen].mean()
        pairs = [(loss, own)]
        pairs += zip(
            *(torch.autograd.grad(value, (hidden, weight)) for value in (loss, own)), strict=True
        )
        found[f"{kind} {beta}"] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4, help="of each; the first is not counted")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    names = ("memory", "trl_loss", *WORKLOADS)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    chosen = parser.parse_args()
    parts = {"memory": lambda: memory(chosen.tokens, chosen.vocabulary), "trl_loss": trl_loss}
    parts |= {name: partial(speed, workload, chosen.steps) for name, workload in WORKLOADS.items()}
    for name in chosen.only:
        print(name, json.dumps(parts[name]()), flush=True)


if __name__ == "__main__":
    main()
