"""Fields of rows: nested names, margins, and the correct answer."""

import math

import pytest

from dschat_ppo.data.examples import has_value, margin_of, text_at, truth_of, value_at
from dschat_ppo.errors import UserError

ROW = {
    "reward_model": {"ground_truth": "72", "none": None}, "a.b": 1, "passages": [{"text": "t"}], "empty": None,
    "margin": "1.5",
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value"),
    [("reward_model.ground_truth", "72"), ("a.b", 1), ("passages.0.text", "t"), ("empty", None)],
)
def test_a_dot_leads_into_a_column(path, value):
    assert value_at(ROW, path) == value


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("other", "has no 'other'"),
        ("passages.1.text", "has no 'passages.1.text': 'passages' is a list"),
        ("reward_model.x", "has no 'reward_model.x'"),
        ("empty.x", "has no 'empty.x': 'empty' is null"),
    ],
)
def test_a_missing_field_is_named_with_its_path(path, words):
    assert not has_value(ROW, path)
    with pytest.raises(UserError, match=words):
        value_at(ROW, path)


def test_null_is_no_value_and_no_text():
    assert not has_value(ROW, "reward_model.none") and has_value(ROW, "a.b")
    with pytest.raises(UserError, match=r"'reward_model\.none' is null; expected text"):
        text_at(ROW, "reward_model.none")


def test_a_column_of_whole_numbers_that_lacks_one_holds_floats():
    """As pandas stores 3, 4 and a missing value: 3.0, 4.0 and NaN."""
    row = {
        "n": 3.0,
        "none": math.nan,
        "half": 2.5,
        "yes": True,
        "inside": {"n": 72.0, "none": math.nan},
        "far": -math.inf,
    }
    assert [text_at(row, path) for path in ("n", "half", "yes", "inside.n")] == ["3", "2.5", "true", "72"]
    assert str(truth_of(row, "inside.n", None)) == "72" and truth_of(row, "n", r"^(\d+)$") == "3"
    for path in ("none", "inside.none"):
        assert not has_value(row, path)
        with pytest.raises(UserError, match=f"'{path}' is null; expected text"):
            text_at(row, path)
        with pytest.raises(UserError, match=f"'{path}' is null; expected the correct answer"):
            truth_of(row, path, None)
    with pytest.raises(UserError, match="'far' is float .'-inf'.; expected text"):
        text_at(row, "far")
    assert margin_of({"margin": math.nan}) == 0


@pytest.mark.parametrize(("row", "margin"), [({}, 0), ({"margin": None}, 0), ({"margin": ""}, 0), (ROW, 1.5)])
def test_a_missing_margin_is_zero(row, margin):
    assert margin_of(row) == margin


@pytest.mark.parametrize("value", ["big", "nan", float("inf"), [1]])
def test_a_margin_must_be_a_finite_number(value):
    with pytest.raises(UserError, match="'margin' is"):
        margin_of({"margin": value})


def test_the_pattern_finds_the_correct_answer():
    row = {"answer": "2 * 3 = 6\n#### 6", "other": None}
    assert truth_of(row, "answer", "#### (.*)") == "6"
    assert truth_of(row, "answer", None) == row["answer"]
    with pytest.raises(UserError, match=r"'answer' does not match 'x\(\.\)'"):
        truth_of(row, "answer", "x(.)")
    with pytest.raises(UserError, match="'other' is null"):
        truth_of(row, "other", None)
