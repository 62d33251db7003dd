"""Chat messages of data sets to messages for a chat template."""

import pytest

from dschat_ppo.data.examples import looks_like_messages, read_messages, read_tools, without_nulls
from dschat_ppo.errors import UserError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"from": "human", "value": "a"}, {"role": "user", "content": "a"}),
        ({"from": "gpt", "value": "a"}, {"role": "assistant", "content": "a"}),
        ({"from": "observation", "value": "a"}, {"role": "tool", "content": "a"}),
        ({"role": "human", "content": "a"}, {"role": "user", "content": "a"}),
        ({"role": "user", "content": "a", "from": None, "value": None}, {"role": "user", "content": "a"}),
        ({"role": None, "content": None, "from": "user", "value": "a"}, {"role": "user", "content": "a"}),
        ({"role": "developer", "content": ""}, {"role": "developer", "content": ""}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "ab"},
        ),
    ],
)
def test_one_message(given, expected):
    assert read_messages([given], "m") == [expected]


def test_messages_may_be_json_as_in_csv_files():
    assert read_messages('[{"role": "user", "content": "a"}]', "m") == [{"role": "user", "content": "a"}]
    assert read_messages({"role": "user", "content": "a"}, "m") == [{"role": "user", "content": "a"}]


def test_a_list_of_json_texts_holds_messages_and_a_list_of_other_texts_turns():
    texts = ['{"role": "user", "content": "a"}', '{"role": "assistant", "content": "b"}']
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert read_messages(texts, "m") == read_messages(["a", "b"], "m") == turns


def test_the_given_messages_are_not_changed():
    given = [{"from": "human", "value": "a", "x": None}]
    read_messages(given, "m")
    assert given == [{"from": "human", "value": "a", "x": None}]


def test_arguments_of_tool_calls_become_objects():
    calls = [{"function": {"name": "f", "arguments": '{"a": 1}'}}, {"name": "g", "arguments": "", "id": None}]
    [message] = read_messages([{"role": "assistant", "content": "", "tool_calls": calls}], "m")
    assert message["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": 1}}}, {"name": "g", "arguments": {}}]
    [message] = read_messages([{"from": "function_call", "value": '[{"name": "f"}, {"name": "g"}]'}], "m")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "'m' is null; expected a list"),
        ("text", "'m' is str"),
        ("[1", "'m' is str"),
        ([], "'m' is an empty list"),
        ([3], "message 1 of 'm' is int"),
        ([{"role": "user", "content": {"bytes": 9}}], "the content of message 1 of 'm' is 9 bytes"),
        ([{"content": "a"}], "message 1 of 'm' has no role; expected system, user"),
        ([{"role": ["user"], "content": "a"}], r"message 1 of 'm' has role \['user'\]"),
        ([{"from": "human"}], "message 1 of 'm' has no value"),
        ([{"role": "user", "content": 3}], "the content of message 1 of 'm' is int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "message 1 of 'm' has a part of type 'image_url'; only text parts can be used",
        ),
        ([{"role": "user", "content": ["a"]}], "message 1 of 'm' has a part of type 'str'"),
        ([{"from": "function_call", "value": "find()"}], "a tool call of message 1 of 'm' is str .'find"),
        ([{"from": "function_call", "value": "{}"}], "a tool call of message 1 of 'm' has no 'name'"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "'arguments' of a tool call of message 1 of 'm' is str",
        ),
    ],
)
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


@pytest.mark.parametrize("value", ["prose", '{"a": 1}', 7, [{"a": 1}, "b"]])
def test_other_tools_are_refused(value):
    with pytest.raises(UserError, match="'tools' is"):
        read_tools(value, "tools")


def test_what_looks_like_messages():
    assert looks_like_messages([{"role": "x"}]) and looks_like_messages({"from": "x"})
    assert not any(map(looks_like_messages, ("text", [], ["a"], {"text": "a"}, None, [[{"role": "x"}]])))


def test_nulls_are_dropped_from_objects_alone():
    assert without_nulls({"a": None, "b": [None, {"c": None}]}) == {"b": [None, {}]}
