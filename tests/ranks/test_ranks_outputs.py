"""Plain transformers loads the models of a ZeRO-3 run; a killed run leaves no shared memory."""

import json
import sys
from pathlib import Path

import pytest
from launch import ROOT, forked, run, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_saved_models_give_the_same_logits_in_plain_transformers(assets, tmp_path):
    succeed(forked(2, "tests/workers/outputs.py", assets, tmp_path))
    printed = succeed(run([sys.executable, str(ROOT / "tests/workers/reload.py"), str(tmp_path)])).stdout
    found = json.loads(printed.splitlines()[-1])
    assert found["size"] > 0.1
    assert found["logits"] < 1e-5
    assert found["scores"] < 1e-5
    assert found["labels"] == 1
    assert found["missing"] == []
    assert found["template"] == "<|user|>hi<|assistant|>"
    assert found["eos"] == [[1, 4], 1, 1]
    assert found["dtype"] == "torch.float32"
    assert not found["imports_ours"]
    for role in ("actor", "critic"):
        names = {path.name for path in (tmp_path / role).iterdir()}
        assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert (tmp_path / "actor/generation_config.json").exists()


def test_a_killed_run_leaves_no_shared_memory(assets, tmp_path):
    """The worker dies by SIGKILL in the middle; 66 MiB a rank would be held for ever by files in /dev/shm."""
    out = tmp_path / "names"
    assert forked(2, "tests/workers/killed.py", out).returncode != 0
    made = json.loads(out.read_text())
    assert made["ranks"] == 2
    assert made["sum"] == 3.0
    assert not [name for name in made["expected"] if Path(name).exists()]
