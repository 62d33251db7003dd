"""`benchmarks/gpu.sh`: a whole trial on tiny sizes; how it judges."""

import json
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_graphs import FakeDevice
from launch import ROOT, environment
from tiny_models import model_of

from dschat_ppo.planner.plan_step import GIB, plan_step
from dschat_ppo.rollout.cuda_graphs import RolloutGraphs
from dschat_ppo.rollout.generator import GenerationConfig

sys.path.insert(0, str(ROOT / "benchmarks"))
import ppo_parts  # noqa: E402
import rollout  # noqa: E402
from gpu_checks import parts, speed, trajectory  # noqa: E402
from models import workload  # noqa: E402


def perfect(monkeypatch) -> dict:
    """What right and fast code finds. Captures are those of rollouts on a stand-in for a GPU; the rest is by hand."""
    FakeDevice(monkeypatch)
    monkeypatch.setattr(rollout, "GenerationConfig", partial(GenerationConfig, static=True))
    model, work = model_of("llama"), workload("long", 48, 4, 64)
    with torch.no_grad():
        ours = speed.measured(model, work, 4)
    assert ours["captures_first"] > 0
    rolled = {"ours_64": ours | {"share_of_limit": 0.7}, "ratio_to_transformers": 8.0}
    step = {"score_mfu": 0.5, "train_mfu": 0.45, "captures": 0}
    run = {"first_step": 1e-5, "all_steps": 1e-5}
    of_update = 2 * (3 + 2) + 8  # two micro-batches of packed rows, and their update
    return {
        "parity": {"architectures": {"wrong": 0}, "fp32": {"ok": 1}, "bf16": {"ok": 1}},
        "trajectory": {"sft": run, "ppo": run, "grpo": run},
        "resume": {"compared": {"beyond_again": trajectory.beyond_again(again=1.0, resumed=1.5)}},
        "machine": {"attention": {"new_shape_ms": 1.0}},
        "rollout_small": rolled,
        "rollout_large": rolled | {"ours_64": ours | {"share_of_limit": 0.7, "captures_again": 1}},  # too large to keep
        "ppo": {"last_step": step},
        "grpo": {"last_step": step},
        "waits": {"rollout": {"per_token": 2 / 8}, "step": {"train_per_micro_batch": of_update / 4}},
    }


def test_right_and_fast_code_misses_nothing(monkeypatch):
    found = perfect(monkeypatch)
    assert parts.missed(found, right_only=False) == []
    assert set(found) == set(parts.PARTS)
    monkeypatch.setattr(RolloutGraphs, "keep", lambda *_: None)
    found = perfect(monkeypatch)
    assert [line["path"] for line in parts.missed(found, False)] == ["rollout_small.ours_64.captures_again"]


@pytest.mark.release
@pytest.mark.parametrize(("card", "gib"), [("h100", 79.6), ("h200", 140.0)])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_models_of_a_step_fit_the_card(card, gib, algorithm):
    def fits(memory: int) -> bool:
        setting = speed.Setting.of(algorithm, False, memory)
        work = setting.work
        prompts, longest = work.prompts.prompt_ids.shape
        most = longest, int(work.answer_lengths.max())
        config = ppo_parts.ppo_config(Path("models"), prompts, work.samples, most, setting.flags)
        roles = ["actor", "reference", "critic", "reward"][: 4 if algorithm == "ppo" else 2]
        models = dict.fromkeys(roles, setting.model)
        return plan_step(config, models, 1, int(gib * GIB), 128 * GIB).fits

    assert fits(int(gib * GIB))
    assert fits(200 * GIB) is not (card == "h100" and algorithm == "ppo"), "models of 1.5 B weights"


@pytest.mark.parametrize(("run", "counted"), [(2 * 8 * 4 + 16 + 3, 80), (80, 80), (79, 24), (24, 24), (10, 10)])
def test_model_flops_by_hand(run, counted):
    """2 prompts of 4 tokens with 8 answers of 1 token each: 80 tokens by rows, 24 with shared prompts."""
    work = workload("group", 32, 2, shrink=64)
    work = type(work)(type(work.prompts)(work.prompts.prompt_ids[:, :4], work.prompts.prompt_mask[:, :4]), 8,
                      torch.ones(16, dtype=torch.int64))  # fmt: skip
    backbone = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 3, bias=False))
    backbone.get_input_embeddings = lambda: backbone[0]
    counter = speed.PassCounter.__new__(speed.PassCounter)
    engine = SimpleNamespace(module=SimpleNamespace(backbone=backbone))
    counter.engines = {"actor": engine, "critic": engine}
    keys = [("train", "actor", True), ("train", "critic", True), ("score", "actor", False)]
    counter.tokens = Counter(dict.fromkeys(keys, run))
    assert counter.flops("train", work) == 6 * (9 * counted + 15 * 16) + 6 * 9 * counted
    assert counter.flops("score", work) == 2 * (9 * counted + 15 * 16)


@pytest.mark.release
@pytest.mark.slow
def test_a_trial_of_each_kind_of_part(tmp_path):
    """On a CPU only right and wrong count, as in `--tiny` on a GPU. The parts that are left out have the functions of
    others."""
    ran = [name for name in parts.PARTS if name not in ("rollout_large", "ppo")]
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), "--tiny", "--json", str(tmp_path / "found.json")]
    env = environment() | {"PYTHON": sys.executable}
    result = subprocess.run(
        [*command, "--only", *ran], env=env, cwd=tmp_path, text=True, capture_output=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr[-6000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] == found["missed"] == []
    assert set(ran) <= set(found)
    assert found["resume"]["compared"]["bit_exact"] and found["resume"]["resumed"]["steps"] == [3, 4]
    assert found["trajectory"]["ppo"]["steps"] == 2
    assert found["parity"]["bf16"]["scored"] > 0, "bf16 is compared with fp32"
    for path in ("rollout_small.ratio_to_transformers", "grpo.last_step.score_mfu", "grpo.last_step.train_mfu"):
        assert parts.at(found, path) > 0, path
    targets = [target.path for target in parts.TARGETS if target.path.split(".")[0] in ran]
    named = [path for path in targets if not isinstance(parts.at(found, path), (int, float))]
    assert named == [], "every target names a number that is measured"
