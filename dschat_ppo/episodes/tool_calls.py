"""Tool calls in what a model writes: found by the response template of its tokenizer, or else in
the common formats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.examples import Message, functions_of
from dschat_ppo.data.rendered import check_calls
from dschat_ppo.data.replies import Reply, read_reply, without_open_thought
from dschat_ppo.data.templates import render, turn_end, without_final
from dschat_ppo.errors import UserError

# What follows these marks is one call, or (Mistral) a list of calls; a mark without its end is a
# call that was cut.
_CALLS = re.compile(
    # Hermes, Qwen; JSON or the tags of Qwen3-Coder
    r"<tool_call>(?P<hermes>.*?)(?:</tool_call>|\Z)"
    r"|\[TOOL_CALLS\](?P<mistral>.*?)(?=\[TOOL_CALLS\]|\Z)"
    r"|<\|python_tag\|>(?P<llama>.*?)(?:<\|e(?:om|ot)_id\|>|\Z)",
    re.DOTALL,
)
_TAGS = re.compile(r"\s*<function=[^>\s]+>.*</function>\s*", re.DOTALL)
_FUNCTION = re.compile(  # one of them; a value may hold "</function>"
    r"<function=([^>\s]+)>(.*?)</function>\s*(?=<function=[^>\s]+>|\Z)", re.DOTALL
)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
# Mistral since November 2024
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]([^\[]*))?\[ARGS\](.*)", re.DOTALL)
_BARE_NAME = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"]*)"')

DEEPEST = 100  # levels of a message; Python's own limit is 1000


class MalformedCallError(ValueError):
    """A tool call that cannot be read; the message is for the model."""


def parse_action(
    tokenizer: PreTrainedTokenizerBase, text: str, tools: list[Any], is_opened: bool = False
) -> Message:
    """The assistant's message that `text` (without its end token) is: `content`, `tool_calls` if it
    has any, whose `arguments` are dicts, and `reasoning_content` if it has thoughts, in which no
    call counts. `is_opened`: whether the prompt ends inside a thought. `MalformedCallError` for a
    call that is no valid JSON or was cut."""
    reply = read_reply(text, is_opened)
    message: Message = {"role": "assistant", "content": ""}
    if reply.thoughts:
        message["reasoning_content"] = reply.thoughts
    if getattr(tokenizer, "response_template", None) is not None:
        rest = "".join(text[start:stop] for start, stop in reply.outside)
        try:
            message |= tokenizer.parse_response(rest, prefix="", tools=tools or None)
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            raise MalformedCallError(f"the tool call cannot be read: {problem}") from None
        return _shallow(message)
    calls = list[dict[str, Any]]()
    marked = _marked_calls(reply)
    for match in marked:
        calls += _calls_of(match[match.lastgroup or 0], tools)
    if calls:
        message["content"] = reply.rest_until(marked[0].start()).rstrip()
    elif tools:
        calls = _bare_calls(reply.rest, tools)
    if calls:
        message["tool_calls"] = calls
    else:
        message["content"] = reply.rest
    return _shallow(message)


def check_calls_read_back(tokenizer: PreTrainedTokenizerBase, tools: list[Any]) -> None:
    """Render a call of the first tool and read it back. `UserError` if the chat template leaves out
    the tool or its call, or writes the call in a form that `parse_action` does not read: no call of
    the model would ever be carried out."""
    [schema, *_] = functions_of([{"tool_calls": tools}])
    arguments = _example_arguments(schema)
    function = {"name": schema["name"], "arguments": arguments}
    call = {"type": "function", "id": "call00000", "function": function}
    ask: Message = {"role": "user", "content": "A question."}
    answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    check_calls(tokenizer, [ask], answer, tools)
    opening = without_open_thought(render(tokenizer, [ask], open_answer=True, tools=tools))
    conversation = render(tokenizer, [ask, answer], open_answer=False, tools=tools)
    start = len(commonprefix([opening, conversation]))
    turn = conversation[start:].removesuffix(turn_end(tokenizer).dropped)
    text, _ = without_final(tokenizer, turn)
    problem = "no call is found in it"
    try:
        for read_call in parse_action(tokenizer, text, tools).get("tool_calls") or ():
            read = read_call["function"]
            problem = f"it is read as {read['name']} {json.dumps(read['arguments'])}"
            if (read["name"], read["arguments"]) == (schema["name"], arguments):
                return
    except MalformedCallError as error:
        problem = str(error)
    raise UserError(
        f"a call that the chat template writes cannot be read back ({problem}): {turn!r}; give the"
        " tokenizer a `response_template` that reads it (docs/environments.md, Tokens), or take a"
        " template that writes calls as Hermes, Qwen, Llama 3 or Mistral do (--chat_template FILE)"
    )


def _example_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Values for the arguments of a tool that are plain texts, numbers or booleans."""
    values = {"string": "x", "integer": 1, "number": 1, "boolean": True}
    return {
        name: values[kind]
        for name, kind in _argument_types(schema).items()
        if isinstance(kind, str) and kind in values
    }


