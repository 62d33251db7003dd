"""Each warning appears for its metric, and none for a healthy run."""

import pytest

from dschat_ppo.monitor.health import WINDOW, HealthWatch

HEALTHY = {
    "kl/ref_k1": 0.05,
    "policy/clip_fraction": 0.1,
    "policy/entropy": 2.0,
    "reward/score_std": 0.8,
    "reward/score_mean": 1.0,
    "rollout/count": 64,
    "rollout/distinct_share": 0.95,
    "rollout/ended_share": 0.9,
    "rollout/length_mean": 40.0,
    "rollout/logprob_diff_mean": 0.001,
    "value/explained_variance": 0.4,
}

WARNINGS_OF_ONE_STEP = {
    "mean KL to the reference is negative": {"kl/ref_k1": -0.05},
    "ratios are clipped": {"policy/clip_fraction": 0.4},
    "scores are nearly equal": {"reward/score_std": 1e-5},
    "answers are duplicates": {"rollout/distinct_share": 0.3},
    "rollout and training log-probs differ": {"rollout/logprob_diff_mean": 0.5},
}
WARNINGS_OF_A_TREND = {
    "KL to the reference jumped": {"kl/ref_k1": 0.5},
    "entropy fell": {"policy/entropy": 0.4},
    "far fewer answers end by themselves": {"rollout/ended_share": 0.5},
    "score, length and KL all rise": {"reward/score_mean": 2.0, "rollout/length_mean": 80.0, "kl/ref_k1": 0.12},
}


def watch_after(steps: int, **metrics: float) -> HealthWatch:
    """A `HealthWatch` after `steps` steps that are healthy except for `metrics`."""
    watch = HealthWatch()
    for _ in range(steps):
        watch.check({**HEALTHY, **metrics})
    return watch


def test_a_healthy_run_has_no_warnings():
    watch = HealthWatch()
    for step in range(3 * WINDOW):
        better = {"reward/score_mean": 1.0 + 0.05 * step, "kl/ref_k1": 0.05 + 0.001 * step}
        assert watch.check({**HEALTHY, **better}) == []


@pytest.mark.parametrize(("warning", "changes"), WARNINGS_OF_ONE_STEP.items())
def test_warnings_of_one_step_appear_at_once(warning, changes):
    [line] = HealthWatch().check({**HEALTHY, **changes})
    assert warning in line


def test_equal_scores_need_more_than_one_answer():
    assert HealthWatch().check({**HEALTHY, "reward/score_std": 0.0, "rollout/count": 1}) == []
    [line] = HealthWatch().check({**HEALTHY, "reward/score_std": 0.0, "rollout/count": 2})
    assert "scores are nearly equal" in line


@pytest.mark.parametrize(("warning", "changes"), WARNINGS_OF_A_TREND.items())
def test_warnings_of_a_trend_appear_after_a_full_window(warning, changes):
    [line] = watch_after(WINDOW).check({**HEALTHY, **changes})
    assert warning in line


@pytest.mark.parametrize("changes", WARNINGS_OF_A_TREND.values())
def test_warnings_of_a_trend_need_a_full_window(changes):
    assert watch_after(WINDOW - 1).check({**HEALTHY, **changes}) == []


def test_a_critic_without_explained_variance_over_a_window():
    useless = {"value/explained_variance": -0.1}
    [line] = watch_after(WINDOW, **useless).check({**HEALTHY, **useless})
    assert "critic explains no variance" in line
    assert watch_after(WINDOW - 1, **useless).check({**HEALTHY, **useless}) == []
    assert watch_after(WINDOW, **useless).check(HEALTHY) == []


@pytest.mark.parametrize("missing", ["reward/score_mean", "rollout/length_mean", "kl/ref_k1"])
def test_reward_exploitation_needs_all_three_metrics(missing):
    changes = WARNINGS_OF_A_TREND["score, length and KL all rise"]
    rest = {name: value for name, value in changes.items() if name != missing}
    assert watch_after(WINDOW).check({**HEALTHY, **rest}) == []


def test_ordinary_values_are_below_the_thresholds():
    ordinary = {
        "kl/ref_k1": -0.01, "policy/clip_fraction": 0.3, "reward/score_std": 0.01, "rollout/distinct_share": 0.5,
        "rollout/logprob_diff_mean": 0.1,
    }  # fmt: skip
    assert HealthWatch().check({**HEALTHY, **ordinary}) == []


def test_a_persistent_warning_appears_once_and_again_after_a_healthy_step():
    watch, clipped = HealthWatch(), {**HEALTHY, "policy/clip_fraction": 0.5}
    counts = [len(watch.check(metrics)) for metrics in (clipped, clipped, clipped, HEALTHY, clipped, clipped)]
    assert counts == [1, 0, 0, 0, 1, 0]


def test_a_new_warning_appears_during_a_persistent_one():
    watch = HealthWatch()
    watch.check({**HEALTHY, "policy/clip_fraction": 0.5})
    [line] = watch.check({**HEALTHY, "policy/clip_fraction": 0.5, "reward/score_std": 0.0})
    assert "scores are nearly equal" in line


def test_a_step_with_skipped_updates_is_ignored():
    watch = watch_after(WINDOW - 1)
    assert watch.check({"optim/nonfinite_skipped": 1.0}) == []
    watch.check(HEALTHY)
    [line] = watch.check({**HEALTHY, "kl/ref_k1": 0.5})
    assert "KL to the reference jumped" in line


def test_trends_are_relative_to_the_last_window():
    watch = watch_after(WINDOW, **{"policy/entropy": 9.0})
    for _ in range(WINDOW):
        watch.check({**HEALTHY, "policy/entropy": 3.0})
    assert watch.check({**HEALTHY, "policy/entropy": 2.0}) == []
