"""A form: how the rows of one data set become examples, in all three steps. `form_choice.py` finds it.

An example comes from what the reader of the form finds in a row, with the system message, tools, margin, correct answer
and the last checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

from dschat_ppo.common.own_functions import cause_of, file_named, own_function
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.examples import Example, Row, Use, check_answers, has_value, margin_of, text_at, truth_of, value_at
from dschat_ppo.data.messages import (
    CONTEXT,
    THOUGHTS,
    WEIGHTS,
    Messages,
    checked,
    from_json,
    kind_of,
    leaves_out,
    looks_like_messages,
    parse_json,
    read_messages,
    read_tools,
    tools_beside,
    without_context,
    without_pictures,
)
from dschat_ppo.data.rows import Rows
from dschat_ppo.errors import UserError

Rendering = Literal["chat", "text"]
SCORES = ("scores", "ratings", "rewards")  # columns with a number for each answer: more is better
RANKS = ("ranks", "rankings", "ranking", "rank")  # less is better
BETTER = ("better_response_id", "better_answer_id", "better", "preferred", "preference", "winner")
PICTURES = ("image", "images", "video", "videos", "audio", "audios")
# Columns whose values stand in texts by chance: a weight of 0 in "10".
_NO_COPIES = (*PICTURES, *WEIGHTS, "functions", *SCORES, *RANKS, *BETTER)
LABELS = {  # of single answers, in lower case
    **dict.fromkeys(("true", "1", "1.0", "good", "yes", "chosen", "desirable", "positive", "accepted"), True),
    **dict.fromkeys(("false", "0", "0.0", "-1", "-1.0", "bad", "no", "rejected", "undesirable", "negative"), False),
}
GROUP_ANSWERS, GROUP_LABELS = "_answers", "_labels"  # columns of KTO's rows that are joined by prompt
_LABELLED = ("kto", "ranked")  # forms that read "unpaired" themselves; pairs of the others are split
_NEEDED = {  # by a step, and the flags that name the columns if these have other names
    "sft": "a prompt and an answer (prompt/response, messages, instruction/output, question/answer, ...); name its "
    "columns with --prompt_column and --response_column, or --messages_column",
    "preference": "a prompt and two answers (prompt/chosen/rejected, chosen/rejected, ranked answers, ...); name its "
    "columns with --prompt_column, --chosen_column and --rejected_column",
    "unpaired": "answers with labels (prompt/completion/label), or pairs of answers (prompt/chosen/rejected, ...); "
    "name its columns with --prompt_column, --response_column, --chosen_column and --rejected_column",
    "steps": "the steps of answers with a label for each (prompt/completions/labels, PRM800K, Math-Shepherd)",
    "prompt": "a prompt (prompt, messages, ...); name its columns with --prompt_column or --messages_column",
}


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
        pictures: ignored columns; if a row has some, their placeholders in its texts and messages are removed.
        watched: columns that hold content and that the reading does not use -> the form that reads them, or "".
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
    watched: dict[str, str] = field(default_factory=dict)


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

    def value(self, role: str) -> Any:
        """The value; messages that are stored as JSON text are parsed."""
        return from_json(value_at(self.row, self.column(role)))

    def text(self, role: str) -> str:
        return text_at(self.row, self.column(role))

    def listed(self, role: str) -> Any:
        """The value; a list that is stored as JSON text, as in CSV files, is parsed."""
        value = value_at(self.row, self.column(role))
        is_json = isinstance(value, str) and value.lstrip()[:1] == "["
        return parse_json(value, f"'{self.column(role)}'") if is_json else value

    def messages(self, role: str, value: Any = None) -> Messages:
        """The normalised messages of a role, or of another value that stands in its column."""
        value = self.value(role) if value is None else from_json(value)
        return read_messages(value, self.column(role), self.reading.role_names)

    def has_messages(self, role: str) -> bool:
        """Whether a role has a column, and this holds messages here."""
        return self.has(role) and has_value(self.row, self.column(role)) and looks_like_messages(self.value(role))

    def wrong(self, role: str, value: Any, expected: str) -> UserError:
        """The error of a value that the column of a role must not hold."""
        return UserError(f"'{self.column(role)}' is {kind_of(value)}; expected {expected}")


Reader = Callable[[Cells, Use], list[Example]]


@dataclass(frozen=True)
class Kind:
    """One form. Names are separated by spaces.

    Attributes:
        roles: role -> names of columns that have it; the first one that exists counts.
        needs: uses -> the roles that must be there, choices separated by "|". "preference" serves "unpaired" too.
        by_flag: roles that a column flag may name while the form is detected; `--data_format` allows all of them.
        rendering: "as given" (text prompts stay text, messages are chat), "chat", "text", or "content" (chat if there
            is a chat template).
        not_with: columns that rule the form out.
        inside: whether the prompt is part of a longer text, so that `--input_template` does not apply.
        alone: whether it also holds prompts alone.
        is_known_set: whether it is a data set of DeepSpeed-Chat.
    """

    name: str
    roles: dict[str, str]
    needs: dict[str, str]
    read: Reader
    by_flag: str = ""
    rendering: str = "as given"
    not_with: str = ""
    inside: bool = False
    alone: bool = False
    is_known_set: bool = False

    def choices(self) -> list[tuple[Use, set[str]]]:
        """Each use with a set of roles by which it is served."""
        return [
            (cast(Use, use), set(roles.split()))
            for uses, choices in self.needs.items() for use in uses.split() for roles in choices.split("|")
        ]  # fmt: skip

    def uses(self, columns: dict[str, str]) -> tuple[Use, ...]:
        """The uses that these roles serve."""
        found = dict.fromkeys(use for use, roles in self.choices() if roles <= set(columns))
        return tuple(found | dict.fromkeys(("unpaired",) if "preference" in found else ()))


@dataclass(frozen=True)
class Form:
    """How the rows of one data set are read. It can be pickled.

    Attributes:
        uses: what the form serves: some of the values of `Use`.
        about: the data set, its columns and the form, for messages.
        description: what was understood, one line for the log.
        warning: what may be wrong with this reading, one line for the log; "" if nothing is.
        uses_flags: whether the column flags name columns of this data set.
        ignored: those of its columns that `--ignore_columns` names.
        function: None, or the `FILE.py:FUNCTION` that makes rows of this form of each row of the data set,
            and a hash of its file.
    """

    kind: Kind
    reading: Reading
    uses: tuple[Use, ...]
    about: str = ""
    description: str = ""
    warning: str = ""
    uses_flags: bool = False
    ignored: tuple[str, ...] = ()
    function: str | None = None
    file_sha: str = ""

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def rendering(self) -> Rendering:
        """ "chat" if the chat template renders prompts, "text" if they are used as they are."""
        return self.reading.rendering

    @property
    def identity(self) -> str:
        """Text that differs between forms that read rows differently, for keys of caches."""
        return " ".join(filter(None, [self.function, self.file_sha, repr(self.reading)]))

    @property
    def regroup(self) -> Callable[[Rows], Iterator[tuple[Row, int]]] | None:
        """None, or what joins the rows of a prompt, for KTO. It runs on all rows before they are split or read."""
        is_grouped = self.name == "kto" and "messages" not in self.reading.columns
        return partial(_by_prompt, self.reading) if is_grouped else None

    def require(self, use: Use) -> None:
        """Refuse a use that the form does not serve. The message lists the columns and what the step needs."""
        if use not in self.uses:
            raise UserError(f"{self.about}; this step needs {_NEEDED[use]}")

    def read(self, row: Row, use: Use, where: str) -> list[Example]:
        """The examples of one row, none or more. `UserError` for a bad row, which it calls `where`, and for a use that
        the form does not serve."""
        self.require(use)
        try:
            rows = [row] if self.function is None else rows_made(self.function, row)
            return [example for each in rows for example in self._read(each, use)]
        except UserError as problem:
            raise UserError(f"{where}: {problem}") from None

    def _read(self, row: Row, use: Use) -> list[Example]:
        reading, examples = self.reading, list[Example]()
        if any(row.get(column) not in (None, "", [], {}) for column in reading.pictures):
            row = without_pictures(row)
        splits = use == "unpaired" and self.name not in _LABELLED
        found = self.kind.read(Cells(row, reading), "preference" if splits else use)
        margin = margin_of(row) if "rejected" in reading.columns else 0.0
        truth = truth_of(row, reading.truth, reading.truth_pattern) if reading.truth else None
        tools = self._tools_of(row)
        for one in found:
            if use != "steps":  # which may be equal
                check_answers(one.answers)
            prompt, context = self._rendered(one.prompt, row), tuple[int, ...]()
            if isinstance(prompt, list):
                context = tuple(number for number, message in enumerate(prompt) if CONTEXT in message)
                prompt = without_context(prompt)
            one = replace(one, prompt=prompt, margin=margin, truth=truth, tools=tools, context=context)
            examples += [one] if not splits else [
                replace(one, answers=[answer], suffix=f"{one.suffix}, {name} answer", labels=(label,))
                for answer, name, label in zip(one.answers, ("chosen", "rejected"), (1.0, 0.0), strict=True)
            ]  # fmt: skip
        self.check_left_out(row)
        return examples

    def _rendered(self, prompt: str | Messages, row: Row) -> str | Messages:
        """The prompt as text or messages, as the rendering says, with the system message before it."""
        reading, system = self.reading, self.system_of(row)
        if isinstance(prompt, list) and reading.rendering == "text":
            raise UserError("the prompt is a list of chat messages, but those of the first rows are text")
        if isinstance(prompt, str):
            if not prompt and self.name != "text":
                raise UserError("the prompt is empty")
            if reading.input_template is not None:
                prompt = reading.input_template.replace("{}", prompt)
            if reading.rendering == "text":
                return prompt
            if not reading.wrap:
                raise UserError("the prompt is text, but those of the first rows are chat messages")
            prompt = [{"role": "user", "content": prompt}]
        if prompt[0]["role"] not in ("system", "developer"):
            system = system or reading.system_message
            return [{"role": "system", "content": system}, *prompt] if system else prompt
        if system and prompt[0]["content"] != system:
            raise UserError(f"'{reading.system}' and the first message are two different system messages")
        return prompt

    def system_of(self, row: Row) -> str | None:
        """The system message in the column of a row. `UserError` if there is one, but the prompts are text."""
        column = self.reading.system
        value = value_at(row, column) if column else None
        if value in (None, ""):
            return None
        if self.rendering == "text":
            raise UserError(
                f"'{column}' holds a system message, but the prompts are text, which has no place for it; "
                f"{self._chat_way()}--system_column '' ignores the column"
            )
        return str(checked(value, str, f"'{column}'", "text"))

    def _tools_of(self, row: Row) -> list[Any] | None:
        """The tools of a row: of their column, or those beside the messages in one object. Both must be equal."""
        reading = self.reading
        tools = read_tools(value_at(row, reading.tools), reading.tools) if reading.tools else None
        for column in reading.columns.values():
            inside = read_tools(tools_beside(value_at(row, column)), column) if has_value(row, column) else None
            if inside and tools and inside != tools:
                raise UserError(f"'{column}' describes other tools than the rest of the row")
            tools = tools or inside
        if tools and self.rendering == "text":
            name = reading.tools or "tools"
            way = f"--ignore_columns {name} leaves them out" if reading.tools else "remove them from the rows"
            raise UserError(f"'{name}' describes tools, which need the chat template; {self._chat_way()}{way}")
        return tools

    def _chat_way(self) -> str:
        """The way to the chat template; plain text and the data sets of DeepSpeed-Chat have none."""
        is_text = self.kind.is_known_set or self.name == "text"
        return "" if is_text else "--apply_chat_template True makes chat messages of the prompts, and "

    def check_left_out(self, row: Row) -> None:
        """Refuse a row with content in a watched column. What a column holds is no loss if it stands in what is read (a
        conversation beside its prompt and answer), or if it holds all that is read (the same as one text)."""
        watched = {name: from_json(value_at(row, name)) for name in row if name in self.reading.watched}
        held = {name: value for name, value in watched.items() if _is_content(name, value)}
        by_use = read_uses(self.kind, self.reading, self.uses, row) if held else {}
        answered = [examples for use, examples in by_use.items() if examples and use != "prompt"]
        found = answered or [examples for examples in by_use.values() if examples]
        read = [list(lines_of([[one.prompt, *one.answers] for one in examples])) for examples in found]
        everything = "\n".join(line for lines in read for line in lines)
        for column, value in held.items() if found else ():
            lines = list(lines_of(value))
            is_read = bool(lines) and all(line in everything for line in lines)
            holds_all = any(all(line in "\n".join(lines) for line in some) for some in read)
            if column not in _NO_COPIES and (is_read or holds_all):
                continue
            way = f"--ignore_columns {column} leaves it out"
            if column in PICTURES:
                way = f"models are trained on text; --ignore_columns {column} leaves out pictures and placeholders"
            if other := self.reading.watched[column]:
                way += f"; --data_format {other} reads it, and --data_format {self.name} reads what is read now"
            raise UserError(
                f"'{column}' holds content, {str(value)[:60]!r}, that the form {self.name} does not use; it reads "
                f"{shown(found[0][0])}. {way}; --prompt_column, --response_column, ... and --data_format choose "
                "another reading"
            )


def read_uses(kind: Kind, reading: Reading, uses: Sequence[Use], row: Row) -> dict[Use, list[Example]]:
    """What a form reads in a row for each use for which it can."""
    found: dict[Use, list[Example]] = {}
    for use in uses:
        if use != "unpaired" or kind.name in _LABELLED:
            with suppress(UserError):
                found[use] = kind.read(Cells(row, reading), use)
    return found


def check_flags_used(forms: Sequence[Form], flags: DataFlags) -> None:
    """Refuse flags that name a column of no data set."""
    named = ", ".join(f"--{role}_column {column}" for role, column in flags.columns.items() if column)
    if named and forms and not any(form.uses_flags for form in forms):
        raise UserError(f"{named}: no data set has such a column")
    missing = [column for column in flags.ignore_columns if not any(column in form.ignored for form in forms)]
    if missing and forms:
        raise UserError(f"--ignore_columns {missing[0]}: no data set has such a column; {forms[0].about}")


def mixed_renderings(forms: dict[str, Form]) -> str:
    """Which data sets the chat template renders and which have text prompts; "" if all are alike. Plain text, which has
    no prompts, does not count."""
    with_prompts = {spec: form for spec, form in forms.items() if form.name != "text"}
    chat, text = ([spec for spec, form in with_prompts.items() if form.rendering == kind] for kind in ("chat", "text"))
    if not chat or not text:
        return ""
    note = f"the chat template renders {', '.join(chat)}, but the prompts of {', '.join(text)} are text"
    is_fixed = any(forms[spec].kind.is_known_set for spec in text)  # the flag does not apply to them
    return note if is_fixed else f"{note}; --apply_chat_template True makes chat messages of them all"


# Parts of a row


def _is_content(column: str, value: Any) -> bool:
    """Whether a column that a reading does not use holds content: weights of 1 change nothing, nor do switches of
    thoughts (`reasoning: "on"`), measured losses, names of splits (`training: "train"`), and labels of classes."""
    word = str(value).strip().lower()
    if value in (None, "", [], {}):
        return False
    if column in ("label", "labels"):
        return is_label(value)
    if column in ("train", "training", "loss") and not isinstance(value, list):
        return word in ("0", "0.0", "false")
    if column in THOUGHTS:
        return word not in ("", "on", "off", "yes", "no", "true", "false")
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


def shown(example: Example) -> str:
    """An example for a message: the end of its prompt, and the start of its answers."""
    turns = [("prompt ", example.prompt)] if isinstance(example.prompt, str) else [
        (f"{turn['role']}: ", turn["content"]) for turn in example.prompt[-2:]
    ]  # fmt: skip
    text = "; ".join(f"{who}{words if len(words) <= 40 else f'...{words[-40:]}'!r}" for who, words in turns)
    answers = [answer if isinstance(answer, str) else answer["content"] for answer in example.answers]
    return (text if example.prompt else "text without a prompt") + "".join(f", answer {a[:40]!r}" for a in answers)


def _by_prompt(reading: Reading, rows: Rows) -> Iterator[tuple[Row, int]]:
    """One row for each prompt of a whole data set of KTO rows, with its origin. It is the first row of the prompt, in
    the order of the rows, with all answers to the prompt and their labels. System message and tools are part of what is
    asked."""
    groups: dict[str, tuple[int, list[Any], list[Any]]] = {}
    asked = [column for column in (reading.columns["prompt"], reading.system, reading.tools) if column]
    for number, row in enumerate(rows):
        key = json.dumps([row.get(name) for name in asked])
        _, answers, labels = groups.setdefault(key, (number, [], []))
        answers.append(row.get(reading.columns["response"]))
        labels.append(row.get(reading.columns["label"]))
    for number, answers, labels in groups.values():
        yield rows[number] | {GROUP_ANSWERS: answers, GROUP_LABELS: labels}, rows.origin(number)


def rows_made(function: str, row: Row) -> list[Row]:
    """The rows that a function of one's own makes of a row."""
    try:
        made = own_function("--data_format", function)(deepcopy(row))  # rewards get the row as it is
    except Exception as problem:  # noqa: BLE001  the function may raise anything; this row is then bad
        raise UserError(f"{function} raised {cause_of(problem, file_named(function))}") from None
    rows = [] if made is None else made if isinstance(made, list) else [made]
    if not all(isinstance(one, dict) for one in rows):
        raise UserError(f"{function} must return a dict, a list of dicts or None, not {type(made).__name__}")
    return rows
