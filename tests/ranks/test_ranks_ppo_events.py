"""Step 3 with DeepSpeed engines on one rank: the order of its events in whole, stopped and resumed runs."""

import json
import sys

import pytest
import torch
from launch import metrics_of, run, succeed
from safetensors.torch import load_file

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

NOT_COMPARED = ("time", "time/", "memory/")
FLAGS = (
    "--data_split 0,0,1 --dtype fp32 --actor_zero_stage 2 --critic_zero_stage 0 --max_prompt_seq_len 32 "
    "--max_answer_seq_len 6 --per_device_generation_batch_size 4 --per_device_training_batch_size 2 --ppo_epochs 2 "
    "--num_warmup_steps 0 --actor_learning_rate 0.003 --critic_learning_rate 0.003 --enable_test_mode "
    "--test_stop_step 3 --save_minutes 0"
)
ALL = (
    "--critic_warmup_rollouts 1 --entropy_target 2 --entropy_coef 0.01 --kl_target 0.05 --normalize_rewards running "
    "--enable_ema --ema_decay 0.5 --unsup_coef 0.1 --eval_interval 2 --eval_max_prompts 4"
)
STOPS = [[0, 4], "rollout 2", [1, 2], [2, 0], None]
UPDATES = 4


@pytest.fixture(scope="module")
def found(assets, tmp_path_factory):
    """(folder of the outputs, name -> what each start did)"""
    folder = tmp_path_factory.mktemp("events")
    lines = [json.dumps({"text": "a few words " * count}) + "\n" for count in range(1, 30)]
    (folder / "texts.jsonl").write_text("".join(lines), encoding="utf-8")
    models = f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/reward"
    known = f"{models} --data_path {assets}/prompts.jsonl {FLAGS}"
    everything = f"--eval_data_path {assets}/prompts.jsonl --unsupervised_dataset_name {folder}/texts.jsonl {ALL}"
    cases = {
        "whole": (everything, [None]), "cut": (everything, STOPS), "kl": ("--target_kl 0.0001", [None]),
        "ratio": ("--max_log_ratio 0.001 --enable_ema", [None]),
    }  # fmt: skip
    cases = {name: ([*f"{known} {words} --output_dir {folder}/{name}".split()], stops)
             for name, (words, stops) in cases.items()}  # fmt: skip
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "tests/workers/ppo_events.py", str(folder / "cases.json"), str(folder / "found.json")]
    succeed(run(command))
    return folder, json.loads((folder / "found.json").read_text())


def rollout(step: int) -> list:
    return [f"rollout {step}", "reward", "score", f"advantages {step}"]


def update(step: int, number: int) -> list:
    done = [[step, "critic"]] if step == 1 else ["texts", [step, "actor", "critic"], "average"]
    return [*done, ["save_if_due", step - 1, number]]


def whole_run() -> list:
    did = ["evaluate 0"]
    for step in (1, 2, 3):
        did += rollout(step) + sum((update(step, number) for number in range(1, UPDATES + 1)), [])
        did += [f"evaluate {step}"] * (step > 1) + [["save_if_due", step, 0]]
    return did


def lines_of(folder) -> list[dict]:
    return [{name: line[name] for name in line if not name.startswith(NOT_COMPARED)} for line in metrics_of(folder)]


def test_the_order_of_a_run(found):
    [whole] = found[1]["whole"]
    assert whole["ended"] == "done" and whole["did"] == whole_run()


def test_a_run_that_is_stopped_and_resumed_does_the_same_once(found):
    starts = found[1]["cut"]
    assert [start["ended"] == "done" for start in starts] == [False] * 4 + [True]
    assert starts[1]["did"][-2:] == ["rollout 2", ["save_if_due", 1, 0]]
    del starts[1]["did"][-2:]  # this rollout is discarded
    assert sum((start["did"] for start in starts), []) == whole_run()


def test_a_run_that_is_stopped_and_resumed_has_the_same_result(found):
    folder, _ = found
    assert lines_of(folder / "cut") == lines_of(folder / "whole")
    before, after = (json.loads((folder / name / "result.json").read_text()) for name in ("whole", "cut"))
    assert {**before, "seconds": 0} == {**after, "seconds": 0}
    for part in ("actor", "actor_ema", "critic"):
        expected = load_file(folder / "whole" / part / "model.safetensors")
        weights = load_file(folder / "cut" / part / "model.safetensors")
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items()), part


@pytest.mark.parametrize(("case", "share", "averages"), [("kl", 0.5, 0), ("ratio", 0.25, 3)])
def test_limits_end_the_updates_of_each_step(found, case, share, averages):
    folder, starts = found
    [start] = starts[case]
    for step in (1, 2, 3):
        assert start["did"].count([step, "actor", "critic"]) == 2
    assert start["did"].count("average") == averages
    assert [line["policy/updates_done_share"] for line in lines_of(folder / case)] == [share] * 3
