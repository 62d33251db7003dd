"""`--stop_on_health` on two real ranks: a constant reward ends the run with exit code 6; the same command resumes."""

import json

import pytest
from launch import forked, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_unhealthy_run_stops_and_resumes_as_if_it_had_not(assets, tmp_path):
    (tmp_path / "constant.py").write_text("def score(responses):\n    return [1.0] * len(responses)\n")
    words = f"--actor_model_name_or_path {assets}/lm --data_path {assets}/prompts.jsonl --data_split 0,0,1 --dtype fp32"
    words += f" --use_reward_model False --reward_function {tmp_path}/constant.py:score --advantage_estimator grpo"
    words += " --n_samples_per_prompt 2 --per_device_generation_batch_size 2 --per_device_training_batch_size 4"
    words += " --max_prompt_seq_len 64 --max_answer_seq_len 4 --max_steps 3 --reward_workers 1"

    def run(start, name: str, *more: str):
        folder = ["--output_dir", str(tmp_path / name)]
        return start(2, "training/step3_ppo/main.py", *words.split(), *folder, *more)

    succeed(run(forked, "whole"))
    stopped = run(forked, "stopped", "--stop_on_health", "warning")
    assert stopped.returncode == 6, stopped.stderr[-2000:]
    [line] = [line for line in stopped.stderr.splitlines() if line.startswith("error")]
    assert line.startswith("error: --stop_on_health warning: step 1: scores_equal: reward/score_std is 0, below 0.001")
    assert line.endswith("checkpoints/step_000001; run the same command again to resume)")
    assert [event["name"] for event in read(tmp_path / "stopped/health.jsonl")] == ["scores_equal"]
    assert not (tmp_path / "stopped/result.json").exists()

    succeed(run(forked, "stopped", "--stop_on_health", "warning"))
    whole, resumed = (read(tmp_path / name / "health.jsonl") for name in ("whole", "stopped"))
    assert resumed == whole and [(event["step"], event["level"]) for event in whole] == [(1, "warning")]
    steps = [
        [line["reward/score_mean"] for line in read(tmp_path / name / "metrics.jsonl")] for name in ("whole", "stopped")
    ]
    assert steps == [[1.0] * 3] * 2
    assert (tmp_path / "stopped/result.json").exists()
