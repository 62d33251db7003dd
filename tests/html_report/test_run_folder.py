"""Reading the files of a run: complete, damaged, resumed and unfinished."""

import pytest
from report_runs import SAMPLE, ppo_lines, write_lines, write_run

from dschat_ppo.errors import UserError
from dschat_ppo.html_report.run_folder import read_run, read_runs


def test_metrics_become_columns(tmp_path):
    first = {"step": 1, "time": 5.0, "rollout/count": 4, "text": "x"}
    again = {"step": 2, "time": 6.5, "loss": None, "rollout/count": 5}  # of two lines of a step the later counts
    write_run(tmp_path, [first, {"step": 2, "time": 6.0, "loss": 1.0}, again])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "ti')  # incomplete: the run is running
    run = read_run(tmp_path, "a")
    assert run.metrics == {"rollout/count": [(1, 4), (2, 5)], "loss": [(2, None)]}
    assert run.times == {1: 5.0, 2: 6.5}
    assert (run.result, run.health, run.answers, run.starts) == (None, None, [], [])
    config = {"actor_model_name_or_path": "m", "advantage_estimator": "grpo"}
    assert read_run(write_run(tmp_path / "grpo", [first], config), "a").kind == "PPO (grpo)"


def test_damaged_lines_and_files_are_skipped_and_the_rest_is_read(tmp_path):
    write_run(tmp_path, [{"step": 1, "loss": 1.0}])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n[1]\n{"step": 2, "loss": 2.0}\n')
    (tmp_path / "config.yaml").write_text("remote_reward_url: http://me:secret@host/score\n")
    assert read_run(tmp_path, "a").config == {"remote_reward_url": "http://***@host/score"}
    (tmp_path / "config.yaml").write_text("{a: [")
    (tmp_path / "result.json").write_text("{")
    run = read_run(tmp_path, "a")
    assert run.metrics["loss"] == [(1, 1.0), (2, 2.0)]
    assert run.config == {}
    assert run.result is None


def test_answers_of_evaluations_and_of_training(tmp_path):
    row = {"index": 0, "prompt": "p", "answers": ["a", "b"], "scores": [1.0, None], "lengths": [3, 4],
           "ended": ["stop", "length"], "kl": [0.75, None],
           "scores_by_source": {"rule": [1.0, None], "learned": [0.5, 2.0]}}  # fmt: skip
    alone = {"prompt": "p", "answers": ["a"], "scores": [1], "lengths": [3], "ended": ["eos"], "kl": None,
             "scores_by_source": {}}  # fmt: skip
    sample = {"step": 2, "prompt": "q", "answer": "c", "tokens": 5, "score": 2.0, "scores": {"rule": 2.0}, "kl": 0.5,
              "length": 5, "ended": "stop"}  # fmt: skip
    files = {"step_000010": [row], "step_000011": [alone], "step_000011_copy": [row], "samples": [sample]}
    run = read_run(write_run(tmp_path, ppo_lines(1), **files), "a")
    found = [
        (one.kind, one.step, one.prompt, one.text, one.score, one.kl, one.tokens, one.ended) for one in run.answers
    ]
    assert found == [
        ("training", 2, "q", "c", 2.0, 0.5, 5, "stop"),
        ("held-out", 10, "p", "a", 1.0, 0.25, 3, "stop"),  # KL: 0.75 over 3 tokens
        ("held-out", 10, "p", "b", None, None, 4, "length"),
        ("held-out", 11, "p", "a", 1, None, 3, "eos"),
    ]
    assert [one.scores for one in run.answers] == [
        {"rule": 2.0}, {"rule": 1.0, "learned": 0.5}, {"rule": None, "learned": 2.0}, {},
    ]  # fmt: skip


def test_turns_of_episodes(tmp_path):
    turns = [{"role": "model", "text": "3", "reward": 0.5}, {"role": "environment", "text": "no"},
             {"role": "call", "text": "f", "reward": None}]  # fmt: skip
    row = {"prompt": "p", "answers": ["a", "b"], "lengths": [3, 4], "ended": ["eos", "eos"], "kl": None}
    files = {"step_1": [row, row | {"turns": [[], turns]}], "samples": [SAMPLE | {"turns": turns}]}
    run = read_run(write_run(tmp_path, ppo_lines(1), **files), "a")
    read = [("model", "3", 0.5), ("environment", "no", None), ("call", "f", None)]
    assert [list(one.turns) for one in run.answers] == [read, [], [], [], read]


def test_what_is_no_run_is_refused_with_a_way_out(tmp_path):
    run = write_run(tmp_path / "sft", [])
    with pytest.raises(UserError, match=r"has no metrics.jsonl.*name its runs: .*/sft$"):
        read_run(tmp_path, "a")
    with pytest.raises(UserError, match="no finished step yet"):
        read_run(run, "a")
    write_lines(run / "metrics.jsonl", ppo_lines(1))
    with pytest.raises(UserError, match="named twice"):
        read_runs([run, run / "../sft"])
