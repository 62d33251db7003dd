"""What a model wrote in a turn, as all read it: rewards, chats, evaluation, and the programs to
which it replies. Thoughts are cut first, so a call of a tool inside of them is none.

Calls are found by the response template of the tokenizer, or else in the common formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.encode import decoded
from dschat_ppo.data.examples import Message
from dschat_ppo.data.messages import THOUGHTS, functions_of
from dschat_ppo.data.replies import Reply, read_reply
from dschat_ppo.data.reply_tokens import without_special
from dschat_ppo.data.templates import without_final
from dschat_ppo.data.written_calls import (
    CallSection,
    MalformedCallError,
    WrittenCall,
    call_sections,
    json_calls,
)

_BARE_NAME = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"]*)"')

DEEPEST = 100  # levels of a message; Python's own limit is 1000
_LEVELS_ABOVE_CALL = 2  # the message and its list of calls


@dataclass(frozen=True)
class ModelReply:
    """What a model wrote in a turn, without the tokens that end it."""

    text: str  # all of it
    thoughts: str = ""
    content: str = ""  # without thoughts and calls; calls that cannot be read stay in it
    calls: list[dict[str, Any]] = field(default_factory=list)  # as in transformers' chats
    malformed: str = ""  # why the first call that cannot be read cannot; for the model
    said: str = ""  # the text before its first call, with thoughts
    called: str = ""  # the rest of the text
    stop_text: str = ""  # that ended the reply, and is in none of these

    @property
    def message(self) -> Message:
        """The message of a chat: its `content`, `tool_calls` if it has any, `reasoning_content` if
        it has thoughts, and `text` where that says more than the content."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        if self.text != self.content:
            message["text"] = self.text
        return message


def reply_of_tokens(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    tools: Sequence[Any] | None,
    is_opened: bool = False,
    stop: Sequence[str] = (),
) -> ModelReply:
    """What the tokens of a turn are; no special token is in `text` and `content`. It ends before
    the first text of `stop`. The other arguments are those of `reply_of_text`."""
    before, stop_text = _divided_at_stop(decoded(tokenizer, ids), stop)
    written, _ = without_final(tokenizer, before)
    reply = reply_of_text(tokenizer, written, tools, is_opened)
    before, _ = _divided_at_stop(str(tokenizer.decode(list(ids), skip_special_tokens=True)), stop)
    text, _ = without_final(tokenizer, before)
    content = text
    if reply.content != written:
        content = without_special(tokenizer, reply.content)
    return replace(reply, text=text, content=content, stop_text=stop_text)


def _divided_at_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """The text up to the first of the texts `stop`, and that one; "" if none is in it."""
    contained = [each for each in stop if each in text]
    if not contained:
        return text, ""
    first = min(contained, key=text.index)
    return text[: text.index(first)], first


def reply_of_text(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    tools: Sequence[Any] | None,
    is_opened: bool = False,
) -> ModelReply:
    """What the text of a turn is, which is without the tokens that end it.

    Args:
        tokenizer: its `response_template`, if it has one, reads calls and content.
        text: with special tokens, which are marks of some formats.
        tools: JSON schemas of the tools that the model may call; without any, no call counts. None
            if they are not known: then what is written as a call in a common format is one.
        is_opened: whether the prompt ends inside a thought.
    """
    reply = read_reply(text, is_opened)
    known_tools = list(tools or ())
    sections = list[CallSection]()
    if tools is None or tools:
        sections = _sections(reply, known_tools)
    said = text
    called = ""
    if sections:
        start = sections[0].start
        said = text[:start].rstrip()
        called = text[start:]
    read = ModelReply(text, reply.thoughts, said=said, called=called)
    if tools and getattr(tokenizer, "response_template", None) is not None:
        return _read_by_template(tokenizer, reply, known_tools, read)
    calls = list[dict[str, Any]]()
    spans = list[tuple[int, int]]()  # of the calls, in characters of the text
    malformed = ""
    for section in sections:
        try:
            if section.problem:
                raise MalformedCallError(section.problem)
            section_calls = [_call_message(call, known_tools) for call in section.calls]
        except MalformedCallError as problem:
            malformed = malformed or str(problem)
            continue
        if section_calls:
            calls += section_calls
            spans.append((section.start, section.end))
    return replace(read, content=reply.rest_without(spans), calls=calls, malformed=malformed)


