"""The commands of docs/your-data.md, as they stand there, on a tiny model and a few pairs."""

import json
import os
import re
import shutil
import subprocess

import pytest
from bash_blocks import ROOT, blocks_of
from launch import _free_port, environment, metrics_of

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
PAGE = ROOT / "docs" / "your-data.md"


@pytest.fixture(scope="module")
def folder(assets, tmp_path_factory):
    """Where the commands have run; `said` holds what each block printed."""
    folder = tmp_path_factory.mktemp("three_steps")
    os.symlink(ROOT / "training", folder / "training")
    model = shutil.copytree(assets / "lm", folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    for number, block in enumerate(blocks_of(PAGE)):
        text = re.sub(r"\bMODEL\b", str(model), re.sub(r"\bDATA\b", str(assets / "pairs.jsonl"), block.text))
        launched = f"deepspeed --num_accelerators 1 --master_port {_free_port()} "
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text.replace("deepspeed ", launched)], cwd=folder, env=environment(),
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert result.returncode == 0, f"{text}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        (folder / f"said_{number}").write_text(result.stdout)
    return folder


def test_all_blocks_are_run_here():
    marks = {block.mark for block in blocks_of(PAGE)}
    assert marks == {"run by tests/docs/test_three_steps.py"}


def test_the_preview_shows_the_rows_of_step_1(folder):
    assert "pairs" in (folder / "said_0").read_text()


def test_the_metrics_that_the_page_names_are_there(folder):
    assert any("eval_loss" in line for line in metrics_of(folder / "out/sft"))
    assert any("eval_accuracy" in line for line in metrics_of(folder / "out/reward"))
    line = metrics_of(folder / "out/ppo")[-1]
    assert {"kl/ref_k1", "reward/score_std", "rollout/ended_share"} <= set(line)


def test_the_files_that_the_page_names_are_there(folder):
    assert (folder / "out/ppo/report.html").stat().st_size > 10_000
    assert "<html" in (folder / "evaluation.html").read_text(encoding="utf-8")
    assert (folder / "out/ppo/actor/model.safetensors").exists()
