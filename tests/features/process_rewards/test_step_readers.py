"""Labels of steps in the ways that data sets write them."""

import json
import math

import pytest
from form_fixtures import form_of, read

from dschat_ppo.errors import UserError

ROW = {"problem": "Q:", "steps": ["a", "b", "c"]}


def labels_of(label: object, **flags) -> list:
    """The labels of the steps, None for a step without one."""
    [example] = read([{**ROW, "label": label}], "steps", **flags)
    return [None if math.isnan(one) else one for one in example.labels]


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (-1, [1, 1, 1]),  # ProcessBench: no step is wrong
        (0, [0, None, None]),
        (1, [1, 0, None]),
        ("2", [1, 1, 0]),
        (2.0, [1, 1, 0]),
        ([True, True, False], [1, 1, 0]),
        ("[1, 1, 0]", [1, 1, 0]),
        (["+", "-", None], [1, 0, None]),
        ([1, -1, 1], [1, 0, 1]),
        (["good", "bad", "correct"], [1, 0, 1]),
        ([0.25, 1, 0], [0.25, 1, 0]),
    ],
)
def test_a_label_for_each_step_or_the_first_wrong_one(label, expected):
    assert labels_of(label) == expected


@pytest.mark.parametrize("steps", ["steps", "completions"])
@pytest.mark.parametrize(
    ("text", "key", "values", "expected"),
    [
        ("text", "label", [1, 0, None], (1, 0, None)),
        ("step", "correct", [True, False, True], (1, 0, 1)),
        ("content", "label", ["+", "-", "+"], (1, 0, 1)),
        ("text", "label", [0.25, 1, 0], (0.25, 1, 0)),
    ],
)
def test_steps_that_are_objects_hold_their_labels(steps, text, key, values, expected):
    objects = [{text: word, key: value} for word, value in zip("abc", values, strict=True)]
    for column in (objects, json.dumps(objects)):
        [example] = read([{"problem": "Q:", steps: column}], "steps")
        assert (example.prompt, example.answers) == ("Q:", ["a", "b", "c"])
        labels = [None if math.isnan(one) else one for one in example.labels]
        assert labels == list(expected)


def test_ratings_of_steps_are_those_of_prm800k():
    steps = [{"text": "a", "rating": rating} for rating in (1, 0, -1, None)]
    [example] = read([{"problem": "Q:", "steps": steps}], "steps")
    assert example.labels[:3] == (1.0, 1.0, 0.0) and math.isnan(example.labels[3])
    [example] = read([{"problem": "Q:", "steps": steps[:2]}], "steps")
    assert example.labels == (1.0, 0.0)  # of two ratings, the lower one is a wrong step


def test_a_step_that_is_an_object_has_a_text_and_a_label():
    rows = [{"problem": "Q:", "steps": [{"text": "a", "label": 1}]}]
    form = form_of(rows)
    for step, words in [
        ("b", r"step 2 of 'steps' is str \('b'\); expected an object with 'label' and a text"),
        ({"label": 1}, "the text of step 2 of 'steps' is null; expected one in text, step"),
        ({"text": "b", "label": 5}, r"'label' in 'steps' is \[1, 5\]; expected true, false"),
    ]:
        with pytest.raises(UserError, match=words):
            form.read({"problem": "Q:", "steps": [*rows[0]["steps"], step]}, "steps")


def test_a_flag_names_the_column_of_the_first_wrong_step():
    row = {**ROW, "first_error": 1}
    with pytest.raises(UserError, match="--label_column"):
        form_of([row])
    [example] = read([row], "steps", label_column="first_error")
    assert example.labels[:2] == (1.0, 0.0) and math.isnan(example.labels[2])


@pytest.mark.parametrize("name", ["first_error_step", "first_wrong", "mistake_index"])
def test_no_number_of_a_first_wrong_step_says_that_all_are_right(name):
    rows = [{**ROW, name: 1}, {**ROW, name: None}, {**ROW, name: math.nan}]
    labels = [example.labels for example in read(rows, "steps", label_column=name)]
    assert labels[1] == labels[2] == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (3, "'label' is 3, but 'steps' has 3 steps; expected the number of the first wrong step"),
        (-2, "'label' is -2, but"),
        (1.5, "'label' is 1.5, but"),
        ([1, 0, -1], r"'label' is \[1, 0, -1\]; expected true, false, or numbers from 0 to 1"),
        ([1, 1], "'steps' has 3 steps, but 'label' 2"),
        (["a", "b", "c"], "an entry of 'label' is str"),
        (None, "'label' is null; expected a list .*, or the number of the .*-1 if all are right"),
    ],
)
def test_other_labels_are_refused(label, words):
    form = form_of([{**ROW, "label": -1}])
    with pytest.raises(UserError, match=words):
        form.read({**ROW, "label": label}, "steps")
