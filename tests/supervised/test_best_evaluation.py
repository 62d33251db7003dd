"""The best evaluation of a run of step 1 or 2."""

import math

import pytest

from dschat_ppo.config.run_flags import BestMetric
from dschat_ppo.errors import UserError
from dschat_ppo.supervised.trainer import BestEvaluation

ACCURACY = BestMetric("eval_accuracy", higher=True)


def test_the_first_of_equal_values_is_the_best_and_nan_never_is():
    best, found = BestEvaluation(ACCURACY), []
    for step, value in enumerate([math.nan, 0.5, 0.25, 0.5, math.inf, 0.75, math.nan], start=1):
        best.consider({"eval_accuracy": value, "eval_loss": 1.0}, step)
        found.append(best.found)
    assert found == [None, *[(0.5, 2)] * 4, *[(0.75, 6)] * 2]
    assert best.result() == {"best_eval_accuracy": 0.75, "best_step": 6}
    assert BestEvaluation().result() == {}


def test_a_metric_that_evaluations_lack_is_refused_with_those_they_have():
    best = BestEvaluation(ACCURACY)
    best.require_metric({})
    best.require_metric({"eval_accuracy": 0.0})
    with pytest.raises(
        UserError, match=r"^--metric_for_best: the evaluation has no eval_accuracy; it has eval_a, eval_b$"
    ):
        best.require_metric({"eval_b": 1.0, "eval_a": 1.0})


def test_a_resumed_run_keeps_the_best_unless_the_metric_changed(said):
    best = BestEvaluation(ACCURACY)
    best.consider({"eval_accuracy": 0.5}, 3)
    resumed, other = BestEvaluation(ACCURACY), BestEvaluation()
    resumed.load_state_dict(best.state_dict())
    other.load_state_dict(best.state_dict())
    assert (resumed.found, other.found) == ((0.5, 3), None)
    assert said == ["--metric_for_best: the run looks for the best eval_loss from here on"]
    old = BestEvaluation()  # a checkpoint of a version without the flag
    old.load_state_dict({"best": [0.25, 2]})
    assert old.found == (0.25, 2)


def test_the_other_direction_is_another_metric(said):
    best, other = BestEvaluation(ACCURACY), BestEvaluation(BestMetric("eval_accuracy", higher=False))
    best.consider({"eval_accuracy": 0.5}, 3)
    other.load_state_dict(best.state_dict())
    assert other.found is None and len(said) == 1


def test_the_best_is_sought_again_if_its_model_was_not_kept(said, tmp_path):
    best = BestEvaluation(ACCURACY)
    best.require_model(tmp_path / "best")  # none was found yet
    best.consider({"eval_accuracy": 0.5}, 3)
    (tmp_path / "best").mkdir()
    best.require_model(tmp_path / "best")
    assert best.found == (0.5, 3) and said == []
    best.require_model(tmp_path / "none")
    assert best.found is None and "does not hold the model of step 3, the best so far" in said[0]
    best.consider({"eval_accuracy": 0.25}, 4)
    assert best.result() == {"best_eval_accuracy": 0.25, "best_step": 4}
