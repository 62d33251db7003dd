"""Plain transformers loads the models of a ZeRO-3 run; PPO finds a known best answer."""

import json
import sys
from pathlib import Path

import pytest
from launch import ROOT, deepspeed, forked, run, succeed

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


@pytest.fixture(scope="module")
def bandit(assets, tmp_path_factory):
    """Folder of a run with `--old_logprobs rollout`."""
    folder = tmp_path_factory.mktemp("bandit")
    succeed(forked(2, "tests/workers/bandit.py", assets, folder / "found"))
    return folder


def test_ppo_finds_the_best_arm_of_a_bandit(bandit):
    found = json.loads((bandit / "found").read_text())
    assert found["first"] < 0.2
    assert found["last"] > 0.9
    assert min(found["probability"]) > 0.9


def test_a_killed_run_leaves_no_shared_memory(assets, tmp_path):
    """The worker dies by SIGKILL in the middle; 66 MiB a rank would be held for ever by files in /dev/shm."""
    out = tmp_path / "names"
    assert deepspeed(2, "tests/workers/killed.py", out).returncode != 0
    made = json.loads(out.read_text())
    assert made["ranks"] == 2
    assert made["sum"] == 3.0
    assert not [name for name in made["expected"] if Path(name).exists()]


def test_recorded_logprobs_are_compared_with_the_first_training_forward(bandit):
    for line in map(json.loads, (bandit / "metrics.jsonl").read_text().splitlines()):
        assert 0 < line["rollout/logprob_diff_max"] < 1e-4
        assert line["rollout/logprob_diff_max"] == line["policy/first_log_ratio_abs_max"]
        assert 0 < line["rollout/logprob_diff_mean"] < line["rollout/logprob_diff_max"]
