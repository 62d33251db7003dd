"""Step 3 with an agent: its numbers do not depend on ranks, ZeRO stages or the engine."""

import json
from functools import cache

import numpy as np
import pytest
from launch import forked, metrics_of, succeed
from letter_agents import words_for
from letter_runs import samples_of

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

MAIN = "training/step3_ppo/main.py"
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
def run_of(assets, tmp_path_factory):
    """(metrics, samples, (calls, ends that agents noted)) of the run of a layout."""

    @cache
    def run(name):
        folder = tmp_path_factory.mktemp("agents")
        ranks, flags = LAYOUTS[name]
        words = words_for(assets, folder, "out", *flags.split())
        succeed(forked(ranks, MAIN, *words))
        counts = count(folder, "asked"), count(folder, "ends")
        return metrics_of(folder / "out"), samples_of(folder / "out"), counts

    return run


def depends_on_time(key):
    return "seconds" in key or "idle" in key


def count(folder, name):
    """How often agents have noted this."""
    return len((folder / name).read_text().split())


def test_agents_play_and_training_sees_what_the_model_drew(run_of):
    metrics, samples, _ = run_of("one")
    for row in metrics:
        assert row["agent/failures"] == 0 and row["agent/refused_calls"] == 0
        assert row["agent/calls"] == row["agent/asked"] > 1
    for row in metrics[:2]:  # the rows of the third step have one context each
        assert row["agent/contexts"] > 1 and row["agent/untrained_calls"] > 0
    assert abs(metrics[0]["policy/first_log_ratio_abs_max"]) < 1e-4
    assert metrics[0]["reward/score_std"] > 0.01
    assert any(turn["role"] == "context" for sample in samples for turn in sample.get("turns", []))


def assert_same(run, other):
    """The same samples, and metrics that differ by rounding alone."""
    (expected, samples, _), (found, others, _) = run, other
    assert [each["answer"] for each in samples] == [each["answer"] for each in others]
    for row, other_row in zip(expected, found, strict=True):
        for key, value in row.items():
            kind = key.split("/")[0]
            if kind in ("policy", "kl", "reward", "agent", "optim") and not depends_on_time(key):
                if "diff" not in key:
                    atol = 1e-3 if key.endswith("_max") else 1e-4
                    np.testing.assert_allclose(other_row[key], value, 1e-2, atol, err_msg=key)


@pytest.mark.release
def test_the_numbers_do_not_depend_on_the_layout(run_of):
    assert_same(run_of("one"), run_of("rounds"))


def test_a_run_that_is_killed_in_a_call_resumes_and_no_finished_agent_plays_again(
    run_of, assets, tmp_path
):
    """It is killed late in the third step, when the checkpoint after the first one is complete: the
    second step plays no agent."""
    asked, ends = run_of("one")[2]
    words = words_for(assets, tmp_path, "out", *LAYOUTS["one"][1].split(), "--save_steps", 1)
    (tmp_path / "most").write_text(str(asked - 1))
    assert forked(1, MAIN, *words).returncode != 0
    *_, journal = sorted((tmp_path / "out").rglob("step_*_rank_0.jsonl"))
    names = [next(iter(json.loads(line))) for line in journal.read_text().splitlines()]
    replies = sum("/reply/" in name for name in names)
    known = sum("/reply/" not in name and "/context/" not in name for name in names)
    assert replies and 0 < known < ends // 3
    before = count(tmp_path, "ends")
    assert 2 * ends // 3 + known <= before
    succeed(forked(1, MAIN, *words))
    assert count(tmp_path, "ends") - before == ends // 3 - known
    assert_same(run_of("one"), (metrics_of(tmp_path / "out"), samples_of(tmp_path / "out"), None))
