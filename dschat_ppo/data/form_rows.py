"""From what a form finds in a row to examples: rendering, system message, tools, margin, truth, and the last checks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dschat_ppo.data.examples import Example, Row, Use, check_answers, has_value, margin_of, text_at, truth_of, value_at
from dschat_ppo.data.messages import (
    CONTEXT,
    THOUGHTS,
    WEIGHTS,
    Messages,
    from_json,
    leaves_out,
    looks_like_messages,
    parse_json,
    read_messages,
    read_tools,
    tools_beside,
    without_context,
    without_pictures,
)
from dschat_ppo.errors import UserError

Rendering = Literal["chat", "text"]
LABELLED = ("kto", "ranked")  # forms that read "unpaired" themselves; pairs of the others are split
PICTURES = ("image", "images", "video", "videos", "audio", "audios")
SCORES = ("scores", "ratings", "rewards")  # columns with a number for each answer: more is better
RANKS = ("ranks", "rankings", "ranking", "rank")  # less is better
BETTER = ("better_response_id", "better_answer_id", "better", "preferred", "preference", "winner")
# Columns whose values stand in texts by chance: a weight of 0 in "10".
_NO_COPIES = (*PICTURES, *WEIGHTS, "functions", *SCORES, *RANKS, *BETTER)
LABELS = {  # of single answers, in lower case
    **dict.fromkeys(("true", "1", "1.0", "good", "yes", "chosen", "desirable", "positive", "accepted"), True),
    **dict.fromkeys(("false", "0", "0.0", "-1", "-1.0", "bad", "no", "rejected", "undesirable", "negative"), False),
}
_SYSTEM = ("system", "developer")  # roles of a system message


@dataclass(frozen=True)
class Reading:
    """How the rows of one data set are read. Its `repr` identifies it.

    Attributes:
        columns: role -> column, such as "prompt": "question".
        wrap: a prompt that is text becomes the user's message.
        input_template: text around a prompt that is text; `{}` stands for the prompt.
        system, tools, truth: columns, or None.
        truth_pattern: finds the correct answer in that column; None takes the whole value.
        role_names: further names of roles in messages -> roles.
        pictures: ignored columns of pictures, whose placeholders in the texts of a row are removed, as are the picture
            parts of messages.
        watched: names of columns that hold content and that the reading does not use, see `left_out`.
    """

    form: str
    columns: dict[str, str]
    rendering: Rendering = "text"
    wrap: bool = False
    input_template: str | None = None
    system: str | None = None
    tools: str | None = None
    truth: str | None = None
    truth_pattern: str | None = None
    system_message: str | None = None
    role_names: dict[str, str] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cells:
    """The values of one row by the roles that its form gives to columns. Errors name the column and not the row."""

    row: Row
    reading: Reading

    def has(self, role: str) -> bool:
        """Whether the form has a column of this role."""
        return role in self.reading.columns

    def column(self, role: str) -> str:
        return self.reading.columns[role]

    def raw(self, role: str) -> Any:
        """The value as it is."""
        return value_at(self.row, self.column(role))

    def value(self, role: str) -> Any:
        """The value; messages that are stored as JSON text are parsed."""
        return from_json(self.raw(role))

    def text(self, role: str) -> str:
        return text_at(self.row, self.column(role))

    def listed(self, role: str) -> Any:
        """The value; a list that is stored as JSON text, as in CSV files, is parsed."""
        value = self.raw(role)
        is_json = isinstance(value, str) and value.lstrip()[:1] == "["
        return parse_json(value, f"'{self.column(role)}'") if is_json else value

    def messages(self, role: str, value: Any = None) -> Messages:
        """The normalised messages of a role, or of another value that stands in its column."""
        value = self.value(role) if value is None else from_json(value)
        if self.reading.pictures and isinstance(value, list):
            value = [without_pictures(message) for message in value]
        return read_messages(value, self.column(role), self.reading.role_names)

    def has_messages(self, role: str) -> bool:
        """Whether a role has a column, and this holds messages here."""
        return self.has(role) and has_value(self.row, self.column(role)) and looks_like_messages(self.value(role))


Reader = Callable[[Cells, Use], list[Example]]


def read_row(read: Reader, reading: Reading, uses: tuple[Use, ...], row: Row, use: Use) -> list[Example]:
    """The examples of one row. An error says why the row is bad and does not name it."""
    splits = use == "unpaired" and reading.form not in LABELLED
    found = read(Cells(row, reading), "preference" if splits else use)
    if any(has_value(row, column) and row[column] not in ("", [], {}) for column in reading.pictures):
        found = [replace(one, prompt=_without_marks(one.prompt), answers=_without_marks(one.answers)) for one in found]
    for one in found if use != "steps" else ():  # whose steps may be equal
        check_answers(one.answers)
    if splits:
        found = [
            replace(one, answers=[answer], suffix=f"{one.suffix}, {name} answer", labels=(label,))
            for one in found
            for answer, name, label in zip(one.answers, ("chosen", "rejected"), (1.0, 0.0), strict=True)
        ]
    margin = margin_of(row) if "rejected" in reading.columns else 0.0
    truth = truth_of(row, reading.truth, reading.truth_pattern) if reading.truth else None
    tools = _tools_of(row, reading)
    if tools and reading.rendering == "text":
        name = reading.tools or "tools"
        raise UserError(f"'{name}' describes tools, which need the chat template; {_choose_chat(reading)}")
    examples = []
    for one in found:
        prompt = _with_system(_rendered(one.prompt, reading), row, reading)
        context: tuple[int, ...] = ()
        if isinstance(prompt, list):
            context = tuple(number for number, message in enumerate(prompt) if CONTEXT in message)
            prompt = without_context(prompt)
        examples.append(Example(prompt, one.answers, margin, truth, tools, one.suffix, one.labels, context))
    if missed := left_out(read, reading, uses, row):
        raise UserError(missed[1])
    return examples


def _tools_of(row: Row, reading: Reading) -> list[Any] | None:
    """The tools of a row: of their column, or those beside the messages in one object. Both must be equal."""
    tools = read_tools(value_at(row, reading.tools), reading.tools) if reading.tools else None
    for column in reading.columns.values():
        inside = read_tools(tools_beside(value_at(row, column)), column) if has_value(row, column) else None
        if inside and tools and inside != tools:
            raise UserError(f"'{column}' describes other tools than the rest of the row")
        tools = tools or inside
    return tools


def _without_marks(part: Any) -> Any:
    """A text, a message, or a list of them without the placeholders of pictures."""
    if isinstance(part, list):
        return [_without_marks(one) for one in part]
    if isinstance(part, dict):
        return {**part, "content": _without_marks(part["content"])}
    return re.sub(r"<(image|video|audio)>\n?", "", part)


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


# What a form leaves out


def left_out(read: Reader, reading: Reading, uses: tuple[Use, ...], row: Row) -> tuple[str, str] | None:
    """(a watched column of a row that holds content, what is wrong), or None: no other form would tell. What a column
    holds is no loss if it stands in what is read (a conversation beside its prompt and answer), or if it holds all that
    is read (the same as one text). First rows and later ones, with columns that the first lack, are judged alike."""
    held = [name for name in row if name in reading.watched and has_value(row, name) and _is_content(name, row[name])]
    read_by_use = _all_read(read, reading, uses, row) if held else []
    by_use = [list(lines_of([[one.prompt, *one.answers] for one in found])) for found in read_by_use]
    everything = "\n".join(line for lines in by_use for line in lines)
    for column in held if by_use else ():
        value = from_json(row[column])
        lines = list(lines_of(value))
        is_read = bool(lines) and all(line in everything for line in lines)
        holds_all = any(all(line in "\n".join(lines) for line in read) for read in by_use)
        if column not in _NO_COPIES and (is_read or holds_all):
            continue
        way = f"--ignore_columns {column} leaves it out"
        if column in PICTURES:
            way = f"models are trained on text; --ignore_columns {column} leaves out pictures and placeholders"
        return column, (
            f"'{column}' holds content, {str(value)[:60]!r}, that the form {reading.form} does not use; it reads "
            f"{shown(read_by_use[0][0])}. {way}; --prompt_column, --response_column, ... and --data_format choose "
            "another reading"
        )
    return None


def _all_read(read: Reader, reading: Reading, uses: tuple[Use, ...], row: Row) -> list[list[Example]]:
    """What a form reads in a row for each use that trains on answers, or else for prompts; without uses that get
    nothing."""
    found: dict[Use, list[Example]] = {}
    for use in uses:
        if use != "unpaired" or reading.form in LABELLED:
            with suppress(UserError):
                found[use] = read(Cells(row, reading), use)
    answered = [examples for use, examples in found.items() if examples and use != "prompt"]
    return answered or [examples for examples in found.values() if examples]


def _is_content(column: str, value: Any) -> bool:
    """Whether a column that a reading does not use holds content: weights of 1 change nothing, nor do switches of
    thoughts (`reasoning: "on"`), measured losses, names of splits (`training: "train"`), and labels of classes."""
    if value in ("", [], {}):
        return False
    if column in ("label", "labels"):
        return is_label(value)
    if column in ("train", "training", "loss") and not isinstance(value, list):
        return str(value).strip().lower() in ("0", "0.0", "false")
    if column in THOUGHTS and not isinstance(value, list | dict):
        return str(value).strip().lower() not in ("", "on", "off", "yes", "no", "true", "false")
    return leaves_out(value) if column in WEIGHTS else True


def is_label(value: Any) -> bool:
    """Whether a value may call an answer, or each of its steps, good or bad."""
    return isinstance(value, list) or str(value).strip().lower() in LABELS


def lines_of(value: Any) -> Iterator[str]:
    """The lines of all texts inside a value, without the white space around them; of a message its content alone."""
    if isinstance(value, dict) and looks_like_messages(value):
        value = value.get("content", value.get("value"))
    if isinstance(value, str):
        yield from (line.strip() for line in value.splitlines() if line.strip())
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from lines_of(inner)
    elif value is not None:
        yield json.dumps(value, default=str)


def shown(example: Example, as_chat: bool = False) -> str:
    """An example for a message: the end of its prompt, and the start of its answers."""

    def end(text: str) -> str:
        return repr(text if len(text) <= 40 else f"...{text[-40:]}")

    if isinstance(example.prompt, list):
        text = "; ".join(f"{turn['role']}: {end(turn['content'])}" for turn in example.prompt[-2:])
    else:
        text = (
            f"{'user:' if as_chat else 'prompt'} {end(example.prompt)}" if example.prompt else "text without a prompt"
        )
    answers = [answer if isinstance(answer, str) else answer["content"] for answer in example.answers]
    return text + "".join(f", answer {answer[:40]!r}" for answer in answers)
