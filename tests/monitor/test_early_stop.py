"""`--early_stop_patience`: which evaluations are an improvement, what is logged, and what a resumed
run knows. The trainers' tests show where a run ends."""

import math

import pytest

from dschat_ppo.config.supervised_flags import BestMetric
from dschat_ppo.monitor.early_stop import EarlyStop, warn_of_few_evaluations

LOSS = BestMetric("eval_loss", higher=False)
SCORE = BestMetric("eval/score", higher=True)


@pytest.mark.parametrize(
    ("metric", "min_delta", "values", "misses"),
    [
        (LOSS, 0.0, [3, 2, 2, 2.5, 1], [0, 0, 1, 2, 0]),
        (SCORE, 0.0, [3, 2, 2, 2.5, 4], [0, 1, 2, 3, 0]),
        # small improvements add up until they exceed the limit: 2.5 is 0.5 below 3, 2.25 is 0.75
        (LOSS, 0.5, [3, 2.75, 2.5, 2.25, 2], [0, 1, 2, 0, 1]),
        (SCORE, 0.5, [1, 1.25, 1.5, 1.75, 1.5], [0, 1, 2, 0, 1]),
        (SCORE, 0.0, [math.nan, math.inf, 1, math.nan, 2], [1, 2, 0, 1, 0]),
    ],
)
def test_evaluations_are_counted_since_the_last_improvement(metric, min_delta, values, misses):
    early_stop = EarlyStop(2, min_delta, metric)
    counts = []
    for step, value in enumerate(values, start=1):
        early_stop.consider({metric.name: value, "eval_other": -step}, step)
        counts.append(early_stop.misses)
        assert early_stop.is_due == (early_stop.misses >= 2)
        assert not EarlyStop(None, min_delta, metric, misses=early_stop.misses).is_due
    assert counts == misses


def test_no_step_begins_when_the_end_is_due_and_a_line_says_why(said):
    early_stop = EarlyStop(2, 0.1, SCORE)
    done = []
    for step in early_stop.until_due(range(1, 10)):
        done.append(step)
        early_stop.consider({"eval/score": 0.5}, step)
    assert done == [1, 2, 3]
    assert said == [
        "--early_stop_patience 2: the run ends after step 3: eval/score was 0.5 after step 1 and"
        " has not improved by more than 0.1 since, in 2 evaluations"
    ]


def test_a_run_whose_last_evaluation_is_due_ends_normally(said):
    early_stop = EarlyStop(1, 0.0, LOSS)
    for step in early_stop.until_due(range(2)):
        early_stop.consider({"eval_loss": math.nan}, step)
        early_stop.misses = step
    assert said == [] and "eval_loss was never finite" in early_stop.reason


@pytest.mark.parametrize(("metric", "misses"), [(LOSS, 1), (BestMetric("eval_loss", True), 0)])
def test_a_resumed_run_keeps_the_count_of_the_same_metric(metric, misses):
    before = EarlyStop(2, 0.0, LOSS)
    before.consider({"eval_loss": 0.5}, 3)
    before.consider({"eval_loss": 0.6}, 6)
    after = EarlyStop(2, 0.0, metric)
    after.load_state_dict(before.state_dict())
    assert after.misses == misses
    if misses:
        assert after == before


@pytest.mark.parametrize(
    ("patience", "evaluations", "warned"), [(3, 2, 1), (3, 3, 0), (None, 0, 0)]
)
def test_a_patience_longer_than_the_run_gives_a_warning(said, patience, evaluations, warned):
    warn_of_few_evaluations(patience, evaluations)
    assert len(said) == warned
