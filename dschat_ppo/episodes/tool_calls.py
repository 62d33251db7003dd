"""Tool calls in what a model writes: found by the response template of its tokenizer, or else in
the common formats."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.examples import Message

# What follows these marks is one call, or (Mistral) a list of calls; a mark without its end is a
# call that was cut.
_CALLS = re.compile(
    # Hermes, Qwen; JSON or the tags of Qwen3-Coder
    r"<tool_call>(?P<hermes>.*?)(?:</tool_call>|\Z)"
    r"|\[TOOL_CALLS\](?P<mistral>.*?)(?=\[TOOL_CALLS\]|\Z)"
    r"|<\|python_tag\|>(?P<llama>.*?)(?:<\|e(?:om|ot)_id\|>|\Z)",
    re.DOTALL,
)
_TAGS = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
# Mistral since November 2024
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]([^\[]*))?\[ARGS\](.*)", re.DOTALL)


DEEPEST = 100  # levels of a message; Python's own limit is 1000


class MalformedCallError(ValueError):
    """A tool call that cannot be read; the message is for the model."""


def parse_action(tokenizer: PreTrainedTokenizerBase, text: str, tools: list[Any]) -> Message:
    """The assistant's message that `text` (without its end token) is: `content`, and `tool_calls`
    if it has any, whose `arguments` are dicts. `MalformedCallError` for a call that is no valid
    JSON or was cut."""
    template = getattr(tokenizer, "response_template", None)
    if template is not None:
        try:
            found = tokenizer.parse_response(text, prefix="", tools=tools or None)
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            raise MalformedCallError(f"the tool call cannot be read: {problem}") from None
        return _shallow({"role": "assistant", "content": "", **found})
    calls, content = list[dict[str, Any]](), text
    for match in _CALLS.finditer(text):
        calls += _calls_of(match[match.lastgroup or 0])
        content = text[: match.start()] if len(calls) and content is text else content
    # Llama 3.1 and later: the whole message is a call
    if not calls and tools and text.lstrip().startswith("{"):
        calls, content = _calls_of(text), ""
    message: Message = {"role": "assistant", "content": content.rstrip() if calls else text}
    if calls:
        message["tool_calls"] = calls
    return _shallow(message)


def _shallow(value: Any, levels: int = DEEPEST) -> Any:
    """The value, if what is inside it can be sent and stored; `MalformedCallError` if it is nested
    deeper."""
    if levels == 0:
        raise MalformedCallError(f"the tool call is nested more than {DEEPEST} levels deep")
    for part in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        _shallow(part, levels - 1)
    return value


def said_and_called(text: str) -> tuple[str, str]:
    """The part of a message before its tool calls in the common formats, and the rest of it."""
    if (match := _CALLS.search(text)) is not None:
        return text[: match.start()].rstrip(), text[match.start() :]
    if text.lstrip().startswith("{"):
        with suppress(MalformedCallError):
            _calls_of(text)
            return "", text
    return text, ""


def _calls_of(text: str) -> list[dict[str, Any]]:
    """The calls of one mark, as in transformers' chats."""
    if (tags := _TAGS.fullmatch(text)) is not None:
        return [
            _call(tags[1], {name: _value(value) for name, value in _PARAMETER.findall(tags[2])})
        ]
    if (named := _NAMED.fullmatch(text)) is not None:
        return [_call(named[1], _json(named[3]), named[2])]
    found = _json(text)
    calls = []
    for call in found if isinstance(found, list) else [found]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise MalformedCallError('a tool call is a JSON object with "name" and "arguments"')
        calls.append(
            _call(call["name"], call.get("arguments", call.get("parameters")), call.get("id"))
        )
    return calls


def _call(name: str, arguments: Any, number: Any = None) -> dict[str, Any]:
    """A call; `number`: the id by which the model names it."""
    known = {"id": str(number)} if number else {}
    return {
        "type": "function",
        **known,
        "function": {"name": name, "arguments": _arguments(arguments)},
    }


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise MalformedCallError(f"the tool call is not valid JSON ({problem})") from None


def _arguments(found: Any) -> dict[str, Any]:
    found = _json(found) if isinstance(found, str) else {} if found is None else found
    if not isinstance(found, dict):
        raise MalformedCallError('"arguments" of a tool call is a JSON object')
    return found


def _value(text: str) -> Any:
    """A parameter of Qwen3-Coder's tags: JSON where it is JSON, or else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
