"""Step 3 with an agent: its numbers do not depend on ranks, ZeRO stages or the engine."""

import json

import numpy as np
import pytest
from launch import forked, metrics_of, succeed
from letter_agents import words_for

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LAYOUTS = {
    "one": (
        1,
        "--per_device_generation_batch_size 4 --gradient_accumulation_steps 2 --actor_zero_stage 0",
    ),
    "rounds": (
        2,
        "--per_device_generation_batch_size 2 --actor_zero_stage 3 --unpin_actor_parameters",
    ),
}


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    found = {}
    for name, (ranks, flags) in LAYOUTS.items():
        words = words_for(assets, folder, name, *flags.split())
        succeed(forked(ranks, "training/step3_ppo/main.py", *words))
        found[name] = metrics_of(folder / name), samples_of(folder / name)
    return found


def depends_on_time(key):
    return "seconds" in key or "idle" in key


def samples_of(output):
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


def test_agents_play_and_training_sees_what_the_model_drew(runs):
    metrics, samples = runs["one"]
    for row in metrics:
        assert row["agent/failures"] == 0 and row["agent/refused_calls"] == 0
        assert row["agent/calls"] == row["agent/asked"] > 1
        assert row["agent/contexts"] > 1 and row["agent/untrained_calls"] > 0
    assert abs(metrics[0]["policy/first_log_ratio_abs_max"]) < 1e-4
    assert metrics[0]["reward/score_std"] > 0.01
    assert any(turn["role"] == "context" for sample in samples for turn in sample.get("turns", []))


def test_the_numbers_do_not_depend_on_the_layout(runs):
    (expected, samples), (found, others) = runs["one"], runs["rounds"]
    assert [each["answer"] for each in samples] == [each["answer"] for each in others]
    for row, other in zip(expected, found, strict=True):
        for key, value in row.items():
            kind = key.split("/")[0]
            if kind in ("policy", "kl", "reward", "agent", "optim") and not depends_on_time(key):
                if "diff" not in key:
                    atol = 1e-3 if key.endswith("_max") else 1e-4
                    np.testing.assert_allclose(other[key], value, 1e-2, atol, err_msg=key)
