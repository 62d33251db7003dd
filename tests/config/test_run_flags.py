"""Flags of every run: ranges, which steps it prints, and the metric of `--metric_for_best`."""

import math

import pytest
from command_lines import NEEDED, read

from dschat_ppo.config.cli import parse
from dschat_ppo.config.run_flags import BestFlags, BestMetric, ConsoleFlags
from dschat_ppo.errors import UserError


@pytest.mark.parametrize(("step", "every"), [("sft", 10), ("reward", 10), ("ppo", 1)])
def test_steps_1_and_2_print_every_tenth_step_and_step_3_every_one(step, every):
    assert (read(step)["logging_steps"], read(step)["verbose"]) == (every, False)
    assert parse(step, [*NEEDED[step], "--logging_steps", "3", "--verbose"]).console == ConsoleFlags(3, True)


def test_the_first_and_the_last_step_are_printed():
    flags = ConsoleFlags(logging_steps=4)
    assert [step for step in range(1, 11) if flags.prints(step, 10)] == [1, 4, 8, 10]


@pytest.mark.parametrize(("text", "name", "higher"), [
    (None, "eval_loss", False),
    ("loss", "eval_loss", False),
    ("eval_perplexity", "eval_perplexity", False),
    ("accuracy", "eval_accuracy", True),
    ("eval_margin", "eval_margin", True),
    ("eval_accuracy/helpful", "eval_accuracy/helpful", True),
    ("loss/accuracy", "eval_loss/accuracy", False),  # a data set of that name
    ("chosen_score:max", "eval_chosen_score", True),
    ("eval_rejected_score:min", "eval_rejected_score", False),
    ("accuracy:min", "eval_accuracy", False),
    ("loss/a:b", "eval_loss/a:b", False),
])  # fmt: skip
def test_the_direction_follows_from_the_name_or_is_given(text, name, higher):
    assert BestFlags(text).best_metric == BestMetric(name, higher)


@pytest.mark.parametrize("text", ["chosen_score", "eval_chosen_score", "chosen_score:up", "", "lossy"])
def test_a_metric_of_unknown_direction_is_refused(text):
    with pytest.raises(UserError, match=f"^--metric_for_best {text}: is a higher or a lower value better"):
        BestFlags(text)


def test_better_is_higher_or_lower_and_never_nan():
    assert BestMetric("a", True).is_better(2, 1) and not BestMetric("a", True).is_better(1, 1)
    assert BestMetric("a", False).is_better(1, 2) and not BestMetric("a", False).is_better(2, 2)
    assert not any(BestMetric("a", higher).is_better(math.nan, 1) for higher in (True, False))


@pytest.mark.parametrize(("step", "words", "accepted"), [
    ("sft", "loss", True), ("sft", "eval_perplexity", True), ("sft", "loss/name", True), ("sft", "accuracy", False),
    ("sft", "eval_router_loss", False), ("reward", "accuracy/name", True), ("reward", "chosen_score:max", True),
    ("reward", "perplexity", False), ("reward", "centering_loss", False),
    ("reward", "centering_loss --center_rewards_coef 0.1", True), ("reward", "margin --objective dpo", True),
    ("reward", "chosen_score:max --objective dpo", False), ("reward", "nll --objective dpo", False),
    ("reward", "nll --objective orpo", True),
    ("reward", "margin --objective process", False), ("reward", "accuracy_bad:max --objective process", True),
])  # fmt: skip
def test_a_metric_that_no_evaluation_of_the_step_has_is_refused_by_the_flags_alone(step, words, accepted):
    line = [*NEEDED[step], "--metric_for_best", *words.split()]
    if accepted:
        assert parse(step, line).best.metric_for_best == words.split()[0]
        return
    with pytest.raises(UserError, match=rf"^--metric_for_best {words.split()[0]}: the evaluation has no eval_\w+; it"):
        parse(step, line)


def test_the_refusal_lists_the_metrics():
    with pytest.raises(UserError) as problem:
        parse("sft", [*NEEDED["sft"], "--metric_for_best", "accuracy"])
    wanted = "--metric_for_best accuracy: the evaluation has no eval_accuracy; it has eval_loss, eval_perplexity"
    assert str(problem.value) == wanted
