"""The metric of `--metric_for_best`: its name and direction."""

import math

import pytest
from command_lines import read

from dschat_ppo.config.export_flags import BestFlags, BestMetric
from dschat_ppo.errors import UserError


@pytest.mark.parametrize(("text", "name", "higher"), [
    (None, "eval_loss", False),
    ("loss", "eval_loss", False),
    ("eval_perplexity", "eval_perplexity", False),
    ("accuracy", "eval_accuracy", True),
    ("eval_margin", "eval_margin", True),
    ("eval_router_loss", "eval_router_loss", False),
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


def test_step_1_measures_the_loss_and_the_perplexity():
    for text in ("eval_perplexity", "loss", "loss/data", "eval_loss:max"):
        assert read("sft", "--metric_for_best", text)["metric_for_best"] == text
    with pytest.raises(
        UserError, match="^--metric_for_best accuracy: the evaluation of this step has eval_loss and ev"
    ):
        read("sft", "--metric_for_best", "accuracy")
    assert read("reward", "--metric_for_best", "accuracy")["metric_for_best"] == "accuracy"
