"""A resumed step 1 with every tracker: each library has one run, with each step once."""

import json
import sys

import pytest
from launch import ROOT, forked, metrics_of, run, succeed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.release]


def test_a_resumed_run_continues_in_every_library(assets, tmp_path, monkeypatch):
    """The first start ends after 2 steps of 4."""
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    out = tmp_path / "sft"
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(tmp_path / "trackio")}
    words = f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl --data_split 1,0,0 --dtype fp32"
    words += f" --output_dir {out} --per_device_train_batch_size 4 --lr_scheduler_type constant --eval_fraction 0"
    words += " --report_to tensorboard wandb trackio --run_name mine --keep_final_checkpoint --max_steps"
    for steps in ("2", "4"):
        succeed(forked(1, ROOT / "training/step1_sft/main.py", *words.split(), steps, env=env, timeout=200))
    expected = [(line["step"], pytest.approx(line["loss"])) for line in metrics_of(out) if "loss" in line]
    assert [step for step, _ in expected] == [1, 2, 3, 4]
    ids = json.loads((out / "trackers.json").read_text())
    assert len(list(out.glob(f"wandb/offline-run-*-{ids['wandb']}*/run-{ids['wandb']}.wandb"))) == 2
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    read = "import json; from trackio.sqlite_storage import SQLiteStorage as storage; "
    read += f"print(json.dumps(storage.get_logs({tmp_path.name!r}, {ids['trackio']!r})))"
    logged = json.loads(succeed(run([sys.executable, "-c", read])).stdout)  # it reads TRACKIO_DIR when it is imported
    assert [(line["step"], line["loss"]) for line in logged if "loss" in line] == expected
    board = EventAccumulator(str(out / "step1_tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == expected
