"""Each rule of steps 1 and 2 fires beyond its threshold, with the numbers, and is silent on the other side of it."""

import math

import pytest
from health_steps import FIT_STEP, WINDOW, events_of, fit_watch

from dschat_ppo.checkpoint.state_file import load_state, save_state
from dschat_ppo.config.health_flags import FIT_RULES

HEALTHY = [{}] * WINDOW


def evaluated(held_out: list[float], training: list[float]) -> list[dict[str, float]]:
    """Two optimizer steps before each evaluation."""
    pairs = zip(held_out, training, strict=True)
    return [step for loss, trained in pairs for step in ({"loss": trained}, {"loss": trained, "eval_loss": loss})]


# name -> (steps at whose end it fires, steps over which it is silent, texts in the message)
CASES = {
    "loss_grows": (
        [*HEALTHY, *[{"loss": 1.53}] * 11], [*HEALTHY, *[{"loss": 1.52}] * 11], ["1.53", "1.5 times", "so far, 1"],
    ),
    "overfitting": (
        evaluated([0.9, 0.7, 0.71, 0.72], [1.0, 0.8, 0.6, 0.5]),
        evaluated([0.9, 0.7, 0.71, 0.69], [1.0, 0.8, 0.6, 0.5]),
        ["0.72", "0.7 at step 4", "from 0.8 to 0.5", "2 evaluations"],
    ),
    "accuracy_of_guessing": (
        [{"accuracy": 0.54}] * 21, [{"accuracy": 0.56}] * 40, ["0.54", "0.55", "10 steps"],
    ),
    "gradient_explodes": ([*HEALTHY, {"grad_norm": 10.1}], [*HEALTHY, {"grad_norm": 9.9}], ["10.1", "10", "1"]),
    "updates_skipped": (
        [*HEALTHY, {"optim/nonfinite_skipped": 2}], [*HEALTHY, {"optim/nonfinite_skipped": 0}], ["is 2, up from 0"],
    ),
    "fp16_overflows": (
        [{"optim/overflow/model": step // 2} for step in range(2, 13)],
        [{"optim/overflow/model": step // 3} for step in range(2, 14)], ["optim/overflow/model", "grew by 5"],
    ),
}  # fmt: skip


def test_every_rule_has_a_case():
    assert {rule.name for rule in FIT_RULES} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_fires_beyond_its_threshold_and_names_the_numbers(name):
    fires, _, texts = CASES[name]
    last = events_of(fit_watch(), fires)[-1]
    assert (last.step, last.name) == (len(fires), name)
    assert [text for text in texts if text not in last.seen] == [], last.seen


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_silent_at_the_other_side_of_its_threshold(name):
    assert events_of(fit_watch(), CASES[name][1]) == []


def test_an_overflow_does_not_hide_a_gradient_that_explodes_later():
    [event] = events_of(fit_watch(), [{"grad_norm": math.inf}, *HEALTHY[1:], {"grad_norm": 10.1}])
    assert event.name == "gradient_explodes"


def test_a_model_that_learns_has_no_events():
    falling = [{"loss": 2.0 / step, "accuracy": min(1.0, 0.5 + 0.02 * step)} for step in range(1, 60)]
    assert events_of(fit_watch(), falling) == []


def test_a_rising_held_out_loss_is_no_overfitting_while_the_training_loss_rises_too():
    assert events_of(fit_watch(), evaluated([0.9, 0.7, 0.71, 0.72], [1.0, 0.8, 0.9, 0.9])) == []


def test_equal_held_out_losses_are_no_overfitting():
    assert events_of(fit_watch(), evaluated([0.7, 0.7000001, 0.7000002], [0.8, 0.6, 0.5])) == []


def test_more_evaluations_can_be_asked_for():
    steps = evaluated([0.7, 0.71, 0.72], [0.8, 0.6, 0.5])
    assert [event.name for event in events_of(fit_watch(), steps)] == ["overfitting"]
    assert events_of(fit_watch("overfitting=3"), steps) == []


def test_losses_near_zero_are_not_compared():
    assert events_of(fit_watch(), [{"loss": 0.001}] * 10 + [{"loss": 0.02}] * 11) == []


def test_a_step_without_a_finite_loss_is_no_part_of_a_trend():
    watch = fit_watch()
    events_of(watch, [{}] * 4)
    watch.check(5, {**FIT_STEP, "loss": float("nan")})
    found = events_of(watch, [])
    assert found == [] and len(watch.state_dict()["past"]) == 4


@pytest.mark.parametrize("cut", [7, 11, 15, 19])
def test_a_resumed_watch_finds_what_it_would_have_found(tmp_path, cut):
    uneven = [{**step, "loss": step["loss"] + 0.1 * ("eval_loss" in step)} for step in CASES["overfitting"][0]]
    for steps in (uneven, [*HEALTHY, *[{"loss": 1.4}] * 9, *[{"loss": 1.7}] * 9]):
        whole, watch, resumed = fit_watch(), fit_watch(), fit_watch()
        expected = events_of(whole, steps)
        assert len(expected) == 1
        events_of(watch, steps[:cut])
        save_state(tmp_path / "state", watch.state_dict())
        resumed.load_state_dict(load_state(tmp_path / "state"))
        for step, changes in enumerate(steps[cut:], cut + 1):
            resumed.check(step, {**FIT_STEP, **changes})
        assert resumed.events == expected
