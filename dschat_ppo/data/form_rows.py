"""From what a form finds in a row to examples: rendering, system message, tools, margin, truth, and the last checks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dschat_ppo.data.examples import Example, Row, Use, check_answers, has_value, margin_of, text_at, truth_of, value_at
from dschat_ppo.data.messages import (
    CONTEXT,
    Message,
    Messages,
    from_json,
    parse_json,
    read_messages,
    read_tools,
    tools_beside,
    without_context,
    without_pictures,
)
from dschat_ppo.errors import UserError

Rendering = Literal["chat", "text"]
_SYSTEM = ("system", "developer")  # roles of a system message


@dataclass(frozen=True)
class Draft:
    """What a form finds in a row: a prompt and its answers, before the rendering. `suffix` and `labels` are those of
    `Example`."""

    prompt: str | Messages
    answers: list[str | Message] = field(default_factory=list)
    suffix: str = ""
    labels: tuple[float, ...] = ()


@dataclass(frozen=True)
class Reading:
    """How the rows of one data set are read. Its `repr` identifies it.

    Attributes:
        columns: (role, column) pairs, such as ("prompt", "question").
        wrap: a prompt that is text becomes the user's message.
        input_template: text around a prompt that is text; `{}` stands for the prompt.
        system, tools, truth: columns, or None.
        truth_pattern: finds the correct answer in that column; None takes the whole value.
        pictures: ignored columns of pictures, whose placeholders in the texts of a row are removed, as are the picture
            parts of messages.
        unused: columns that the reading does not use, although their names are those of content.
    """

    form: str
    columns: tuple[tuple[str, str], ...]
    rendering: Rendering = "text"
    wrap: bool = False
    input_template: str | None = None
    system: str | None = None
    tools: str | None = None
    truth: str | None = None
    truth_pattern: str | None = None
    system_message: str | None = None
    role_names: tuple[tuple[str, str], ...] = ()
    pictures: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def column(self, role: str) -> str | None:
        """The column of a role, or None."""
        return dict(self.columns).get(role)

    def value(self, row: Row, role: str) -> Any:
        """The value in the column of a role; messages that are stored as JSON text are parsed."""
        return from_json(value_at(row, dict(self.columns)[role]))

    def messages(self, value: Any, role: str) -> Messages:
        """`read_messages` of a value in the column of a role."""
        value = from_json(value)
        if self.pictures and isinstance(value, list):
            value = [without_pictures(message) for message in value]
        return read_messages(value, dict(self.columns)[role], dict(self.role_names))

    def listed(self, row: Row, role: str) -> Any:
        """The value in the column of a role; a list that is stored as JSON text, as in CSV files, is parsed."""
        column = dict(self.columns)[role]
        value = value_at(row, column)
        is_json = isinstance(value, str) and value.lstrip()[:1] == "["
        return parse_json(value, f"'{column}'") if is_json else value

    def text(self, row: Row, role: str) -> str:
        """The text in the column of a role."""
        return text_at(row, dict(self.columns)[role])


LABELLED = ("kto", "ranked")  # forms that read "unpaired" themselves; pairs of the others are split
DraftReader = Callable[[Row, Reading, Use], list[Draft]]


def read_row(read: DraftReader, reading: Reading, row: Row, use: Use, where: str) -> list[Example]:
    """The examples of one row. An error names the row by `where` and says why it is bad."""
    try:
        splits = use == "unpaired" and reading.form not in LABELLED
        drafts = read(row, reading, "preference" if splits else use)
        if any(has_value(row, column) and row[column] not in ("", [], {}) for column in reading.pictures):
            drafts = [replace(one, prompt=_without(one.prompt), answers=_without(one.answers)) for one in drafts]
        drafts = [one for draft in drafts for one in split_pair(draft)] if splits else drafts
        margin = margin_of(row) if reading.column("rejected") else 0.0
        truth = truth_of(row, reading.truth, reading.truth_pattern) if reading.truth else None
        tools = _tools_of(row, reading)
        if tools and reading.rendering == "text":
            raise UserError(
                f"'{reading.tools or 'tools'}' describes tools, which need the chat template; {_choose_chat(reading)}"
            )
        examples = []
        for draft in drafts:
            if use != "steps":  # whose steps may be equal
                check_answers(draft.answers)
            prompt = _with_system(_rendered(draft.prompt, reading), row, reading)
            context: tuple[int, ...] = ()
            if isinstance(prompt, list):
                context = tuple(number for number, message in enumerate(prompt) if CONTEXT in message)
                prompt = without_context(prompt)
            examples.append(Example(prompt, draft.answers, margin, truth, tools, draft.suffix, draft.labels, context))
    except UserError as problem:
        raise UserError(f"{where}: {problem}") from None
    return examples


def _tools_of(row: Row, reading: Reading) -> list[Any] | None:
    """The tools of a row: of their column, or those beside the messages in one object. Both must be equal."""
    tools = read_tools(value_at(row, reading.tools), reading.tools) if reading.tools else None
    for _, column in reading.columns:
        inside = read_tools(tools_beside(value_at(row, column)), column) if has_value(row, column) else None
        if inside and tools and inside != tools:
            raise UserError(f"'{column}' describes other tools than the rest of the row")
        tools = tools or inside
    return tools


def _without(part: Any) -> Any:
    """A text, a message, or a list of them without the placeholders of pictures."""
    if isinstance(part, list):
        return [_without(one) for one in part]
    if isinstance(part, dict):
        return {**part, "content": _without(part["content"])}
    return re.sub(r"<(image|video|audio)>\n?", "", part)


def split_pair(draft: Draft) -> list[Draft]:
    """A pair as a desirable and an undesirable answer."""
    check_answers(draft.answers)
    sides = zip(draft.answers, ("chosen", "rejected"), (1.0, 0.0), strict=True)
    return [Draft(draft.prompt, [answer], f"{draft.suffix}, {name} answer", (label,)) for answer, name, label in sides]


def _choose_chat(reading: Reading) -> str:
    """The way to the chat template; plain text has none."""
    return "plain text has none" if reading.form == "text" else "--apply_chat_template True renders the prompts with it"


def _rendered(prompt: str | Messages, reading: Reading) -> str | Messages:
    if isinstance(prompt, list):
        if reading.rendering == "text":
            raise UserError("the prompt is a list of chat messages, but those of the first rows are text")
        return prompt
    if not prompt and reading.form != "text":
        raise UserError("the prompt is empty")
    if reading.input_template is not None:
        prompt = reading.input_template.replace("{}", prompt)
    if reading.rendering == "text":
        return prompt
    if not reading.wrap:
        raise UserError("the prompt is text, but those of the first rows are chat messages")
    return [{"role": "user", "content": prompt}]


def _with_system(prompt: str | Messages, row: Row, reading: Reading) -> str | Messages:
    system = value_at(row, reading.system) if reading.system else None
    if system is None or system == "":
        system = reading.system_message
        if not system or (isinstance(prompt, list) and prompt[0]["role"] in _SYSTEM):
            return prompt
    if not isinstance(system, str):
        raise UserError(f"'{reading.system}' is {type(system).__name__}; expected text")
    if isinstance(prompt, str):
        raise UserError(
            f"'{reading.system}' holds a system message, which needs the chat template; {_choose_chat(reading)}, "
            "--system_column '' ignores the column"
        )
    if prompt[0]["role"] not in _SYSTEM:
        return [{"role": "system", "content": system}, *prompt]
    if prompt[0]["content"] != system:
        raise UserError(f"'{reading.system}' and the first message are two different system messages")
    return prompt
