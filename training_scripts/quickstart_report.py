"""The result of the quickstart: a table, sample answers, and `summary.json`.

    python training_scripts/quickstart_report.py OUT_DIR

The saved models are loaded with plain transformers, which also shows that they are valid
transformers models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dschat_ppo.algorithms.kl import kl_k1
from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.common.paths import shown_path
from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.data.batches import collate_prompts
from dschat_ppo.data.encode import encode_prompt
from dschat_ppo.errors import escaped
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel, response_logprobs
from dschat_ppo.rollout.generator import GenerationConfig, generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.run.start_and_end import tool_command
from dschat_ppo.tools.toy import Question, keeps_rule
from dschat_ppo.types import Rollout, full_sequences, to_device

SAMPLES = 5
MAX_NEW_TOKENS = 48
STEPS = ("sft", "reward", "ppo")
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "datasets", "tensorboard")


def sample_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[Any], seed: int
) -> tuple[list[str], Rollout]:
    """One answer to each prompt at temperature 1, as text and as tokens: that of a chat with
    `--seed SEED + ROW`."""
    rows = [{"prompt_ids": encode_prompt(tokenizer, prompt)} for prompt in prompts]
    batch = to_device(collate_prompts(rows, range(len(rows)), filler_id(tokenizer)), dist.device())
    config = GenerationConfig(
        SamplingParameters(), StoppingCriteria(MAX_NEW_TOKENS, (tokenizer.eos_token_id,))
    )
    seeds = torch.cat([row_seeds(0, 1, seed + row) for row in range(len(rows))])
    rollout = generate(model, batch, seeds, config)
    answers = zip(rollout.response_ids, rollout.response_mask, strict=True)
    return [
        str(tokenizer.decode(ids[mask], skip_special_tokens=True)) for ids, mask in answers
    ], rollout


def rule_rate(questions: Sequence[Question], answers: Sequence[str]) -> float:
    """Fraction of the answers that follow the true rule."""
    return sum(map(keeps_rule, questions, answers)) / len(answers)


def load_lm(folder: Path) -> PreTrainedModel:
    """Load a saved language model in fp32, for inference."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(dist.device()).eval()


