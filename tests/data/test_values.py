"""Values of rows: nested names, numbers, the correct answer, chat messages, tools."""

import json
import math
from copy import deepcopy

import pytest

from dschat_ppo.data.examples import (
    has_value,
    looks_like_messages,
    margin_of,
    read_messages,
    read_tools,
    text_at,
    truth_of,
    value_at,
)
from dschat_ppo.errors import UserError

ROW = {
    "reward_model": {"ground_truth": "72"}, "a.b": 1, "passages": [{"text": "t"}], "empty": None, "margin": "1.5",
}  # fmt: skip


@pytest.mark.parametrize(("path", "words"), [
    ("other", "has no 'other'"), ("reward_model.x", "has no 'reward_model.x'"),
    ("empty.x", "has no 'empty.x': 'empty' is null"),
])  # fmt: skip
def test_a_dot_leads_into_a_column_and_a_missing_field_is_named_with_its_path(path, words):
    assert [value_at(ROW, path) for path in ("a.b", "passages.0.text", "empty")] == [1, "t", None]
    assert not has_value(ROW, path)
    with pytest.raises(UserError, match=words):
        value_at(ROW, path)


def test_a_column_of_whole_numbers_that_lacks_one_holds_floats():
    """As pandas stores 3, 4 and a missing value: 3.0, 4.0 and NaN."""
    inside = {"n": 72.0, "none": math.nan}
    row = {"n": 3.0, "none": math.nan, "half": 2.5, "yes": True, "inside": inside, "far": -math.inf}
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
    with pytest.raises(UserError, match=r"'n' does not match 'x\(\.\)'"):
        truth_of(row, "n", "x(.)")


def test_a_margin_is_a_finite_number_and_zero_if_it_is_missing():
    given = ({}, {"margin": None}, {"margin": ""}, {"margin": math.nan}, ROW)
    assert [margin_of(row) for row in given] == [0, 0, 0, 0, 1.5]
    for value in ("big", "nan", math.inf, [1]):
        with pytest.raises(UserError, match="'margin' is"):
            margin_of({"margin": value})


CALLED = {"name": "g", "arguments": {}}


@pytest.mark.parametrize(("given", "expected"), [
    ({"from": "human", "value": "a"}, {"role": "user", "content": "a"}),
    ({"from": "observation", "value": "a"}, {"role": "tool", "content": "a"}),
    ({"role": "user", "content": "a", "from": None, "value": None}, {"role": "user", "content": "a"}),
    ({"role": None, "content": None, "from": "user", "value": "a"}, {"role": "user", "content": "a"}),
    ({"role": "developer", "content": ""}, {"role": "developer", "content": ""}),
    (
        {"from": "function_call", "value": '{"name": "g", "arguments": ""}'},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALLED}]},
    ),
    (
        {"role": "user", "content": [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "ab"},
    ),
])  # fmt: skip
def test_one_message(given, expected):
    before = deepcopy(given)
    assert read_messages([given], "m") == read_messages(json.dumps([given]), "m") == [expected]  # as in CSV files
    assert looks_like_messages([given]) and given == before


def test_a_list_of_json_texts_holds_messages_and_a_list_of_other_texts_turns():
    texts = ['{"role": "user", "content": "a"}', '{"role": "assistant", "content": "b"}']
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert read_messages(texts, "m") == read_messages(["a", "b"], "m") == turns
    assert not any(map(looks_like_messages, ("text", [], ["a"], {"text": "a"}, None, [[{"role": "x"}]])))


@pytest.mark.parametrize(("value", "words"), [
    ("[1", "'m' is str"), ([], "'m' is an empty list"),
    ([{"role": "user", "content": {"bytes": 9}}], "the content of message 1 of 'm' is 9 bytes"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        "message 1 of 'm' has a part of type 'image_url'; only text parts can be used",
    ),
    ([{"from": "function_call", "value": "{}"}], "a tool call of message 1 of 'm' has no 'name'"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        "'arguments' of a tool call of message 1 of 'm' is str",
    ),
])  # fmt: skip
def test_the_message_that_cannot_be_used_is_named(value, words):
    with pytest.raises(UserError, match=words):
        read_messages(value, "m")


@pytest.mark.parametrize(
    ("value", "tools"),
    [(None, None), ("", None), ("[]", None), ([], None), ('[{"a": null}]', [{"a": None}]), (['{"a": 1}'], [{"a": 1}]),
     ([{"a": {"b": None, "c": [{"d": None}]}}], [{"a": {"c": [{}]}}])],
)  # fmt: skip
def test_tools_are_a_list_or_its_json(value, tools):
    assert read_tools(value, "tools") == tools
    for other in ("prose", '{"a": 1}', 7):
        with pytest.raises(UserError, match="'tools' is"):
            read_tools(other, "tools")
