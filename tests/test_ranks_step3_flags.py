"""Step 3 as a user runs it, two ranks each, with the options that no other test of real runs takes."""

import json

import pytest
import yaml
from launch import deepspeed, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

COMMON = (
    "--data_split 0,0,1 --dtype fp32 --actor_zero_stage 3 --critic_zero_stage 3 --max_prompt_seq_len 32 "
    "--max_answer_seq_len 6 --per_device_generation_batch_size 2 --n_samples_per_prompt 4 "
    "--per_device_training_batch_size 4 --num_warmup_steps 0 --actor_learning_rate 0.003 --enable_test_mode"
)
REWARDS = """
import math, os, time

def letters(prompts, responses, **columns):
    return [response.count("e") + response.count("a") - 0.1 * len(response) for response in responses]

def equal(prompts, responses, **columns):
    return [1.0] * len(responses)

def bad(prompts, responses, number, **columns):
    if len(responses) > 1 or number[0] % 4 == 3:
        raise RuntimeError("cannot score this")
    return [math.nan if number[0] % 4 == 2 else float(number[0])]

def truth(prompt, response):
    return float("e" in response)
"""


@pytest.fixture(scope="module")
def data(assets):
    """Numbered prompts, held-out prompts, plain text and reward functions."""
    prompts = [json.loads(line) for line in (assets / "prompts.jsonl").read_text().splitlines()]
    numbered = [{**row, "number": number} for number, row in enumerate(prompts)]
    for name, rows in {"numbered": numbered, "held_out": numbered[:5], "plain": [{"text": "a few words"}] * 9}.items():
        (assets / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (assets / "rewards.py").write_text(REWARDS, encoding="utf-8")
    return assets


def step3(data, folder, steps: int, *words: object, ranks: int = 2):
    """(result of the process, metrics line by line)."""
    flags = [*COMMON.split(), "--test_stop_step", steps, "--data_path", data / "numbered.jsonl"]
    flags += ["--actor_model_name_or_path", data / "lm", "--output_dir", folder, *words]
    result = deepspeed(ranks, "training/step3_ppo/main.py", *flags)
    lines = folder / "metrics.jsonl"
    return result, [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []


def test_remax_with_a_function_a_learned_reward_and_plain_text(data, tmp_path):
    words = ["--advantage_estimator", "remax", "--critic_model_name_or_path", data / "reward", "--kl_target", 0.01]
    words += ["--reward_function", f"{data / 'rewards.py'}:letters:0.5", "--normalize_rewards", "running"]
    words += ["--unsupervised_dataset_name", data / "plain.jsonl", "--unsup_coef", 0.1]
    result, lines = step3(data, tmp_path / "out", 3, *words)
    succeed(result)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        total = line["reward/model_mean"] + 0.5 * line["reward/letters_mean"]
        assert line["reward/score_mean"] == pytest.approx(total, abs=1e-4)
        assert line["ptx/loss"] > 0 and "value/loss" not in line and "lr/critic" not in line
    assert lines[0]["ptx/loss"] > lines[-1]["ptx/loss"]
    assert lines[0]["coef/kl"] == 0.1 != lines[-1]["coef/kl"]
    assert (tmp_path / "out/actor/model.safetensors").exists() and not (tmp_path / "out/critic").exists()


def test_bad_calls_of_a_reward_function_cost_their_rows(data, tmp_path):
    words = ["--advantage_estimator", "rloo", "--use_reward_model", "False", "--kl_coef", 0, "--reward_default", -7]
    words += ["--reward_function", f"{data / 'rewards.py'}:bad", "--num_train_epochs", 1, "--reward_clip", 0]
    result, lines = step3(data, tmp_path / "out", 10, *words)
    succeed(result)
    assert len(lines) == 10  # 40 prompts, 4 a step, each seen once: a quarter raise, a quarter are NaN
    assert sum(line["reward/function_faults"] for line in lines) == 20 * 4
    good = sum(number for number in range(40) if number % 4 < 2)
    assert sum(line["reward/score_mean"] for line in lines) * 4 == pytest.approx(good - 7 * 20)
    assert "cannot score this" in result.stdout + result.stderr


def test_dynamic_sampling_fills_steps_and_says_so_where_it_cannot(data, tmp_path):
    words = ["--advantage_estimator", "grpo", "--use_reward_model", "False", "--kl_coef", 0, "--dynamic_sampling"]
    words += ["--dynamic_sampling_rounds", 2]
    result, lines = step3(data, tmp_path / "a", 2, *words, "--reward_function", f"{data / 'rewards.py'}:letters")
    succeed(result)
    assert all(line["dynamic_sampling/filled_rows"] == 0 for line in lines)
    assert all(line["reward/equal_groups_share"] == 0 for line in lines)
    result, lines = step3(data, tmp_path / "b", 1, *words, "--reward_function", f"{data / 'rewards.py'}:equal")
    succeed(result)
    assert lines[0]["dynamic_sampling/rounds"] == 2 and lines[0]["dynamic_sampling/kept_share"] == 0
    assert lines[0]["dynamic_sampling/filled_rows"] == 16
    assert lines[0]["grad_norm/actor"] == 0
    assert "dynamic sampling: 2 rounds gave too few" in result.stdout + result.stderr


def test_the_critic_warms_up_for_exactly_n_rollouts(data, tmp_path):
    words = [
        "--critic_model_name_or_path",
        data / "reward",
        "--critic_warmup_rollouts",
        2,
        "--lr_scheduler_type",
        "linear",
    ]
    result, lines = step3(data, tmp_path / "out", 4, *words)
    succeed(result)
    assert ["grad_norm/actor" in line for line in lines] == [False, False, True, True]
    assert all(line["grad_norm/critic"] > 0 for line in lines)
    assert [line["lr/actor"] for line in lines] == pytest.approx([0.003, 0.003, 0.003, 0.0015])  # 4 updates in all


def test_a_critic_without_reward_model_starts_from_the_actor_with_a_new_head(data, tmp_path):
    words = ["--use_reward_model", "False", "--reward_function", f"{data / 'rewards.py'}:letters"]
    result, lines = step3(data, tmp_path / "out", 1, *words)
    succeed(result)
    assert "no scalar head; a new one is initialised" in result.stdout + result.stderr
    assert lines[0]["value/loss"] > 0
    assert (tmp_path / "out/critic/config.json").exists()


def test_evaluation_writes_answers_and_remembers_the_best(data, tmp_path):
    words = ["--advantage_estimator", "grpo", "--use_reward_model", "False", "--eval_samples", 4, "--eval_interval", 1]
    words += ["--reward_function", f"{data / 'rewards.py'}:letters", "--eval_data_path", data / "held_out.jsonl"]
    words += ["--eval_reward_function", f"{data / 'rewards.py'}:truth", "--eval_batch_size", 2]
    results = {}
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        per_rank = ["--per_device_generation_batch_size", 4 // ranks, "--per_device_training_batch_size", 8 // ranks]
        result, lines = step3(data, out, 2, *words, *per_rank, ranks=ranks)
        succeed(result)
        assert [line["step"] for line in lines] == [0, 1, 2]
        rows = [json.loads(line) for line in (out / "eval/step_000000.jsonl").read_text().splitlines()]
        assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
        scores = [float("e" in answer) for row in rows for answer in row["answers"]]
        assert [score for row in rows for score in row["scores"]] == scores
        assert lines[0]["eval/score"] == pytest.approx(sum(scores) / 20)
        found = json.loads((out / "result.json").read_text())
        best = max(lines, key=lambda line: line["eval/score"])
        assert (found["best_step"], found["best_eval_score"]) == (best["step"], best["eval/score"])
        assert (out / "best/actor").exists() == (best["step"] > 0)
        results[ranks] = [(row["index"], len(row["answers"])) for row in rows]
    assert results[1] == results[2]


def test_settings_are_written_down(data, tmp_path):
    words = ["--advantage_estimator", "gpg", "--policy_loss", "reinforce", "--use_reward_model", "False"]
    words += ["--reward_function", f"{data / 'rewards.py'}:letters", "--importance_correction", "sequence"]
    result, _ = step3(data, tmp_path / "out", 1, *words)
    succeed(result)
    saved = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    again, _ = step3(data, tmp_path / "again", 1, "--config", tmp_path / "out/config.yaml")
    succeed(again)
    assert saved["advantage_estimator"] == "gpg"
    first, second = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("out", "again"))
    assert first["reward/total_mean_after"] == second["reward/total_mean_after"]
