"""Tool calls as models write them: where they stand in a text, and what they say.

The marks inside a JSON string or a parameter are text, so a call ends where its JSON or its last
function ends, and not at the first mark that ends calls.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_MARK = re.compile(
    r"(?P<hermes><tool_call>)"  # Hermes, Qwen; JSON or the tags of Qwen3-Coder
    r"|(?P<mistral>\[TOOL_CALLS\])"
    r"|(?P<llama><\|python_tag\|>)"
    # Qwen3-Coder leaves out <tool_call> at times; in prose no parameter follows
    r"|(?P<bare>(?=<function=[^>\s]+>\s*(?:<parameter=|</function>|\Z)))"
)
# What stands between a call and the text after it; what is left of JSON is no text
_ENDS = {
    "hermes": re.compile(r"\s*(?:</tool_call>|\Z)"),
    "mistral": re.compile(r"(?!\s*[\]},])"),
    "llama": re.compile(r"\s*<\|e(?:om|ot)_id\|>|(?!\s*[\]},])"),
    "bare": re.compile(r""),
}
# Where a call ends that cannot be read; there, or at the next mark
_LATEST_ENDS = {
    "hermes": re.compile(r"</tool_call>"),
    "mistral": re.compile(r"\Z"),
    "llama": re.compile(r"<\|e(?:om|ot)_id\|>"),
    "bare": re.compile(r"\Z"),
}
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>")
_PARAMETER = re.compile(  # a value may hold "</parameter>" and "</function>"
    r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>"
    r"(?=\s*(?:<parameter=|</function>(?!\s*</parameter>)))",
    re.DOTALL,
)
_FUNCTION_END = re.compile(r"\s*</function>")
# Mistral since November 2024
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]([^\[]*))?\[ARGS\]")
_BETWEEN = re.compile(r"\s*;?\s*")  # two calls in JSON; Llama writes the semicolon
CODE_SPAN = re.compile(r"(?<!`)(?P<ticks>`+)(?!`)[^\n]*?(?<!`)(?P=ticks)(?!`)")
_DECODER = json.JSONDecoder()


class MalformedCallError(ValueError):
    """A tool call that cannot be read; the message is for the model."""


@dataclass(frozen=True)
class WrittenCall:
    """One call. `arguments`: as it stands in JSON, or the texts of the parameters by name."""

    name: str
    arguments: Any
    call_id: Any = None  # by which the model names it
    is_tagged: bool = False  # whether the values of `arguments` are texts of parameters


@dataclass(frozen=True)
class CallSection:
    """The characters of a text from `start` to `end`, with the marks, in which calls stand.
    `problem`: why they cannot be read; "" if they can."""

    start: int
    end: int
    calls: tuple[WrittenCall, ...]
    problem: str = ""


def call_sections(text: str, start: int = 0) -> list[CallSection]:
    """The calls in `text` from the character `start` on that have the marks of a format, in order.
    A mark in a code span (`<tool_call>` between backticks) is text."""
    sections = list[CallSection]()
    mark = _next_mark(text, start)
    while mark is not None:
        kind = str(mark.lastgroup)
        try:
            calls, end = _read(text, mark.end())
            closing = _ENDS[kind].match(text, end)
            if closing is None:
                raise MalformedCallError("the tool call is not valid: text follows inside of it")
            sections.append(CallSection(mark.start(), closing.end(), tuple(calls)))
        except MalformedCallError as problem:
            end = _end_of_malformed(text, mark)
            sections.append(CallSection(mark.start(), end, (), str(problem)))
        mark = _next_mark(text, sections[-1].end)
    return sections


def json_calls(text: str, start: int) -> tuple[list[WrittenCall], int]:
    """The calls in JSON that begin at the character `start`, with white space or a semicolon
    between them, and where they end. `MalformedCallError` if there are none."""
    calls = list[WrittenCall]()
    end = start
    position = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]  # it may be empty
    while not calls or text.startswith("{", position):
        value, end = _decode(text, position)
        values = value if isinstance(value, list) else [value]
        for each in values:
            if not isinstance(each, dict) or not isinstance(each.get("name"), str):
                raise MalformedCallError('a tool call is a JSON object with "name" and "arguments"')
            arguments = each.get("arguments", each.get("parameters"))
            calls.append(WrittenCall(each["name"], arguments, each.get("id")))
        if not values:
            break
        position = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
    if text[end:position].strip() == ";":
        end += text[end:position].index(";") + 1
    return calls, end


def _next_mark(text: str, start: int) -> re.Match[str] | None:
    """The first mark from `start` on that is not in a code span, which begins after `start` and
    ends on its line."""
    for mark in _MARK.finditer(text, start):
        line_start = max(start, text.rfind("\n", 0, mark.start()) + 1)
        if "`" not in text[line_start : mark.start()]:
            return mark
        is_code = False
        for span in CODE_SPAN.finditer(text, line_start):
            if span.start() > mark.start():
                break
            is_code = mark.start() < span.end()
        if not is_code:
            return mark
    return None


def _read(text: str, start: int) -> tuple[list[WrittenCall], int]:
    """The calls that begin at the character `start`, in any format, and where they end."""
    if _FUNCTION.match(text, start) is not None:
        return _tagged_calls(text, start)
    named = _NAMED.match(text, start)
    if named is None:
        return json_calls(text, start)
    arguments_start = _BETWEEN.match(text, named.end()).end()  # type: ignore[union-attr]
    arguments, end = _decode(text, arguments_start)
    return [WrittenCall(named[1], arguments, named[2])], end


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON that begins at the character `start`, and where it ends. The message of an error
    counts characters from there."""
    try:
        value, length = _DECODER.raw_decode(text[start:])
    except (ValueError, RecursionError) as problem:
        raise MalformedCallError(f"the tool call is not valid JSON ({problem})") from None
    return value, start + length


def _tagged_calls(text: str, start: int) -> tuple[list[WrittenCall], int]:
    """The calls in Qwen3-Coder's tags that begin at the character `start`, and where they end."""
    calls = list[WrittenCall]()
    end = start
    function = _FUNCTION.match(text, start)
    while function is not None:
        values = dict[str, Any]()
        end = function.end()
        parameter = _PARAMETER.match(text, end)
        while parameter is not None:
            values[parameter[1]] = parameter[2]
            end = parameter.end()
            parameter = _PARAMETER.match(text, end)
        closing = _FUNCTION_END.match(text, end)
        if closing is None:
            raise MalformedCallError(
                f"the tool call is not valid: after <function={function[1]}> stand only"
                " <parameter=NAME>VALUE</parameter> and then </function>"
            )
        calls.append(WrittenCall(function[1], values, is_tagged=True))
        end = closing.end()
        function = _FUNCTION.match(text, end)
    return calls, end


def _end_of_malformed(text: str, mark: re.Match[str]) -> int:
    """Where the call ends that begins with `mark` and cannot be read."""
    kind = str(mark.lastgroup)
    ends = [len(text)]
    closing = _LATEST_ENDS[kind].search(text, mark.end())
    if closing is not None:
        ends.append(closing.end())
    next_mark = _MARK.search(text, mark.start() + 1)
    if next_mark is not None and next_mark.lastgroup == kind:
        ends.append(next_mark.start())
    return min(ends)
