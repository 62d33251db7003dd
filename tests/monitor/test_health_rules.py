"""Each rule fires beyond its threshold, with the numbers, and is silent on the other side of it."""

import math
import re
from dataclasses import fields
from pathlib import Path

import pytest
from health_steps import FIT_STEP, PPO_STEP, WINDOW, events_of, fit_watch, ppo_watch

import dschat_ppo
from dschat_ppo.checkpoint.state_files import load_state, save_state
from dschat_ppo.config.cli import STEPS
from dschat_ppo.config.health_flags import FIT_RULES, PPO_RULES
from dschat_ppo.config.step_config import groups_of

HEALTHY: list[dict[str, float]] = [{}] * WINDOW


def lasting(steps: int, **metrics: float) -> list[dict[str, float]]:
    """`steps` equal steps; `__` in a name stands for `/`."""
    return [{name.replace("__", "/"): value for name, value in metrics.items()}] * steps


def at_once(metric: str, fires: float, silent: float) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    return [{metric: fires}], [{metric: silent}]


def after(metric: str, fires: float, silent: float) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    return [*HEALTHY, {metric: fires}], [*HEALTHY, {metric: silent}]


HALF = [{}] * 5


def evaluated(held_out: list[float], training: list[float]) -> list[dict[str, float]]:
    """Two optimizer steps before each evaluation."""
    pairs = zip(held_out, training, strict=True)
    return [step for loss, trained in pairs for step in ({"loss": trained}, {"loss": trained, "eval_loss": loss})]


# name -> (steps at whose end it fires, steps over which it is silent, texts in the message)
CASES = {
    "kl_negative": (*at_once("kl/ref_k1", -0.021, -0.019), ["-0.021", "-0.02"]),
    "kl_spike": (*after("kl/ref_k1", 0.51, 0.49), ["0.51", "0.05", "above 0.5"]),
    "entropy_collapse": (*after("policy/entropy", 0.66, 0.67), ["0.66", "is 2", "divided by 3"]),
    "entropy_explosion": (*after("policy/entropy", 6.1, 5.9), ["6.1", "2", "times 3"]),
    "scores_equal": (*at_once("reward/score_std", 0.0009, 0.0011), ["0.0009", "0.001", "score 1"]),
    "reward_faults": (*at_once("reward/function_faults", 7, 6), ["7", "64"]),
    "duplicate_answers": (*at_once("rollout/distinct_share", 0.49, 0.51), ["0.49", "0.5", "40 tokens"]),
    "fewer_answers_end": (*after("rollout/ended_share", 0.59, 0.61), ["0.59", "0.9"]),
    "answers_never_end": (
        lasting(11, rollout__ended_share=0.09), lasting(11, rollout__ended_share=0.11), ["0.09", "11 steps"],
    ),
    "clip_fraction_high": (*at_once("policy/clip_fraction", 0.31, 0.3), ["0.31", "0.3"]),
    "first_ratio_not_one": (
        *at_once("policy/first_log_ratio_abs_mean", 0.051, 0.05), ["0.051", "at most 0.2"],
    ),
    "critic_explains_nothing": (
        lasting(11, value__explained_variance=0.01), lasting(11, value__explained_variance=0.03), ["0.01", "11 steps"],
    ),
    "logprob_diff_high": (*at_once("rollout/logprob_diff_mean", 0.11, 0.1), ["0.11", "0.1"]),
    "gradient_explodes": (*after("optim/grad_norm/critic", 20.1, 19.9), ["optim/grad_norm/critic", "20.1", "10", " 2"]),
    "updates_skipped": (*after("optim/nonfinite_skipped", 1, 0), ["is 1, up from 0"]),
}  # fmt: skip
FIT_CASES = {
    "loss_grows": (
        [*HEALTHY, *[{"loss": 1.53}] * 11], [*HEALTHY, *[{"loss": 1.52}] * 11], ["1.53", "1.5 times", "so far, 1"],
    ),
    "overfitting": (
        evaluated([0.9, 0.7, 0.71, 0.72], [1.0, 0.8, 0.6, 0.5]),
        evaluated([0.9, 0.7, 0.71, 0.69], [1.0, 0.8, 0.6, 0.5]),
        ["0.72", "0.7 at step 4", "from 0.8 to 0.5", "2 evaluations"],
    ),
    "gradient_explodes": ([*HEALTHY, {"grad_norm": 10.1}], [*HEALTHY, {"grad_norm": 9.9}], ["10.1", "10", "1"]),
    "updates_skipped": (
        [*HEALTHY, {"optim/nonfinite_skipped": 2}], [*HEALTHY, {"optim/nonfinite_skipped": 0}], ["is 2, up from 0"],
    ),
}  # fmt: skip
BOTH = [(ppo_watch, name, *case) for name, case in CASES.items()]
BOTH += [(fit_watch, name, *case) for name, case in FIT_CASES.items()]
RISING = {"reward/score_mean": 1.21}  # more than a quarter of the standard deviation
EXPLOITS = {
    "the KL explodes": [{"kl/ref_k1": 0.51}, ["kl/ref_k1 from 0.05 to 0.51", "reward/score_mean from 1 to 1.21"]],
    "length and KL climb": [{"kl/ref_k1": 0.076, "rollout/length_mean": 61}, ["rollout/length_mean from 40 to 61"]],
}


