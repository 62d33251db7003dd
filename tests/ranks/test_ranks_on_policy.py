"""On DeepSpeed engines, the only update of a PPO step gives the numbers that scoring gives."""

import json

import pytest
import torch
from launch import forked, metrics_of, succeed
from workers.on_policy import CASES, SOURCES, STEPS

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
MEASURED = ("time", "time/", "memory/")


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """Folder of the runs on two ZeRO-3 ranks."""
    folder = tmp_path_factory.mktemp("on_policy")
    succeed(forked(2, "tests/workers/on_policy.py", assets, folder, timeout=600))
    return folder


def found_of(folder) -> tuple[list[dict], dict, dict]:
    """(lines of the metrics, weights, what the worker found)"""
    lines = [
        {name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in metrics_of(folder)
    ]
    return lines, torch.load(folder / "weights.pt"), json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_scoring_passes_are_saved_and_ratios_are_one(runs, case):
    (lines, _, found), (other, _, before) = (found_of(runs / f"{case} {source}") for source in SOURCES)
    assert (found["source"], before["source"]) == ("update", "recompute")
    assert found["shares"] is before["shares"] is ("shared" not in case)
    if "bf16" not in case:  # in bf16 later steps may have other answers
        saved = {role: before["passes"][role] - count for role, count in found["passes"].items()}
        scored = found["passes"]["reference"]  # which is scored in any case
        assert saved == {role: 0 if role == "reference" else scored for role in saved} and scored >= STEPS
    assert len(lines) == len(other) == STEPS
    for line, expected in zip(lines, other, strict=True):
        assert set(line) == set(expected)
        assert line["policy/ratio_mean"] == line["policy/ratio_max"] == 1.0
        assert line["policy/first_log_ratio_abs_max"] == line["policy/kl_k3"] == 0.0


@pytest.mark.parametrize("case", [case for case in CASES if "bf16" not in case])
def test_metrics_and_weights_are_those_of_scoring(runs, case):
    (lines, weights, _), (other, expected, _) = (found_of(runs / f"{case} {source}") for source in SOURCES)
    for line, same in zip(lines, other, strict=True):
        assert line == pytest.approx(same, abs=1e-5, rel=1e-5)
    assert set(weights) == set(expected) and len(weights) > 10
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0, msg=name)


def test_in_bf16_the_first_step_is_that_of_scoring_up_to_rounding(runs):
    (lines, _, _), (other, _, _) = (found_of(runs / f"gae bf16 {source}") for source in SOURCES)
    assert 0 < lines[0]["rollout/logprob_diff_mean"] < 0.05
    for name in ("policy/entropy", "kl/ref_k1", "value/mean", "value/explained_variance", "value/loss"):
        assert lines[0][name] == pytest.approx(other[0][name], rel=0.03, abs=0.01), name
