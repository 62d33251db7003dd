"""Tool calls in what a model writes: found by the response template of its tokenizer, or else in
the common formats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.examples import Message
from dschat_ppo.data.messages import (
    functions_of,
)
from dschat_ppo.data.rendered import check_calls
from dschat_ppo.data.replies import Reply, read_reply, without_open_thought
from dschat_ppo.data.templates import render, turn_end, without_final
from dschat_ppo.data.written_calls import (
    CallSection,
    MalformedCallError,
    WrittenCall,
    call_sections,
    json_calls,
)
from dschat_ppo.errors import UserError

_BARE_NAME = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"]*)"')

DEEPEST = 100  # levels of a message; Python's own limit is 1000


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
    sections = list[CallSection]()
    if tools:
        sections += _bare_section(reply, tools)
    sections += _marked_sections(reply, sections)
    calls = list[WrittenCall]()
    for section in sections:
        if section.problem:
            raise MalformedCallError(section.problem)
        calls += section.calls
    if calls:
        message["tool_calls"] = [_call_message(call, tools) for call in calls]
        spans = [(section.start, section.end) for section in sections]
        message["content"] = reply.rest_without(spans)
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
    sections = _bare_section(reply, [])
    sections += _marked_sections(reply, sections)
    if sections:
        start = sections[0].start
        return text[:start].rstrip(), text[start:]
    return text, ""


def _marked_sections(reply: Reply, bare: Sequence[CallSection]) -> list[CallSection]:
    """The calls outside of thoughts that have the marks of a format; `bare`: those in JSON without
    marks before them."""
    first = max([section.end for section in bare], default=0)
    sections = list[CallSection]()
    for start, stop in reply.outside:
        sections += call_sections(reply.text[:stop], max(start, first))
    return sections


def _bare_section(reply: Reply, tools: list[Any]) -> list[CallSection]:
    """The calls without marks that an answer is, as Llama 3.1 and later write them; [] for any
    other text, also if that is JSON. Text may follow calls of `tools`. `MalformedCallError` for a
    call of one of `tools` that is no valid JSON."""
    if not reply.outside:
        return []
    start, stop = reply.outside[-1]
    text = reply.text[:stop]
    start += len(text[start:]) - len(text[start:].lstrip())
    if not text.startswith("{", start):
        return []
    names = [str(tool["name"]) for tool in functions_of([{"tool_calls": tools}]) if "name" in tool]
    try:
        calls, end = json_calls(text, start)
        following = text[end:].strip()
        if following.startswith(("}", "]", ",")):
            raise MalformedCallError("the tool call is not valid JSON (more of it follows its end)")
    except MalformedCallError:
        named = _BARE_NAME.match(text, start)
        if named is not None and named[1] in names:
            raise
        return []
    is_all = not following
    for call in calls:
        is_known = call.name in names
        has_arguments = call.arguments is not None
        if not is_known and not (is_all and has_arguments):
            return []
    return [CallSection(start, end, tuple(calls))]


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


def _call_message(call: WrittenCall, tools: list[Any]) -> dict[str, Any]:
    """A call as in transformers' chats."""
    if call.is_tagged:
        arguments = _typed_arguments(call, tools)
    else:
        arguments = _arguments(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    if call.call_id:
        return {"type": "function", "id": str(call.call_id), "function": function}
    return {"type": "function", "function": function}


def _typed_arguments(call: WrittenCall, tools: list[Any]) -> dict[str, Any]:
    """The values of Qwen3-Coder's tags. A value is JSON where it is JSON, unless the schema of the
    tool says that it is a string: the template writes strings without quotes."""
    types = dict[str, Any]()
    for schema in functions_of([{"tool_calls": tools}]):
        if schema.get("name") == call.name:
            types = _argument_types(schema)
    arguments = dict[str, Any]()
    for name, text in call.arguments.items():
        arguments[name] = text
        if types.get(name) != "string":
            with suppress(ValueError, RecursionError):
                arguments[name] = json.loads(text)
    return arguments


def _arguments(arguments: Any) -> dict[str, Any]:
    """The arguments of a call as a dict: they may be JSON in a text, or missing."""
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as problem:
            raise MalformedCallError(f"the tool call is not valid JSON ({problem})") from None
    if not isinstance(arguments, dict):
        raise MalformedCallError('"arguments" of a tool call is a JSON object')
    return arguments
