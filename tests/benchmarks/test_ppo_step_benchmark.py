"""The benchmark of a PPO step: both ways make the same update, and a trial of the script."""

import json
import sys
from pathlib import Path

import pytest
import torch
from launch import ROOT, forked, succeed
from one_rank import one_rank  # noqa: F401

sys.path.insert(0, str(ROOT / "benchmarks"))
import plain  # noqa: E402
import ppo_parts  # noqa: E402
import ppo_step  # noqa: E402

from dschat_ppo.types import Rollout  # noqa: E402

RATE = 1e-3


def weights(engine) -> torch.Tensor:
    return torch.cat([weight.detach().float().flatten() for weight in engine.module.parameters()])


@pytest.fixture
def folder(tmp_path) -> Path:
    ppo_parts.save_models(tmp_path, ppo_step.TINY.model)
    return tmp_path


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["varied", "group"])
def test_both_ways_make_the_same_update(name, folder, monkeypatch):
    """Adam's first update moves each weight by the learning rate: only the sign of a gradient near 0 may differ."""
    work = ppo_step.TINY.workload(name, ppo_step.TINY.model.vocab_size)
    flags = ["--dtype", "fp32", "--old_logprobs", "recompute", "--actor_learning_rate", RATE]
    flags += ppo_parts.GRPO if name == "group" else ["--critic_learning_rate", RATE]
    ours, theirs = (ppo_step.TINY.components(folder, ppo_step.TINY.model, work, flags) for _ in range(2))
    before = weights(ours.engines.actor)
    rollouts: list[Rollout] = []
    answer = ours.collection.generator.answer
    ours.collection.generator.answer = lambda *given, **how: rollouts.append(answer(*given, **how)) or rollouts[-1]
    ppo_parts.ppo_step(ours, work)
    rows = rollouts[0]
    ids = torch.cat([rows.prompt_ids, rows.response_ids], dim=1)
    mask = torch.cat([rows.prompt_mask, rows.response_mask], dim=1).long()
    monkeypatch.setattr(plain, "answers", lambda *_: (ids, mask, rows.response_mask))
    plain.step(theirs, work)
    for role in ours.engines.trained:
        one, other = (weights(ppo.engines.trained[role]) for ppo in (ours, theirs))
        assert (one - other).abs().mean() < 0.01 * RATE, role
    assert (weights(ours.engines.actor) - before).abs().mean() > 0.5 * RATE


@pytest.mark.release
@pytest.mark.slow
def test_a_trial_of_the_script(tmp_path):
    words = ["--tiny", "--repeats", "1", "--workloads", "fixed", "--json", str(tmp_path / "found.json")]
    result = succeed(forked(1, "tests/workers/run_module.py", "benchmarks/ppo_step.py", *words))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["fixed"]["ratio_wall"] > 0
    assert found["peak_memory_ratio"] >= 0
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("| ")][2:] == ["fixed"]
