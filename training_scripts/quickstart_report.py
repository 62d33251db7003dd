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
from dschat_ppo.errors import printable_line
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel, response_logprobs
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.run.start_and_end import tool_command
from dschat_ppo.tools.toy import Question, keeps_rule
from dschat_ppo.types import Rollout, full_sequences, to_device

SAMPLES = 5
MAX_NEW_TOKENS = 48
STEPS = ("sft", "reward", "ppo")
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "datasets", "tensorboard")


def sample_responses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[Any], seed: int
) -> tuple[list[str], Rollout]:
    """One response to each prompt at temperature 1, as text and as tokens: that of a chat with
    `--seed SEED + ROW`."""
    rows = [{"prompt_ids": encode_prompt(tokenizer, prompt)} for prompt in prompts]
    batch = to_device(collate_prompts(rows, range(len(rows)), filler_id(tokenizer)), dist.device())
    config = GenerationConfig(
        SamplingParameters(), StoppingCriteria(MAX_NEW_TOKENS, (tokenizer.eos_token_id,))
    )
    seeds = torch.cat([row_seeds(0, 1, seed + row) for row in range(len(rows))])
    rollout = generate(model, RolloutRequest(batch, seeds), config)
    texts = []
    for ids, mask in zip(rollout.response_ids, rollout.response_mask, strict=True):
        texts.append(str(tokenizer.decode(ids[mask], skip_special_tokens=True)))
    return texts, rollout


def rule_rate(questions: Sequence[Question], responses: Sequence[str]) -> float:
    """Fraction of the responses that follow the true rule."""
    return sum(map(keeps_rule, questions, responses)) / len(responses)


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
    held_out = (out / "toy/data/heldout.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in held_out.splitlines()]
    questions = [Question(**row["about"]) for row in rows]
    prompts = [row["prompt"] for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(out / "ppo/actor")
    reference = load_lm(out / "sft")
    actor = load_lm(out / "ppo/actor")
    classifier = AutoModelForSequenceClassification.from_pretrained(
        out / "reward", dtype=torch.float32
    )
    reward = ScalarModel(classifier).to(dist.device()).eval()
    before, rollout_before = sample_responses(reference, tokenizer, prompts, seed)
    after, rollout_after = sample_responses(actor, tokenizer, prompts, seed)
    actor_logprobs = response_logprobs(PolicyModel(actor), rollout_after, 1.0).logprobs
    reference_logprobs = response_logprobs(PolicyModel(reference), rollout_after, 1.0).logprobs
    kl = kl_k1(actor_logprobs, reference_logprobs)
    scores_before = reward(*full_sequences(rollout_before), last_only=True)
    scores_after = reward(*full_sequences(rollout_after), last_only=True)
    results = {step: json.loads((out / step / "result.json").read_text()) for step in STEPS}
    summary = {
        "sft_eval_loss_before": results["sft"]["eval_loss_before"],
        "sft_eval_loss_after": results["sft"]["eval_loss_after"],
        "reward_eval_accuracy_before": results["reward"]["eval_accuracy_before"],
        "reward_eval_accuracy": results["reward"]["eval_accuracy_after"],
        "ppo_reward_before": float(scores_before.mean()),
        "ppo_reward_after": float(scores_after.mean()),
        "true_rule_rate_sft": rule_rate(questions, before),
        "true_rule_rate_ppo": rule_rate(questions, after),
        "ppo_kl_per_token": float(kl[rollout_after.response_mask].mean()),
        "distinct_answer_rate": len(set(after)) / len(after),
        "heldout_prompts": len(prompts),
        "world_size": results["ppo"]["world_size"],
        "seconds_per_step": {step: float((out / f"{step}.seconds").read_text()) for step in STEPS},
        "versions": {package: version(package) for package in PACKAGES},
    }
    texts = [question.text for question in questions]
    samples = list(zip(texts, before, after, strict=True))
    row = first_row_made_kind(questions, before, after)
    return summary, samples[:SAMPLES], (texts[row], seed + row)


def first_row_made_kind(
    questions: Sequence[Question], before: Sequence[str], after: Sequence[str]
) -> int:
    """The first row whose response follows the rule after PPO and not before it; 0 if there is
    none."""
    rows = zip(questions, before, after, strict=True)
    for index, (question, text_before, text_after) in enumerate(rows):
        if keeps_rule(question, text_after) and not keeps_rule(question, text_before):
            return index
    return 0


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
        print(f"\n  prompt: {question}")
        print(f"  before: {printable_line(before_text)}\n  after : {printable_line(after_text)}")
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
    commands = {}
    for purpose, (tool, *words) in tools.items():
        commands[purpose] = tool_command(str(tool), list(map(str, words)))
    return commands


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
