"""The three steps with their flags on two ranks. `tests/docs/test_commands.py` runs their
scripts."""

import json
import math
import shutil

import pytest
import torch
from launch import metrics_of, numbers_of, run_steps
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from dschat_ppo.config.cli import parse
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data.prepare import prepare

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def out(assets, tmp_path_factory):
    """Output folders `sft`, `reward` and `ppo` of runs on two ZeRO-3 ranks in fp32."""
    folder = tmp_path_factory.mktemp("steps")
    (folder / "sft.yaml").write_text(
        "learning_rate: 1.0\nnum_train_epochs: 3\nzero_stage: 3\ndtype: fp32\n"
    )
    tokenizer = AutoTokenizer.from_pretrained(shutil.copytree(assets / "lm", folder / "lm"))
    # not its EOS
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|system|>")
    tokenizer.save_pretrained(folder / "lm")
    sft = (
        f"--config {folder}/sft.yaml --model_name_or_path {folder}/lm --data_path"
        f" {assets}/sft.jsonl"
    )
    sft += (
        " --data_split 1,0,0 --learning_rate 0.01 --per_device_train_batch_size 3 --output_dir"
        f" {folder}/sft"
    )
    sft += " --eval_interval 2 --max_seq_len 32 --truncation left"
    reward = (
        f"--model_name_or_path {folder}/sft --data_path {assets}/pairs.jsonl --data_split 0,1,0"
        " --dtype fp32"
    )
    reward += (
        f" --output_dir {folder}/reward --zero_stage 3 --per_device_train_batch_size 4"
        " --learning_rate 0.005"
    )
    ppo = (
        f"--actor_model_name_or_path {folder}/sft --critic_model_name_or_path {folder}/reward"
        " --dtype fp32"
    )
    ppo += (
        f" --data_path {assets}/prompts.jsonl --data_split 0,0,1 --output_dir {folder}/ppo"
        " --actor_zero_stage 3"
    )
    ppo += (
        " --critic_zero_stage 3 --per_device_generation_batch_size 4"
        " --per_device_training_batch_size 2"
    )
    ppo += (
        " --generation_batches 2 --ppo_epochs 2 --gradient_accumulation_steps 2"
        " --max_answer_seq_len 8"
    )
    ppo += (
        " --max_prompt_seq_len 64 --actor_learning_rate 0.001 --num_warmup_steps 0"
        " --temperature 0.8"
    )
    ppo += " --deterministic"
    lines = {
        "sft": ("sft", sft),
        "reward": ("reward", reward),
        "ppo": ("ppo", ppo),
    }
    found = run_steps(
        {name: (step, words.split()) for name, (step, words) in lines.items()}, folder
    )
    assert not any(run["error"] for run in found.values())
    (folder / "reward.log").write_text(found["reward"]["said"])
    return folder


@pytest.mark.parametrize("model", ["sft", "ppo/actor"])
def test_plain_transformers_stops_where_the_chat_template_ends_an_answer(out, model):
    assert GenerationConfig.from_pretrained(out / model).eos_token_id == [1, 4]


def test_sft_lowers_the_loss_on_held_out_rows(out):
    result = json.loads((out / "sft/result.json").read_text())
    assert result["eval_loss_after"] < result["eval_loss_before"] - 0.5
    assert result["eval_perplexity_after"] == pytest.approx(math.exp(result["eval_loss_after"]))
    assert result["world_size"] == 2


def test_a_reward_model_from_a_base_model_logs_that_its_head_is_new(out):
    log = (out / "reward.log").read_text()
    assert log.count("has no scalar head; a new one is initialised") == 1
    result = json.loads((out / "reward/result.json").read_text())
    assert {"eval_accuracy_after", "eval_margin_after", "eval_loss_before"} <= set(result)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        out / "reward", output_loading_info=True
    )
    assert model.config.num_labels == 1
    assert not info["missing_keys"]


def test_first_ratio_is_one_and_kl_to_the_reference_starts_at_zero(out):
    first, *later = metrics_of(out / "ppo")
    assert first["policy/first_log_ratio_abs_max"] < 1e-5
    for name in ("kl/ref_k1", "kl/ref_k3", "reward/kl_penalty"):
        assert abs(first[name]) < 1e-5, (
            "in fp32 the old log-probs, seen while sampling, are those of the reference"
        )
    assert first["rollout/logprob_diff_max"] < 1e-4
    for line in later:
        assert line["policy/first_log_ratio_abs_max"] < 1e-5
        assert line["kl/ref_k3"] > 0


@pytest.mark.release
def test_a_run_is_reproducible_from_its_seed(out):
    """For each change `test_ranks_resume.py` shows it of runs that are stopped, bit for bit."""
    words = ["--config", out / "ppo/config.yaml", "--output_dir", out / "again"]
    run_steps({"again": ("ppo", words)}, out)
    first, second = (numbers_of(out / name) for name in ("ppo", "again"))
    assert first == second and len(first) == 3


def held_out_rows(assets, use: str, name: str, split: str):
    """The rows that the run held out for evaluation: same data, same division."""
    words = (
        f"--model_name_or_path m --data_path {assets}/{name}.jsonl --data_split {split}"
        " --output_dir o"
    )
    config = parse("sft" if use == "sft" else "reward", words.split())
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    return prepare(
        StepData(use, config.data, 32 if use == "sft" else 512, eval_fraction=0.05), tokenizer
    ).eval


def test_the_saved_sft_model_has_the_reported_loss_in_plain_transformers(assets, out):
    model = AutoModelForCausalLM.from_pretrained(out / "sft")
    total, count = 0.0, 0
    for row in held_out_rows(assets, "sft", "sft", "1,0,0"):
        prompt, answer = row["prompt_ids"], row["answers"][0]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0].double()
        for place, token in enumerate(answer, start=len(prompt)):
            total -= float(torch.log_softmax(logits[place - 1], dim=-1)[token])
            count += 1
    assert total / count == pytest.approx(
        json.loads((out / "sft/result.json").read_text())["eval_loss_after"], abs=1e-5
    )


@torch.no_grad()
def test_the_saved_reward_model_has_the_reported_margin_and_scores_in_plain_transformers(
    assets, out
):
    model = AutoModelForSequenceClassification.from_pretrained(out / "reward")
    rows = held_out_rows(assets, "preference", "pairs", "0,1,0")
    scores = [
        [float(model(torch.tensor([row["prompt_ids"] + a])).logits) for a in row["answers"]]
        for row in rows
    ]
    result = json.loads((out / "reward/result.json").read_text())
    assert sum(a - b for a, b in scores) / len(scores) == pytest.approx(
        result["eval_margin_after"], abs=1e-5
    )
    mean = sum(map(sum, scores)) / (2 * len(scores))
    spread = math.sqrt(
        sum((score - mean) ** 2 for pair in scores for score in pair) / (2 * len(scores))
    )
    assert (model.config.reward_mean, model.config.reward_std) == pytest.approx(
        (mean, spread), abs=1e-5
    )
    assert (result["reward_mean"], result["reward_std"]) == (
        model.config.reward_mean,
        model.config.reward_std,
    )