@torch.no_grad()
def measure(
    out: Path, seed: int
) -> tuple[dict[str, Any], list[tuple[str, str, str]], tuple[str, int]]:
    """(content of `summary.json`; samples as (question, answer before PPO, answer after PPO); a
    question and the `--seed` of a chat in which PPO makes the first answer kind, or the first
    question where it does nowhere)."""
    rows = [
        json.loads(line)
        for line in (out / "toy/data/heldout.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    questions = [Question(**row["about"]) for row in rows]
    prompts = [row["prompt"] for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(out / "ppo/actor")
    reference = load_lm(out / "sft")
    actor = load_lm(out / "ppo/actor")
    classifier = AutoModelForSequenceClassification.from_pretrained(
        out / "reward", dtype=torch.float32
    )
    reward = ScalarModel(classifier).to(dist.device()).eval()
    (before, first), (after, last) = (
        sample_answers(model, tokenizer, prompts, seed) for model in (reference, actor)
    )
    kl = kl_k1(
        *(response_logprobs(PolicyModel(model), last, 1.0).logprobs for model in (actor, reference))
    )
    results = {step: json.loads((out / step / "result.json").read_text()) for step in STEPS}
    summary = {
        "sft_eval_loss_before": results["sft"]["eval_loss_before"],
        "sft_eval_loss_after": results["sft"]["eval_loss_after"],
        "reward_eval_accuracy_before": results["reward"]["eval_accuracy_before"],
        "reward_eval_accuracy": results["reward"]["eval_accuracy_after"],
        "ppo_reward_before": float(reward(*full_sequences(first), last_only=True).mean()),
        "ppo_reward_after": float(reward(*full_sequences(last), last_only=True).mean()),
        "true_rule_rate_sft": rule_rate(questions, before),
        "true_rule_rate_ppo": rule_rate(questions, after),
        "ppo_kl_per_token": float(kl[last.response_mask].mean()),
        "distinct_answer_rate": len(set(after)) / len(after),
        "heldout_prompts": len(prompts),
        "world_size": results["ppo"]["world_size"],
        "seconds_per_step": {step: float((out / f"{step}.seconds").read_text()) for step in STEPS},
        "versions": {package: version(package) for package in PACKAGES},
    }
    samples = [(q.text, b, a) for q, b, a in zip(questions, before, after, strict=True)]
    turned = [
        keeps_rule(q, a) and not keeps_rule(q, b)
        for q, b, a in zip(questions, before, after, strict=True)
    ]
    shown = turned.index(True) if True in turned else 0
    return summary, samples[:SAMPLES], (questions[shown].text, seed + shown)


def show(
    summary: dict[str, Any], samples: list[tuple[str, str, str]], to_ask: tuple[str, int], out: Path
) -> None:
    """Print the table, the samples, the paths of the outputs, and a chat that begins with the
    question `to_ask`."""
    lines = [
        ("SFT: loss on held-out rows", "sft_eval_loss_before", "sft_eval_loss_after"),
        (
            "reward model: accuracy on held-out pairs",
            "reward_eval_accuracy_before",
            "reward_eval_accuracy",
        ),
        ("PPO: learned reward on held-out prompts", "ppo_reward_before", "ppo_reward_after"),
        ("PPO: answers that follow the true rule", "true_rule_rate_sft", "true_rule_rate_ppo"),
    ]
    print(f"\n{'':42}{'before':>9}{'after':>9}")
    for label, before, after in lines:
        print(f"{label:42}{summary[before]:9.3f}{summary[after]:9.3f}")
    print(f"{'KL to the reference, nats per token':42}{'':9}{summary['ppo_kl_per_token']:9.3f}")
    print(f"{'distinct answers':42}{'':9}{summary['distinct_answer_rate']:9.3f}")
    for question, before_text, after_text in samples:
        print(escaped(f"\n  prompt: {question}\n  before: {before_text}\n  after : {after_text}"))
    outputs = {
        "models": ["sft", "reward", "ppo/actor", "ppo/critic"],
        "metrics": [f"{step}/metrics.jsonl" for step in STEPS],
        "summary": ["summary.json"],
        "reports, for a browser": [f"{step}/report.html" for step in STEPS],
    }
    for kind, paths in outputs.items():
        print(f"\n{kind}:", *(shown_path(out / path) for path in paths), sep="\n  ")
    for purpose, command in next_commands(out, *to_ask).items():
        print(f"\n{purpose}:\n  {command}")


def next_commands(out: Path, question: str, seed: int) -> dict[str, str]:
    """Purpose -> a command to try on the outputs, for a shell; `question` is what to type in the
    chat of that seed."""
    sft = out / "sft"
    actor = out / "ppo/actor"
    purpose = f"chat with the model after PPO (actor) and before it (sft); type first '{question}'"
    tools = {
        purpose: ["chat", "--model", actor, "--compare", sft, "--seed", seed],
        "evaluate both models on the held-out prompts": [
            "evaluate",
            "--model",
            sft,
            actor,
            "--data_path",
            out / "toy/data/heldout.jsonl",
            "--reward_model_name_or_path",
            out / "reward",
            "--max_prompt_seq_len",  # as in run_step3_ppo.sh; the toy model has few positions
            64,
            "--max_tokens",
            48,
            "--show",
            3,
        ],
    }
    return {
        purpose: tool_command(str(tool), list(map(str, words)))
        for purpose, (tool, *words) in tools.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure and show the result of the quickstart.")
    parser.add_argument("out", type=Path, metavar="OUT", help="OUT_DIR of the quickstart")
    parser.add_argument(
        "--seed", type=int, default=1234, metavar="N", help="sampling seed (default: 1234)"
    )
    args = parser.parse_args()
    quiet_libraries()
    summary, samples, to_ask = measure(args.out, args.seed)
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    show(summary, samples, to_ask, args.out)


if __name__ == "__main__":
    main()
