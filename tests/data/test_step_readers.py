"""Labels of steps in the ways that data sets write them."""

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
