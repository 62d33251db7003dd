"""Steps by their command lines with trackers: two PPO steps with TensorBoard, and a resumed step 1 with the others."""

import json
import sys

import pytest
from launch import ROOT, forked, metrics_of, run, succeed
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def out(assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trackers") / "ppo"
    words = f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/reward --dtype fp32"
    words += f" --data_path {assets}/prompts.jsonl --data_split 0,0,1 --output_dir {folder} --max_prompt_seq_len 64"
    words += " --per_device_generation_batch_size 4 --per_device_training_batch_size 2 --ppo_epochs 2"
    words += " --max_answer_seq_len 8 --actor_learning_rate 0.01 --num_warmup_steps 0 --lr_scheduler_type constant"
    words += " --report_to tensorboard --sample_interval 1 --max_steps 2"
    succeed(forked(2, "training/step3_ppo/main.py", *words.split()))
    return folder


@pytest.fixture(scope="module")
def board(out):
    return EventAccumulator(str(out / "step3_tensorboard"), STORE_EVERYTHING_SIZE_GUIDANCE).Reload()


def test_scalars_are_the_metrics(out, board):
    lines = metrics_of(out)
    assert [line["step"] for line in lines] == [1, 2]
    names = set(lines[0]) - {"step", "time"}
    assert set(board.Tags()["scalars"]) == names and len(names) > 40
    for name in names:
        points = {event.step: event.value for event in board.Scalars(name)}
        assert points == pytest.approx({line["step"]: line[name] for line in lines})


def test_answers_are_texts_with_scores(board):
    events = board.Tensors("samples/answers/text_summary")
    assert [event.step for event in events] == [1, 2]
    for event in events:
        text = event.tensor_proto.string_val[0].decode()
        assert text.count("**score ") == text.count("\nprompt:\n") == text.count("\nanswer:\n") == 8


def test_a_resumed_run_continues_in_every_library(assets, tmp_path, monkeypatch):
    """The first start ends after 2 steps of 4; each library then has one run, with each step once."""
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    out = tmp_path / "sft"
    variables = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(tmp_path / "trackio")}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl --data_split 1,0,0 --dtype fp32"
    words += f" --output_dir {out} --per_device_train_batch_size 4 --lr_scheduler_type constant --eval_fraction 0"
    words += " --report_to wandb trackio --run_name mine --max_steps"
    command = [sys.executable, str(ROOT / "training/step1_sft/main.py"), *words.split()]
    for steps in ("2", "4"):
        succeed(run([*command, steps, "--keep_final_checkpoint"], timeout=120))
    ids = json.loads((out / "trackers.json").read_text())
    assert len(list(out.glob(f"wandb/offline-run-*-{ids['wandb']}*/run-{ids['wandb']}.wandb"))) == 2
    read = "import json; from trackio.sqlite_storage import SQLiteStorage as storage; "
    read += f"print(json.dumps(storage.get_logs({tmp_path.name!r}, {ids['trackio']!r})))"
    logged = json.loads(succeed(run([sys.executable, "-c", read])).stdout)  # it reads TRACKIO_DIR when it is imported
    points = [(line["step"], line["loss"]) for line in logged if "loss" in line]
    assert points == [(line["step"], line["loss"]) for line in metrics_of(out) if "loss" in line]
    assert [step for step, _ in points] == [1, 2, 3, 4]
