"""The best evaluation of a run of step 1 or 2."""

import math

from dschat_ppo.config.supervised_flags import BestMetric
from dschat_ppo.run.output_folder import best_is_lost
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


def test_a_resumed_run_keeps_the_best_unless_the_metric_changed(said):
    best = BestEvaluation(ACCURACY)
    best.consider({"eval_accuracy": 0.5}, 3)
    others = BestEvaluation(), BestEvaluation(BestMetric("eval_accuracy", higher=False))
    for resumed, found in ((BestEvaluation(ACCURACY), (0.5, 3)), (others[0], None), (others[1], None)):
        resumed.load_state_dict(best.state_dict())
        assert resumed.found == found
    assert [line.split("best ")[1] for line in said] == ["eval_loss from here on", "eval_accuracy from here on"]
    old = BestEvaluation()  # a checkpoint of a version without the flag
    old.load_state_dict({"best": [0.25, 2]})
    assert old.found == (0.25, 2)


def test_the_best_is_lost_where_its_models_are_not(said, tmp_path):
    (tmp_path / "best").mkdir()
    assert not best_is_lost(tmp_path / "best", 3) and said == []
    assert best_is_lost(tmp_path / "none", 3)
    assert "does not hold the models of step 3, the best so far" in said[0]
