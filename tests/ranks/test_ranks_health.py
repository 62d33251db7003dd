"""`--stop_on_health` on two real ranks: a constant reward ends the run with exit code 6; the same command resumes."""

import json

import pytest
from launch import forked, metrics_of, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_an_unhealthy_run_stops_and_resumes_as_if_it_had_not(assets, tmp_path):
    (tmp_path / "constant.py").write_text("def score(responses):\n    return [1.0] * len(responses)\n")
    words = f"--actor_model_name_or_path {assets}/lm --data_path {assets}/prompts.jsonl --data_split 0,0,1 --dtype fp32"
    words += f" --use_reward_model False --reward_function {tmp_path}/constant.py:score --advantage_estimator grpo"
    words += " --n_samples_per_prompt 2 --per_device_generation_batch_size 2 --per_device_training_batch_size 4"
    words += (
        f" --max_prompt_seq_len 64 --max_answer_seq_len 4 --max_steps 3 --reward_workers 1 --output_dir {tmp_path}/o"
    )
    words += " --stop_on_health warning"
    stopped = forked(2, "training/step3_ppo/main.py", *words.split())
    assert stopped.returncode == 6, stopped.stderr[-2000:]
    [line] = [line for line in stopped.stderr.splitlines() if line.startswith("error")]
    assert line.startswith("error: --stop_on_health warning: step 1: scores_equal: reward/score_std is 0, below 0.001")
    assert line.endswith("checkpoints/step_000001; run the same command again to resume)")
    assert not (tmp_path / "o/result.json").exists()

    succeed(forked(2, "training/step3_ppo/main.py", *words.split()))
    events = [json.loads(line) for line in (tmp_path / "o/health.jsonl").read_text().splitlines()]
    assert [(event["step"], event["name"], event["level"]) for event in events] == [(1, "scores_equal", "warning")]
    assert [line["reward/score_mean"] for line in metrics_of(tmp_path / "o")] == [1.0] * 3
    assert (tmp_path / "o/result.json").exists()
