"""Tool calls in chat messages: their arguments, and whether a chat template renders them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from dschat_ppo.errors import UserError

Message = dict[str, Any]


def _calls(messages: list[Message]) -> Iterator[dict[str, Any]]:
    """The dictionaries that hold `name` and `arguments`: of OpenAI's form, inside `function`, or the calls alone."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(function, dict):
                yield function


def with_arguments_as_text(messages: list[Message]) -> list[Message]:
    """Messages whose tool calls have their arguments as JSON text, as OpenAI's API has them. Most chat templates expect
    dictionaries and write JSON, but some write the arguments as they are."""
    copied = copy.deepcopy(messages)
    for function in _calls(copied):
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return copied


def has_calls(messages: list[Message]) -> bool:
    """Whether a message has tool calls."""
    return any(message.get("tool_calls") for message in messages)


def shows_python(text: str, messages: list[Message]) -> bool:
    """Whether a rendering holds arguments in Python's notation: its template expects JSON text, not dictionaries."""
    arguments = [function.get("arguments") for function in _calls(messages)]
    return any(isinstance(found, dict) and bool(found) and str(found) in text for found in arguments)


def check_rendered(text: str, messages: list[Message], tools: list[Any] | None) -> None:
    """Check that a rendering holds the questions, the tool calls and the tools. Earlier answers are not checked:
    templates drop their thinking."""
    needed = [(f"the {m['role']} message", m.get("content") or "") for m in messages if m["role"] in ("system", "user")]
    needed += [("the tool call", str(function.get("name", ""))) for function in _calls(messages)]
    described = [tool.get("function", tool) for tool in tools or () if isinstance(tool, dict)]
    needed += [("the tool", str(tool.get("name", ""))) for tool in described if isinstance(tool, dict)]
    for what, words in needed:
        words = words.strip()
        if words not in text and json.dumps(words, ensure_ascii=False)[1:-1] not in text:
            raise UserError(
                f"the chat template leaves out {what} {words[:60]!r}; take a template that renders it "
                "(--chat_template), or remove it from the data"
            )
    if shows_python(text, messages):
        raise UserError(
            "the chat template writes the arguments of a tool call in Python's notation, not in JSON; take another "
            "template (--chat_template), or give the arguments as JSON text"
        )
