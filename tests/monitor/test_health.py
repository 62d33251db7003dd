"""The watch over a run's metrics: each rule fires beyond its threshold and is silent before it,
none on healthy runs; what becomes an event, when the run stops, and its state in checkpoints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dschat_ppo.checkpoint.state_files import load_state, save_state
from dschat_ppo.config.cli import STEPS
from dschat_ppo.config.health_flags import CORE_PPO_RULES, FIT_RULES, FitHealthFlags, PPOHealthFlags
from dschat_ppo.config.step_config import groups_of
from dschat_ppo.errors import StorageError
from dschat_ppo.monitor.health import Event, HealthWatch

PPO_STEP = {
    "kl/ref_k1": 0.05,
    "policy/clip_fraction": 0.1,
    "policy/entropy": 2.0,
    "policy/first_log_ratio_abs_mean": 0.001,
    "policy/first_log_ratio_abs_max": 0.2,
    "reward/score_std": 0.8,
    "reward/score_mean": 1.0,
    "reward/function_faults": 0.0,
    "rollout/count": 64,
    "rollout/distinct_share": 0.95,
    "rollout/ended_share": 0.9,
    "rollout/length_mean": 40.0,
    "rollout/logprob_diff_mean": 0.002,
    "value/explained_variance": 0.4,
    "optim/grad_norm/actor": 0.5,
    "optim/grad_norm/critic": 2.0,
    "optim/nonfinite_skipped": 0.0,
}
FIT_STEP = {"loss": 1.0, "accuracy": 0.8, "grad_norm": 1.0, "optim/nonfinite_skipped": 0.0}
WINDOW = 10


def ppo_watch(*health: str, **flags: Any) -> HealthWatch:
    """A watch of step 3."""
    return HealthWatch(PPOHealthFlags(health=[f"window={WINDOW}", *health], **flags))


def fit_watch(*health: str, **flags: Any) -> HealthWatch:
    """A watch of steps 1 and 2."""
    return HealthWatch(FitHealthFlags(health=[f"window={WINDOW}", *health], **flags))


def events_of(watch: HealthWatch, steps: Sequence[Mapping[str, float]]) -> list[Event]:
    """The events of these steps, numbered from 1 on; a step is a healthy one except for what is
    given."""
    healthy = PPO_STEP if any(rule.name == "kl_spike" for rule in watch.rules) else FIT_STEP
    return [
        event
        for step, changes in enumerate(steps, 1)
        for event in watch.check(step, {**healthy, **changes})
    ]


HEALTHY: list[dict[str, float]] = [{}] * WINDOW


def lasting(steps: int, **metrics: float) -> list[dict[str, float]]:
    """`steps` equal steps; `__` in a name stands for `/`."""
    return [{name.replace("__", "/"): value for name, value in metrics.items()}] * steps


def at_once(
    metric: str, fires: float, silent: float
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    return [{metric: fires}], [{metric: silent}]


def after(
    metric: str, fires: float, silent: float
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    return [*HEALTHY, {metric: fires}], [*HEALTHY, {metric: silent}]


HALF = [{}] * 5


def evaluated(held_out: list[float], training: list[float]) -> list[dict[str, float]]:
    """Two optimizer steps before each evaluation."""
    pairs = zip(held_out, training, strict=True)
    return [
        step
        for loss, trained in pairs
        for step in ({"loss": trained}, {"loss": trained, "eval_loss": loss})
    ]


# name -> (steps at whose end it fires, steps over which it is silent, texts in the message)
CASES = {
    "kl_negative": (*at_once("kl/ref_k1", -0.021, -0.019), ["-0.021", "-0.02"]),
    "kl_spike": (*after("kl/ref_k1", 0.51, 0.49), ["0.51", "0.05", "above 0.5"]),
    "entropy_collapse": (*after("policy/entropy", 0.66, 0.67), ["0.66", "is 2", "divided by 3"]),
    "entropy_explosion": (*after("policy/entropy", 6.1, 5.9), ["6.1", "2", "times 3"]),
    "scores_equal": (*at_once("reward/score_std", 0.0009, 0.0011), ["0.0009", "0.001", "score 1"]),
    "reward_faults": (*at_once("reward/function_faults", 7, 6), ["7", "64"]),
    "answers_unscored": (*at_once("rollout/unscored_share", 0.11, 0.1), ["0.11", "0.1"]),
    "groups_equal": (
        lasting(11, reward__equal_groups_share=0.91, value__explained_variance=math.nan),
        lasting(11, reward__equal_groups_share=0.9, value__explained_variance=math.nan),
        ["0.91", "0.9", "11 steps"],
    ),
    "answers_left": (*at_once("rollout/left_share", 0.11, 0.1), ["0.11", "0.1"]),
    "duplicate_answers": (
        *at_once("rollout/distinct_share", 0.49, 0.51),
        ["0.49", "0.5", "40 tokens"],
    ),
    "fewer_answers_end": (*after("rollout/ended_share", 0.59, 0.61), ["0.59", "0.9"]),
    "answers_never_end": (
        lasting(11, rollout__ended_share=0.09),
        lasting(11, rollout__ended_share=0.11),
        ["0.09", "11 steps"],
    ),
    "clip_fraction_high": (*at_once("policy/clip_fraction", 0.31, 0.3), ["0.31", "0.3"]),
    "first_ratio_not_one": (
        *at_once("policy/first_log_ratio_abs_mean", 0.051, 0.05),
        ["0.051", "at most 0.2"],
    ),
    "critic_explains_nothing": (
        lasting(11, value__explained_variance=0.01),
        lasting(11, value__explained_variance=0.03),
        ["0.01", "11 steps"],
    ),
    "logprob_diff_high": (*at_once("rollout/logprob_diff_mean", 0.11, 0.1), ["0.11", "0.1"]),
    "gradient_explodes": (
        *after("optim/grad_norm/critic", 20.1, 19.9),
        ["optim/grad_norm/critic", "20.1", "10", " 2"],
    ),
    "updates_skipped": (*after("optim/nonfinite_skipped", 1, 0), ["is 1, up from 0"]),
}
FIT_CASES = {
    "loss_grows": (
        [*HEALTHY, *[{"loss": 1.53}] * 11],
        [*HEALTHY, *[{"loss": 1.52}] * 11],
        ["1.53", "1.5 times", "so far, 1"],
    ),
    "overfitting": (
        evaluated([0.9, 0.7, 0.71, 0.72], [1.0, 0.8, 0.6, 0.5]),
        evaluated([0.9, 0.7, 0.71, 0.69], [1.0, 0.8, 0.6, 0.5]),
        ["0.72", "0.7 at step 4", "from 0.8 to 0.5", "2 evaluations"],
    ),
    "gradient_explodes": (
        [*HEALTHY, {"grad_norm": 10.1}],
        [*HEALTHY, {"grad_norm": 9.9}],
        ["10.1", "10", "1"],
    ),
    "updates_skipped": (
        [*HEALTHY, {"optim/nonfinite_skipped": 2}],
        [*HEALTHY, {"optim/nonfinite_skipped": 0}],
        ["is 2, up from 0"],
    ),
}
BOTH = [(ppo_watch, name, *case) for name, case in CASES.items()]
BOTH += [(fit_watch, name, *case) for name, case in FIT_CASES.items()]
RISING = {"reward/score_mean": 1.21}  # more than a quarter of the standard deviation
EXPLOITS = {
    "the KL explodes": [
        {"kl/ref_k1": 0.51},
        ["kl/ref_k1 from 0.05 to 0.51", "reward/score_mean from 1 to 1.21"],
    ],
    "length and KL climb": [
        {"kl/ref_k1": 0.076, "rollout/length_mean": 61},
        ["rollout/length_mean from 40 to 61"],
    ],
}


@pytest.mark.parametrize(("watch", "name", "fires", "silent", "texts"), BOTH)
def test_a_rule_fires_beyond_its_threshold_with_the_numbers_and_is_silent_before_it(
    watch, name, fires, silent, texts
):
    last = events_of(watch(), fires)[-1]
    assert (last.step, last.name) == (len(fires), name)
    assert [text for text in texts if text not in last.seen] == [], last.seen
    assert events_of(watch(), silent) == []


@pytest.mark.parametrize("case", EXPLOITS)
def test_a_rising_score_with_kl_or_length_is_exploitation_of_the_reward(case):
    changes, texts = EXPLOITS[case]
    events = events_of(ppo_watch("kl_spike=0.5"), [*HALF, *[{**RISING, **changes}] * 6])
    [event] = [event for event in events if event.name == "reward_exploited"]
    assert event.level == "error"
    assert [text for text in texts if text not in event.seen] == [], event.seen


@pytest.mark.parametrize(
    "changes",
    [
        {**EXPLOITS["the KL explodes"][0], "reward/score_mean": 1.19},
        {**RISING, "rollout/length_mean": 61},
        {**RISING, "rollout/length_mean": 59, "kl/ref_k1": 0.076},
    ],
)
def test_a_rising_score_alone_is_no_exploitation(changes):
    events = events_of(ppo_watch(), [*HALF, *[changes] * 6])
    assert [event for event in events if event.name == "reward_exploited"] == []


def test_scores_that_are_equal_after_the_clip_alone_are_seen():
    clipped = {"reward/score_std": 2.0, "reward/clipped_std": 0.0, "reward/clipped_share": 1.0}
    [event] = events_of(ppo_watch(), [clipped] * 20)
    assert (
        event.name == "scores_equal"
        and "reward/clipped_std is 0" in event.seen
        and "100% are clipped" in event.seen
    )
    assert events_of(ppo_watch(), [{**clipped, "reward/clipped_std": 0.1}] * 20) == []


@pytest.mark.parametrize(
    "changes", [{}, {"value/explained_variance": math.nan, "reward/score_std": 0.0}]
)
def test_equal_groups_are_no_event_with_a_critic_or_where_all_scores_are_equal(changes):
    events = events_of(ppo_watch(), [{"reward/equal_groups_share": 1.0, **changes}] * 20)
    assert [event.name for event in events if event.name == "groups_equal"] == []


def test_without_a_reference_the_length_alone_counts():
    watch = ppo_watch()
    without = {name: value for name, value in PPO_STEP.items() if name != "kl/ref_k1"}
    found = []
    for step in range(1, 12):
        longer = {"rollout/length_mean": 61.0, **RISING} if step > 5 else {}
        found += watch.check(step, {**without, **longer})
    assert [event.name for event in found] == ["reward_exploited"]


def test_every_rule_has_a_case_and_names_only_flags_that_exist():
    assert {rule.name for rule in CORE_PPO_RULES} == {*CASES, "reward_exploited"}
    assert {rule.name for rule in FIT_RULES} == set(FIT_CASES)
    known = {
        step: {field.name for group in groups_of(STEPS[step]) for field in fields(group)}
        for step in ("ppo", "sft", "reward")
    }
    for rules, steps in ((CORE_PPO_RULES, ["ppo"]), (FIT_RULES, ["sft", "reward"])):
        for rule in rules:
            for flag in re.findall(r"--(\w+)", f"{rule.cause} {rule.change}"):
                assert any(flag in known[step] for step in steps), (rule.name, flag)


@pytest.mark.parametrize(
    ("name", "near", "far"), [("kl_spike", "0.5", "0.6"), ("clip_fraction_high", "0.3", "0.4")]
)
def test_a_threshold_can_be_set_and_a_rule_put_off(name, near, far):
    for word, fires in ((near, True), (far, False), ("off", False)):
        assert bool(events_of(ppo_watch(f"{name}={word}"), CASES[name][0])) is fires


def test_an_overflow_does_not_hide_a_gradient_that_explodes_later():
    [event] = events_of(fit_watch(), [{"grad_norm": math.inf}, *HEALTHY[1:], {"grad_norm": 10.1}])
    assert event.name == "gradient_explodes"
    # the overflow itself is no event
    assert events_of(fit_watch(), [*HEALTHY, {"grad_norm": math.inf}]) == []


def test_a_rising_held_out_loss_is_no_overfitting_while_the_training_loss_rises_too():
    assert events_of(fit_watch(), evaluated([0.9, 0.7, 0.71, 0.72], [1.0, 0.8, 0.9, 0.9])) == []


UNEVEN = [
    {**step, "loss": step["loss"] + 0.1 * ("eval_loss" in step)}
    for step in FIT_CASES["overfitting"][0]
]
RESUMED = [  # a watch, its steps, and the events of the whole run
    (fit_watch, UNEVEN, ["overfitting"]),
    (fit_watch, [*HEALTHY, *[{"loss": 1.4}] * 9, *[{"loss": 1.7}] * 9], ["loss_grows"]),
    (
        ppo_watch,
        [
            {"value/explained_variance": -0.1, "optim/grad_norm/critic": 2.0 + (step > 20) * 30}
            for step in range(25)
        ],
        ["critic_explains_nothing", "gradient_explodes"],
    ),
]


@pytest.mark.parametrize("cut", [3, 7, 11, 15, 19, 25])
@pytest.mark.parametrize(("kind", "steps", "names"), RESUMED)
def test_a_resumed_watch_finds_what_it_would_have_found(tmp_path, kind, steps, names, cut):
    expected = events_of(kind(), steps)
    assert set(names) <= {event.name for event in expected}
    watch, resumed, healthy = kind(), kind(), FIT_STEP if kind is fit_watch else PPO_STEP
    events_of(watch, steps[:cut])
    save_state(tmp_path / "state", watch.state_dict())
    resumed.load_state_dict(load_state(tmp_path / "state"))
    for step, changes in enumerate(steps[cut:], cut + 1):
        resumed.check(step, {**healthy, **changes})
    assert resumed.events == expected


CLIPPED = {**PPO_STEP, "policy/clip_fraction": 0.5}
NEGATIVE = {**PPO_STEP, "kl/ref_k1": -0.5}  # an error


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "health.jsonl").read_text().splitlines()]


def test_a_warning_that_persists_is_one_event_until_three_steps_without_it():
    shape = "cc.c..c...c"  # c: clipped
    watch = ppo_watch()
    found = [
        bool(watch.check(step, CLIPPED if mark == "c" else PPO_STEP))
        for step, mark in enumerate(shape)
    ]
    assert "".join("x" if fresh else "-" for fresh in found) == "x---------x"


def test_a_resumed_run_has_the_events_up_to_its_checkpoint(tmp_path):
    watch = ppo_watch()
    with pytest.raises(
        StorageError, match=r"health\.jsonl: cannot be written .*; .* removed a folder"
    ):
        watch.begin(tmp_path / "missing")
    watch.begin(tmp_path)
    assert lines(tmp_path) == []
    watch.check(1, CLIPPED)
    assert list(lines(tmp_path)[0]) == ["step", "name", "level", "seen", "cause", "change"]
    save_state(tmp_path / "state", watch.state_dict())
    watch.check(2, {**CLIPPED, "reward/score_std": 0.0})  # after the checkpoint: runs again
    assert len(lines(tmp_path)) == 2

    resumed = ppo_watch()
    resumed.load_state_dict(load_state(tmp_path / "state"))
    resumed.begin(tmp_path)
    assert [event["name"] for event in lines(tmp_path)] == ["clip_fraction_high"]
    [event] = resumed.check(2, {**CLIPPED, "reward/score_std": 0.0})
    assert event.name == "scores_equal"
    assert [event["step"] for event in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("stop", "metrics", "stops"),
    [
        ("off", NEGATIVE, None),
        ("error", CLIPPED, False),
        ("error", NEGATIVE, True),
        ("warning", NEGATIVE, True),
        ("warning", PPO_STEP, False),
    ],
)
def test_an_event_of_the_chosen_level_stops_the_run(stop, metrics, stops):
    watch, reasons = ppo_watch(stop_on_health=stop), []
    checkpointer = SimpleNamespace(stop_if=reasons.append)
    watch.check(7, metrics)
    watch.stop_if_due(checkpointer)
    assert [reason is not None for reason in reasons] == ([] if stops is None else [stops])
    if stops:
        assert reasons[0].startswith(f"--stop_on_health {stop}: step 7: {watch.events[0].name}: ")
    watch.check(8, metrics)  # resumed: it stands, and does not stop again
    watch.stop_if_due(checkpointer)
    assert reasons[1:] == ([] if stops is None else [None])


RUNS = json.loads((Path(__file__).parent / "healthy_runs.json").read_text())


def watched(columns: dict[str, list[float | None]]) -> list[str]:
    """The events of a run, as text."""
    is_ppo = "reward/score_mean" in columns
    watch = HealthWatch(PPOHealthFlags() if is_ppo else FitHealthFlags())
    for number in range(len(next(iter(columns.values())))):
        step = {
            name: values[number] for name, values in columns.items() if values[number] is not None
        }
        watch.check(number + 1, step)
    return [f"step {event.step}: {event.name}: {event.seen}" for event in watch.events]


@pytest.mark.parametrize("run", RUNS)
def test_a_healthy_run_has_no_events(run):
    assert watched(RUNS[run]) == []
