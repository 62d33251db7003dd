"""Each warning fires on its own sign, and on no healthy run."""

import pytest

from dschat_ppo.monitor.health import WINDOW, HealthWatch

HEALTHY = {
    "kl/ref_k1": 0.05,
    "policy/clip_fraction": 0.1,
    "policy/entropy": 2.0,
    "reward/score_std": 0.8,
    "reward/score_mean": 1.0,
    "answers/count": 64,
    "answers/distinct_share": 0.95,
    "answers/ended_share": 0.9,
    "answers/length_mean": 40.0,
    "rollout/logprob_diff_mean": 0.001,
    "value/explained_variance": 0.4,
}

AT_ONCE = {
    "mean KL to the reference is negative": {"kl/ref_k1": -0.05},
    "ratios are clipped": {"policy/clip_fraction": 0.4},
    "scores are nearly equal": {"reward/score_std": 1e-5},
    "answers are duplicates": {"answers/distinct_share": 0.3},
    "rollout and training log-probs differ": {"rollout/logprob_diff_mean": 0.5},
}
AFTER_A_HEALTHY_WINDOW = {
    "KL to the reference jumped": {"kl/ref_k1": 0.5},
    "entropy fell": {"policy/entropy": 0.4},
    "far fewer answers end by themselves": {"answers/ended_share": 0.5},
    "score, length and KL all climb": {"reward/score_mean": 2.0, "answers/length_mean": 80.0, "kl/ref_k1": 0.12},
}


def watch_after(steps: int, **metrics: float) -> HealthWatch:
    """A watch that has seen `steps` steps of these metrics, healthy otherwise."""
    watch = HealthWatch()
    for _ in range(steps):
        watch.check({**HEALTHY, **metrics})
    return watch


def test_a_healthy_run_is_silent():
    watch = HealthWatch()
    for step in range(3 * WINDOW):
        better = {"reward/score_mean": 1.0 + 0.05 * step, "kl/ref_k1": 0.05 + 0.001 * step}
        assert watch.check({**HEALTHY, **better}) == []


@pytest.mark.parametrize(("warning", "sign"), AT_ONCE.items())
def test_signs_of_one_step_warn_at_once(warning, sign):
    [line] = HealthWatch().check({**HEALTHY, **sign})
    assert warning in line


def test_one_answer_has_no_score_that_it_could_be_equal_to():
    assert HealthWatch().check({**HEALTHY, "reward/score_std": 0.0, "answers/count": 1}) == []
    [line] = HealthWatch().check({**HEALTHY, "reward/score_std": 0.0, "answers/count": 2})
    assert "scores are nearly equal" in line


@pytest.mark.parametrize(("warning", "sign"), AFTER_A_HEALTHY_WINDOW.items())
def test_signs_of_a_trend_warn_after_a_full_window(warning, sign):
    [line] = watch_after(WINDOW).check({**HEALTHY, **sign})
    assert warning in line


@pytest.mark.parametrize("sign", AFTER_A_HEALTHY_WINDOW.values())
def test_signs_of_a_trend_wait_for_a_full_window(sign):
    assert watch_after(WINDOW - 1).check({**HEALTHY, **sign}) == []


def test_a_critic_that_explains_nothing_for_long():
    useless = {"value/explained_variance": -0.1}
    [line] = watch_after(WINDOW, **useless).check({**HEALTHY, **useless})
    assert "critic explains nothing" in line
    assert watch_after(WINDOW - 1, **useless).check({**HEALTHY, **useless}) == []
    assert watch_after(WINDOW, **useless).check(HEALTHY) == []


@pytest.mark.parametrize("missing", ["reward/score_mean", "answers/length_mean", "kl/ref_k1"])
def test_exploitation_needs_all_three_signs(missing):
    sign = AFTER_A_HEALTHY_WINDOW["score, length and KL all climb"]
    rest = {name: value for name, value in sign.items() if name != missing}
    assert watch_after(WINDOW).check({**HEALTHY, **rest}) == []


def test_thresholds_are_not_reached_by_ordinary_values():
    ordinary = {
        "kl/ref_k1": -0.01, "policy/clip_fraction": 0.3, "reward/score_std": 0.01, "answers/distinct_share": 0.5,
        "rollout/logprob_diff_mean": 0.1,
    }  # fmt: skip
    assert HealthWatch().check({**HEALTHY, **ordinary}) == []


def test_a_standing_warning_is_given_once_and_again_after_it_went_away():
    watch, ill = HealthWatch(), {**HEALTHY, "policy/clip_fraction": 0.5}
    counts = [len(watch.check(metrics)) for metrics in (ill, ill, ill, HEALTHY, ill, ill)]
    assert counts == [1, 0, 0, 0, 1, 0]


def test_a_new_warning_is_given_beside_a_standing_one():
    watch = HealthWatch()
    watch.check({**HEALTHY, "policy/clip_fraction": 0.5})
    [line] = watch.check({**HEALTHY, "policy/clip_fraction": 0.5, "reward/score_std": 0.0})
    assert "scores are nearly equal" in line


def test_a_step_whose_updates_were_left_out_is_no_sign():
    watch = watch_after(WINDOW - 1)
    assert watch.check({"nonfinite/skipped": 1.0}) == []
    watch.check(HEALTHY)
    [line] = watch.check({**HEALTHY, "kl/ref_k1": 0.5})
    assert "KL to the reference jumped" in line


def test_trends_are_measured_against_the_last_window_only():
    watch = watch_after(WINDOW, **{"policy/entropy": 9.0})
    for _ in range(WINDOW):
        watch.check({**HEALTHY, "policy/entropy": 3.0})
    assert watch.check({**HEALTHY, "policy/entropy": 2.0}) == []