def _read_by_template(
    tokenizer: PreTrainedTokenizerBase, reply: Reply, tools: list[Any], read: ModelReply
) -> ModelReply:
    """`read` with what `tokenizer.parse_response` finds behind the thoughts."""
    rest = "".join(reply.text[start:stop] for start, stop in reply.outside)
    try:
        message = tokenizer.parse_response(rest, prefix="", tools=tools)
        calls = [_shallow(call) for call in message.get("tool_calls") or ()]
    except MalformedCallError as problem:
        return replace(read, content=reply.rest, malformed=str(problem))
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        malformed = f"the tool call cannot be read: {problem}"
        return replace(read, content=reply.rest, malformed=malformed)
    thoughts = [reply.thoughts]
    for name in THOUGHTS:
        thoughts.append(str(message.get(name) or ""))
    return replace(
        read,
        thoughts="\n\n".join(filter(None, thoughts)),
        content=str(message.get("content") or ""),
        calls=calls,
    )


def _sections(reply: Reply, tools: list[Any]) -> list[CallSection]:
    """The calls outside of thoughts in the common formats, in order: those in JSON without marks,
    then those that have the marks of a format."""
    sections = _bare_section(reply, tools)
    first = max([section.end for section in sections], default=0)
    for start, stop in reply.outside:
        sections += call_sections(reply.text[:stop], max(start, first))
    return sections


def _bare_section(reply: Reply, tools: list[Any]) -> list[CallSection]:
    """The calls without marks that an answer is, as Llama 3.1 and later write them; [] for any
    other text, also if that is JSON. Text may follow calls of `tools`. A call of one of `tools`
    that is no valid JSON is a section with the problem, up to the end of the text."""
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
    except MalformedCallError as problem:
        named = _BARE_NAME.match(text, start)
        if named is not None and named[1] in names:
            return [CallSection(start, stop, (), str(problem))]
        return []
    is_all = not following
    for call in calls:
        is_known = call.name in names
        has_arguments = call.arguments is not None
        if not is_known and not (is_all and has_arguments):
            return []
    return [CallSection(start, end, tuple(calls))]


def _call_message(call: WrittenCall, tools: list[Any]) -> dict[str, Any]:
    """A call as in transformers' chats; `MalformedCallError` if its arguments are no object, or are
    nested too deep."""
    if call.is_tagged:
        arguments = _typed_arguments(call, tools)
    else:
        arguments = _arguments(call.arguments)
    message: dict[str, Any] = {"type": "function"}
    if call.call_id:
        message["id"] = str(call.call_id)
    message["function"] = {"name": call.name, "arguments": arguments}
    _shallow(message)
    return message


def _shallow(value: Any, levels: int = DEEPEST - _LEVELS_ABOVE_CALL) -> Any:
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


def argument_types(schema: dict[str, Any]) -> dict[str, Any]:
    """The `type` of each argument of a tool; None where its schema has none."""
    parameters = (schema.get("parameters") or {}).get("properties") or {}
    return {name: parameter.get("type") for name, parameter in parameters.items()}


def _typed_arguments(call: WrittenCall, tools: list[Any]) -> dict[str, Any]:
    """The values of Qwen3-Coder's tags. A value is JSON where it is JSON, unless the schema of the
    tool says that it is a string: the template writes strings without quotes."""
    types = dict[str, Any]()
    for schema in functions_of([{"tool_calls": tools}]):
        if schema.get("name") == call.name:
            types = argument_types(schema)
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
