"""The quickstart, as a newcomer runs it: what it must reach, and going on where it stopped."""

import json
import shutil

import pytest
from launch import run, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    result = succeed(run(["bash", "training_scripts/quickstart.sh", str(folder)], timeout=900))
    (folder / "log").write_text(result.stdout)
    return folder


def test_quickstart_learns_the_task(out):
    summary = json.loads((out / "summary.json").read_text())
    assert summary["sft_eval_loss_after"] < 0.1 * summary["sft_eval_loss_before"]
    assert summary["reward_eval_accuracy"] >= 0.95
    assert summary["ppo_reward_after"] > summary["ppo_reward_before"] + 1
    assert 0.2 <= summary["true_rule_rate_sft"] <= 0.6
    assert summary["true_rule_rate_ppo"] >= 0.9
    assert 0 < summary["ppo_kl_per_token"] < 0.5
    assert summary["distinct_answer_rate"] >= 0.8
    assert set(summary["seconds_per_step"]) == {"sft", "reward", "ppo"}
    assert summary["versions"]["deepspeed"] == "0.19.8"


def test_quickstart_shows_samples_and_places(out):
    log = (out / "log").read_text()
    assert log.count("asked :") == log.count("before:") == log.count("after :") == 5
    for place in ("sft", "reward", "ppo/actor", "summary.json"):
        assert str(out / place) in log


def test_second_run_goes_on_at_the_first_step_that_is_not_done(out):
    kept = {step: (out / step / "metrics.jsonl").read_text() for step in ("sft", "reward")}
    shutil.rmtree(out / "ppo")
    result = succeed(run(["bash", "training_scripts/quickstart.sh", str(out)], timeout=900))
    for step in ("sft", "reward"):
        assert f"step '{step}' is done, skipped" in result.stdout
        assert (out / step / "metrics.jsonl").read_text() == kept[step]
    assert "step 'ppo' is done" not in result.stdout
    assert (out / "ppo/result.json").exists()
