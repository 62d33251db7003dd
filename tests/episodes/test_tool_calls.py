"""Tool calls in the text of a model, in the formats of published ones."""

import pytest
from tiny_tokenizers import tokenizer_of

from dschat_ppo.episodes.tool_calls import MalformedCallError, parse_action

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ADD = {"name": "add", "arguments": {"a": 1, "b": "x"}}
JSON = '{"name": "add", "arguments": {"a": 1, "b": "x"}}'


def calls_of(text, tools=TOOLS):
    message = parse_action(tokenizer_of("bytes"), text, tools)
    return message["content"], [call["function"] for call in message.get("tool_calls", [])]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("It is 3.", "It is 3.", []),
        (f"I add.\n<tool_call>\n{JSON}\n</tool_call>", "I add.", [ADD]),
        (f"<tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>", "", [ADD, ADD]),
        ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>\n"
         "</tool_call>", "", [ADD]),  # Qwen3-Coder, Qwen3.5
        ("<tool_call><function=add><parameter=b>\ntwo\nlines\n</parameter></function></tool_call>", "",
         [{"name": "add", "arguments": {"b": "two\nlines"}}]),
        ('{"name": "add", "parameters": {"a": 1, "b": "x"}}', "", [ADD]),  # Llama 3
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "x"}}<|eom_id|>', "", [ADD]),
        (f"[TOOL_CALLS][{JSON}, {JSON}]", "", [ADD, ADD]),  # Mistral
        ('Well.[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}[TOOL_CALLS]end[CALL_ID]9[ARGS]{}', "Well.",
         [ADD, {"name": "end", "arguments": {}}]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}</tool_call>', "", [ADD]),
        ('<tool_call>{"name": "now"}</tool_call>', "", [{"name": "now", "arguments": {}}]),
    ],
)  # fmt: skip
def test_calls_in_the_formats_of_published_models(text, content, calls):
    assert calls_of(text) == (content, calls)


def test_json_is_an_answer_where_there_is_no_tool():
    assert calls_of(JSON, tools=[]) == (JSON, [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>add(1)</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "add", "argum', "not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", '"name" and "arguments"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "is a JSON object"),
    ],
)
def test_a_malformed_call(text, problem):
    with pytest.raises(MalformedCallError, match=problem):
        calls_of(text)


def test_a_response_template_of_the_tokenizer_goes_first():
    tokenizer = tokenizer_of("bytes")
    tokenizer.response_template = {
        "start_anchor": "assistant", "defaults": {"role": "assistant"},
        "fields": {"content": {}, "tool_calls": {
            "open_pattern": r"<call (?P<name>\w+)>", "close": "</call>", "content": "json", "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}}},
    }  # fmt: skip
    message = parse_action(tokenizer, 'Now.<call add>{"a": 1}</call>', TOOLS)
    assert message["content"] == "Now."
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    with pytest.raises(MalformedCallError, match="could not parse"):
        parse_action(tokenizer, "<call add>{a}</call>", TOOLS)


def test_a_call_that_is_nested_too_deep_is_an_error_for_the_model():
    """Else pickling it would end the rank, and again after each resume."""
    for levels, is_read in ((90, True), (500, False)):
        value = "[" * levels + "]" * levels
        text = f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>'
        if is_read:
            assert calls_of(text)[1][0]["name"] == "f"
        else:
            with pytest.raises(MalformedCallError, match="nested more than 100 levels deep"):
                calls_of(text)
