"""The three steps on data of published shapes, by their command lines, in one launch of one rank."""

import math

import pytest
from launch import metrics_of, run_steps
from real_shapes import hh, sharegpt, ultrafeedback, verl, write_lines, write_parquet

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

COMMON = "--dtype fp32 --per_device_train_batch_size 4 --learning_rate 0.01 --max_seq_len 120 --eval_iters 1"
PPO = (
    "--dtype fp32 --max_prompt_seq_len 100 --max_answer_seq_len 6 --per_device_generation_batch_size 4 "
    "--per_device_training_batch_size 4 --num_warmup_steps 0 --actor_learning_rate 0.003 --use_reward_model False "
    "--advantage_estimator grpo --n_samples_per_prompt 2"
)
REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):  # as in verl
    assert data_source == "openai/gsm8k" and extra_info["answer"] == f"#### {ground_truth}"
    return {"score": 0.5 + float(ground_truth in solution_str), "seen": 1.0}

def math(responses, ground_truth, **columns):
    assert all(truth is not None for truth in ground_truth)
    return [2.0] * len(responses)

def chat(completions, prompts, **kwargs):  # as in TRL; "chat" rows are messages
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [3.0] * len(completions)

def every(responses, **columns):
    return [1.0] * len(responses)
"""


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """The folder of the outputs, and what `run_steps` found."""
    folder = tmp_path_factory.mktemp("real_data")
    (folder / "rewards.py").write_text(REWARDS)
    ultra = write_lines(folder / "ultra.jsonl", ultrafeedback(12))
    share = write_lines(folder / "share.jsonl", sharegpt(12))
    transcripts = write_lines(folder / "hh.jsonl", hh(12))
    arithmetic = write_parquet(folder / "arithmetic.parquet", verl(8))
    write_lines(folder / "chat.jsonl", [{"data_source": "chat", **row} for row in ultrafeedback(12)])
    write_parquet(folder / "math.parquet", verl(8, "math"))
    every_row = {"sft": "1,0,0", "reward": "0,1,0", "ppo": "0,0,1"}
    cases = {}

    def case(name: str, step: str, words: str) -> None:
        known = f"--data_split {every_row[step]} --output_dir {folder / name} {PPO if step == 'ppo' else COMMON}"
        model = "--actor_model_name_or_path" if step == "ppo" else "--model_name_or_path"
        cases[name] = (step, f"{model} {assets / 'lm'} {known} {words}".split())

    for step, name, file in (("sft", "hh", transcripts), ("reward", "hh", transcripts), ("reward", "ultra", ultra)):
        case(f"{name}_{step}", step, f"--data_path {file}")
    for name, file in (("share", share), ("hh", transcripts)):
        case(f"{name}_ppo", "ppo", f"--data_path {file} --reward_function {folder}/rewards.py:every")
    case("verl", "ppo", f"--data_path {arithmetic} --reward_function {folder}/rewards.py:compute_score")
    case("mixed_sft", "sft", f"--data_path {ultra}:3 {share}@4 --eval_fraction 0.2")
    case(
        "mixed_ppo", "ppo",
        f"--data_path {folder}/math.parquet:2 {folder}/chat.jsonl:1 --reward_function "
        f"math={folder}/rewards.py:math chat={folder}/rewards.py:chat",
    )  # fmt: skip
    return folder, run_steps(cases, folder, ranks=1)


def test_every_step_trains_on_every_form(runs):
    folder, found = runs
    assert {name: end["error"] for name, end in found.items()} == dict.fromkeys(found)
    assert len(found) == 8
    for name in found:
        assert (folder / name / "result.json").exists(), name
        losses = [line[key] for line in metrics_of(folder / name) for key in ("loss", "policy/loss") if key in line]
        assert losses and all(map(math.isfinite, losses)), name


def test_a_verl_function_scores_verl_rows_and_its_other_numbers_are_logged(runs):
    folder, _ = runs
    for line in metrics_of(folder / "verl"):
        assert 0.5 <= line["reward/score_mean"] <= 1.5
        assert line["reward/compute_score/seen"] == 1.0
        assert line["reward/function_faults"] == 0


def test_each_set_of_a_mixture_has_its_own_loss(runs):
    folder, _ = runs
    first, *lines = metrics_of(folder / "mixed_sft")
    assert {"eval_loss/ultra", "eval_loss/share"} <= set(first)
    found = {name for line in lines for name in line}
    assert {"loss/ultra", "loss/share"} <= found
    for line in lines:
        if "loss/ultra" in line and "loss/share" in line:
            low, high = sorted([line["loss/ultra"], line["loss/share"]])
            assert low <= line["loss"] + 1e-6 and line["loss"] <= high + 1e-6


def test_each_set_of_a_mixture_is_scored_by_its_own_function(runs):
    folder, _ = runs
    scores = {}
    for line in metrics_of(folder / "mixed_ppo"):
        assert 2.0 <= line["reward/score_mean"] <= 3.0
        scores |= {name: line[name] for name in ("reward/score_mean/math", "reward/score_mean/chat") if name in line}
    assert scores == {"reward/score_mean/math": 2.0, "reward/score_mean/chat": 3.0}
