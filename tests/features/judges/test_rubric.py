"""Rubrics: their forms, their scores, and what is wrong with a row."""

import json
import math

import pytest
from judge_parts import ROLLOUT, request, stub_judge

from dschat_ppo.config.cli import parse
from dschat_ppo.data.examples import Example
from dschat_ppo.errors import UserError
from dschat_ppo.features.judges.rubric import Criterion, criteria_of
from dschat_ppo.features.judges.spec import parse_judge
from dschat_ppo.features.judges.step_data import changed, counted_needs

RUBRIC = [
    {"criterion": "names the hall", "weight": 3, "name": "hall"},
    {"description": "is short", "weight": None},
    {"title": "is rude", "weight": -2},
]
YES = {"names the hall": 1.0, "is short": 0.5, "is rude": 0.25}


def by_criterion(text):
    share = next(share for criterion, share in YES.items() if f"Criterion:\n{criterion}" in text)
    return [math.log(1 - share) if share < 1 else -1e9, math.log(share)]


@pytest.mark.parametrize("value", [RUBRIC, json.dumps(RUBRIC)])
def test_forms_of_a_rubric(value):
    assert criteria_of(value, "r") == [
        Criterion("names the hall", 3.0, "hall"),
        Criterion("is short"),
        Criterion("is rude", -2.0),
    ]
    assert criteria_of("is [short", "r") == [Criterion("is [short")]
    assert criteria_of(["a", "b"], "r") == [Criterion("a"), Criterion("b")]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["a", {"weight": 2}], "criterion 2 of 'r' has no text"),
        (["a", " "], "criterion 2 of 'r' has no text"),
        ([{"criterion": 5}], "criterion 1 of 'r' has no text"),
        ([7], "criterion 1 of 'r' is neither a text nor an object"),
        ([{"criterion": "a", "weight": "x"}], "has the weight 'x', which is not a finite number"),
        ([{"criterion": "a", "weight": -1}], "'r' has no criterion with a weight above 0"),
        ([], "'r' is no list of criteria"),
        ({"criterion": "a"}, "'r' is no list of criteria"),
    ],
)
def test_what_is_wrong_with_a_rubric(value, message):
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        counted_needs(parse_judge("J?rubric=r"), {"r": value}, Example("p", []), None)


def test_the_score_is_the_weighted_sum_over_the_positive_weights():
    judge = stub_judge(by_criterion, "J?rubric=r")
    scores = judge(request(["in the hall", "..."], [{"r": RUBRIC}, {"r": RUBRIC}]), ROLLOUT)
    assert scores.tolist() == pytest.approx([(3 * 1 + 1 * 0.5 - 2 * 0.25) / 4, 0.0])
    assert judge.numbers["hall"].tolist()[0] == pytest.approx(1.0)
    assert judge.numbers["hall"][1].isnan() and set(judge.numbers) == {"hall"}
    assert len(judge.reader.texts) == 3


def test_one_criterion_unread_is_no_score():
    judge = stub_judge(
        lambda text: [math.nan, 0.0] if "is rude" in text else [0.0, 0.0], "J?rubric=r"
    )
    assert judge(request(["in the hall"], [{"r": RUBRIC}]), ROLLOUT).isnan().all()
    assert judge.failed.all()


def test_rows_without_what_a_judge_needs_are_named_when_they_are_read():
    example = Example("p", [])
    with pytest.raises(UserError, match="has no value at 'r' .--judge J: rubric=r"):
        counted_needs(parse_judge("J?rubric=r"), {}, example, None)
    assert counted_needs(parse_judge("a=J?rubric=r"), {}, example, None) == [0]
    with pytest.raises(UserError, match="has no right answer .--judge J: compare=reference"):
        counted_needs(parse_judge("J?compare=reference"), {}, example, None)
    assert counted_needs(parse_judge("J?compare=reference"), {"answer": 4}, example, None) == [1]


@pytest.mark.parametrize(
    ("flags", "of_training", "of_evaluation"),
    [
        ("--judge K J?rubric=r", ["judge_2_needs"], ["judge_2_needs"]),
        ("--judge J?rubric=r --eval_data_path e --eval_judge K", ["judge_1_needs"], []),
        ("--judge K --eval_data_path e --eval_judge J?rubric=r", [], ["judge_1_needs"]),
        (
            "--judge J?compare=reference --eval_data_path e --eval_reward_function length",
            ["judge_1_needs"],
            [],
        ),
    ],
)
def test_rows_are_asked_for_what_the_judges_that_score_them_need(flags, of_training, of_evaluation):
    alone = (
        "--actor_model_name_or_path a --data_path d --output_dir o --use_reward_model False"
        f" --advantage_estimator rloo --n_samples_per_prompt 2 {flags}"
    )
    config = parse("ppo", alone.split())
    data = changed(config, config.data_of_step)
    assert [column.name for column in data.prompt_columns] == of_training
    assert [column.name for column in data.eval_prompt_columns] == of_evaluation