def _argument_types(schema: dict[str, Any]) -> dict[str, Any]:
    """The `type` of each argument of a tool; None where its schema has none."""
    parameters = (schema.get("parameters") or {}).get("properties") or {}
    return {name: parameter.get("type") for name, parameter in parameters.items()}


def said_and_called(text: str, is_opened: bool = False) -> tuple[str, str]:
    """The part of a message before its tool calls in the common formats, with its thoughts, and the
    rest of it; read as by `parse_action`."""
    reply = read_reply(text, is_opened)
    marked = _marked_calls(reply)
    if marked:
        start = marked[0].start()
        return text[:start].rstrip(), text[start:]
    with suppress(MalformedCallError):
        if _bare_calls(reply.rest, []):
            start = reply.outside[-1][0]
            return text[:start].rstrip(), text[start:].lstrip()
    return text, ""


def _marked_calls(reply: Reply) -> list[re.Match[str]]:
    """The calls outside of thoughts that have the marks of a format."""
    return [
        match for start, stop in reply.outside for match in _CALLS.finditer(reply.text, start, stop)
    ]


def _bare_calls(text: str, tools: list[Any]) -> list[dict[str, Any]]:
    """The call that a text is as a whole, as Llama 3.1 and later write it; [] for any other text,
    also if that is JSON. `MalformedCallError` for a call of one of `tools` that is no valid JSON.
    """
    if not text.lstrip().startswith("{"):
        return []
    names = [str(tool["name"]) for tool in functions_of([{"tool_calls": tools}]) if "name" in tool]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        named = _BARE_NAME.match(text)
        if named is not None and named[1] in names:
            return _calls_of(text, tools)
        return []
    name = value.get("name")
    has_arguments = "arguments" in value or "parameters" in value
    is_call = isinstance(name, str) and (has_arguments or name in names)
    if is_call:
        return _calls_of(text, tools)
    return []


def _shallow(value: Any, levels: int = DEEPEST) -> Any:
    """The value, if what is inside it can be sent and stored; `MalformedCallError` if it is nested
    deeper."""
    if levels == 0:
        raise MalformedCallError(f"the tool call is nested more than {DEEPEST} levels deep")
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    for each in inner:
        _shallow(each, levels - 1)
    return value


def _calls_of(text: str, tools: list[Any]) -> list[dict[str, Any]]:
    """The calls of one mark, as in transformers' chats."""
    if _TAGS.fullmatch(text) is not None:
        return _tagged_calls(text, tools)
    named = _NAMED.fullmatch(text)
    if named is not None:
        return [_call_message(named[1], _json(named[3]), named[2])]
    calls_as_json = _json(text)
    if not isinstance(calls_as_json, list):
        calls_as_json = [calls_as_json]
    calls = []
    for call in calls_as_json:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise MalformedCallError('a tool call is a JSON object with "name" and "arguments"')
        arguments = call.get("arguments", call.get("parameters"))
        calls.append(_call_message(call["name"], arguments, call.get("id")))
    return calls


def _tagged_calls(text: str, tools: list[Any]) -> list[dict[str, Any]]:
    """The calls in Qwen3-Coder's tags. A value is JSON where it is JSON, unless the schema of the
    tool says that it is a string: the template writes strings without quotes."""
    types_of_tools = {
        schema.get("name"): _argument_types(schema)
        for schema in functions_of([{"tool_calls": tools}])
    }
    calls = []
    for name, body in _FUNCTION.findall(text):
        types = types_of_tools.get(name, {})
        arguments = dict[str, Any]()
        for argument, value in _PARAMETER.findall(body):
            arguments[argument] = value
            if types.get(argument) != "string":
                arguments[argument] = _value(value)
        calls.append(_call_message(name, arguments))
    return calls


def _call_message(name: str, arguments: Any, call_id: Any = None) -> dict[str, Any]:
    """A call as in transformers' chats; `call_id`: the id by which the model names it."""
    function = {"name": name, "arguments": _arguments(arguments)}
    if call_id:
        return {"type": "function", "id": str(call_id), "function": function}
    return {"type": "function", "function": function}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise MalformedCallError(f"the tool call is not valid JSON ({problem})") from None


def _arguments(arguments: Any) -> dict[str, Any]:
    """The arguments of a call as a dict: they may be JSON in a text, or missing."""
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise MalformedCallError('"arguments" of a tool call is a JSON object')
    return arguments


def _value(text: str) -> Any:
    """A parameter of Qwen3-Coder's tags: JSON where it is JSON, or else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