@pytest.mark.parametrize(("watch", "name", "fires", "silent", "texts"), BOTH)
def test_a_rule_fires_beyond_its_threshold_with_the_numbers_and_is_silent_before_it(watch, name, fires, silent, texts):
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


@pytest.mark.parametrize("changes", [
    {**EXPLOITS["the KL explodes"][0], "reward/score_mean": 1.19},
    {**RISING, "rollout/length_mean": 61},
    {**RISING, "rollout/length_mean": 59, "kl/ref_k1": 0.076},
])  # fmt: skip
def test_a_rising_score_alone_is_no_exploitation(changes):
    events = events_of(ppo_watch(), [*HALF, *[changes] * 6])
    assert [event for event in events if event.name == "reward_exploited"] == []


def test_scores_that_are_equal_after_the_clip_alone_are_seen():
    clipped = {"reward/score_std": 2.0, "reward/clipped_std": 0.0, "reward/clipped_share": 1.0}
    [event] = events_of(ppo_watch(), [clipped] * 20)
    assert event.name == "scores_equal" and "reward/clipped_std is 0" in event.seen and "100% are clipped" in event.seen
    assert events_of(ppo_watch(), [{**clipped, "reward/clipped_std": 0.1}] * 20) == []


def test_without_a_reference_the_length_alone_counts():
    watch = ppo_watch()
    without = {name: value for name, value in PPO_STEP.items() if name != "kl/ref_k1"}
    found = []
    for step in range(1, 12):
        longer = {"rollout/length_mean": 61.0, **RISING} if step > 5 else {}
        found += watch.check(step, {**without, **longer})
    assert [event.name for event in found] == ["reward_exploited"]


def test_ratios_of_rollout_log_probs_are_reported_once():
    same = {"policy/first_log_ratio_abs_mean": 0.09, "rollout/logprob_diff_mean": 0.09}
    assert events_of(ppo_watch(), [same]) == []
    assert [event.name for event in events_of(ppo_watch(), [{**same, "rollout/logprob_diff_mean": 0.01}])] == [
        "first_ratio_not_one"
    ]


def test_every_rule_has_a_case_and_names_only_flags_that_exist():
    assert {rule.name for rule in PPO_RULES} == {*CASES, "reward_exploited"}
    assert {rule.name for rule in FIT_RULES} == set(FIT_CASES)
    known = {step: {field.name for group in groups_of(STEPS[step]).values() for field in fields(group)}
             for step in ("ppo", "sft", "reward")}  # fmt: skip
    for rules, steps in ((PPO_RULES, ["ppo"]), (FIT_RULES, ["sft", "reward"])):
        for rule in rules:
            for flag in re.findall(r"--(\w+)", f"{rule.cause} {rule.change}"):
                assert any(flag in known[step] for step in steps), (rule.name, flag)


@pytest.mark.parametrize("rules", [PPO_RULES, FIT_RULES])
def test_the_documents_name_each_event_and_the_default_of_each_threshold(rules):
    text = (Path(dschat_ppo.__file__).parents[1] / "docs/troubleshooting.md").read_text()
    rows = {row.split("`")[1]: row for row in text.splitlines() if row.startswith("| `")}
    for rule in rules:
        assert rule.name in rows, rule.name
        assert ("(error)" in rows[rule.name]) == (rule.level == "error"), rule.name
        if rule.threshold is not None:
            assert re.search(rf"(?<![\d.])({rule.threshold:g}|{100 * rule.threshold:g} %)(?![\d.])", rows[rule.name]), (
                rule.name
            )


@pytest.mark.parametrize(("name", "near", "far"), [("kl_spike", "0.5", "0.6"), ("clip_fraction_high", "0.3", "0.4")])
def test_a_threshold_can_be_set_and_a_rule_put_off(name, near, far):
    for word, fires in ((near, True), (far, False), ("off", False)):
        assert bool(events_of(ppo_watch(f"{name}={word}"), CASES[name][0])) is fires


def test_an_overflow_does_not_hide_a_gradient_that_explodes_later():
    [event] = events_of(fit_watch(), [{"grad_norm": math.inf}, *HEALTHY[1:], {"grad_norm": 10.1}])
    assert event.name == "gradient_explodes"
    assert events_of(fit_watch(), [*HEALTHY, {"grad_norm": math.inf}]) == []  # the overflow itself is no event


def test_a_rising_held_out_loss_is_no_overfitting_while_the_training_loss_rises_too():
    assert events_of(fit_watch(), evaluated([0.9, 0.7, 0.71, 0.72], [1.0, 0.8, 0.9, 0.9])) == []


UNEVEN = [{**step, "loss": step["loss"] + 0.1 * ("eval_loss" in step)} for step in FIT_CASES["overfitting"][0]]
RESUMED = [  # a watch, its steps, and the events of the whole run
    (fit_watch, UNEVEN, ["overfitting"]),
    (fit_watch, [*HEALTHY, *[{"loss": 1.4}] * 9, *[{"loss": 1.7}] * 9], ["loss_grows"]),
    (ppo_watch, [{"value/explained_variance": -0.1, "optim/grad_norm/critic": 2.0 + (step > 20) * 30}
                 for step in range(25)], ["critic_explains_nothing", "gradient_explodes"]),
]  # fmt: skip


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
