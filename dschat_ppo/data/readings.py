"""Flags by which rows can be read that are not read as they are. A message names only flags that
have been tried."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, NamedTuple

from dschat_ppo.config.data_flags import DataFlags, Use
from dschat_ppo.data.advice import Choice, named_flags
from dschat_ppo.data.content import (
    OF_PROMPTS,
    OF_QUESTIONS,
    SYSTEM_COLUMNS,
    is_content,
    is_switch,
    names_an_answer,
)
from dschat_ppo.data.examples import Row, field_at, has_value, json_value
from dschat_ppo.data.form_kinds import KINDS
from dschat_ppo.data.forms import Form
from dschat_ppo.data.messages import (
    looks_like_messages,
    turns_in,
)
from dschat_ppo.data.unread import UnreadError
from dschat_ppo.data.uses import further_uses
from dschat_ppo.errors import UserError

MOST_WAYS = 3
# Names of columns that may hold a prompt or an answer, whatever their case, the likeliest first;
# some of them hold a prompt only if that has several words
_PROMPTS = (
    "prompt question problem query instruction input inputs user human source text context task"
    " dialogue article document"
).split()
_WITH_WORDS = ("source", "text", "context", "task")
_ANSWERS = (
    "response completion output outputs answer answers solution target targets assistant gpt"
    " summary highlights"
).split()
_DIALOGUES = ("data", "dialogue", "dialog", "chat", "turns", "conversation", "conversations")
_ROUNDS = 4  # of columns that are ignored, until the rest is read
# Columns of prompts that forms know by themselves
_OF_FORMS = {"prompt", "question", "query", "context", "instruction", "input", "messages"}


class Reading(NamedTuple):
    """What flags read.

    Attributes:
        flags: The flags, with those that leave out columns.
        columns: The columns that are read.
        dropped: Columns with content of the prompt that are left out.
    """

    flags: dict[str, Any]
    columns: tuple[str, ...]
    dropped: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """Rows with which flags are tried. `detect` finds the form that further flags give them."""

    detect: Callable[[DataFlags], Form]
    columns: list[str]
    rows: list[Row]
    flags: DataFlags

    def choices(self, choices: Sequence[Choice], use: Use | None) -> list[str]:
        """Those of the choices that read most rows for a use, with a flag for the prompt if one is
        needed."""
        ways = list[str]()
        for choice in choices:
            best: Reading | None = None
            for prompt in self._prompts_beside(choice):
                flags = {**prompt, **choice.flags}
                reading = self._read_with_system(flags, use or "preference")
                if reading is not None and (best is None or not reading.dropped):
                    best = reading
                if best is not None and not best.dropped:
                    break
            if best is not None:
                words = f"{choice.condition}: {named_flags(best.flags)}"
                ways.append(f"{words}{_without(best.dropped)}")
        return ways

    def ways(self, use: Use, lost: Sequence[str]) -> list[str]:
        """Halves of sentences with flags that read the rows for a use, and what is then read: at
        most `MOST_WAYS` different readings, those first that read all of the prompt. `lost` are the
        columns whose content would be lost without them, if that is what is wrong."""
        columns = [column for column in self.columns if column not in self.flags.ignore_columns]
        ways = list[str]()
        if use in further_uses():
            prompts = list(_named(columns, self.rows, _PROMPTS))
            changes = further_uses()[use].changes(columns, self.rows, prompts)
        elif lost:
            changes = _with_lost(columns, self.rows, self.flags, use, lost)
        elif use in ("sft", "prompt"):
            changes = _with_names(columns, self.rows, use)
            for column in columns:
                if any(_is_hh_transcript(row.get(column)) for row in self.rows):
                    ways.append(
                        f"'{column}' is a conversation in one text: --data_format FILE.py:FUNCTION"
                        " makes messages of it, as transcripts.py in docs/extending.md"
                    )
        else:
            return []
        readings = dict[tuple[str, ...], Reading]()
        for change in changes:
            if lost:  # among the changes are those that keep a system message
                reading = self._read_with(change, use)
            else:
                reading = self._read_with_system(change, use)
            if reading is not None:
                readings.setdefault(reading.columns, reading)
            if len(readings) + len(ways) == MOST_WAYS:
                break
        complete = [reading for reading in readings.values() if not reading.dropped]
        of_questions = [column for column in lost or columns if column in OF_QUESTIONS]
        if of_questions and not complete:
            where = "(docs/extending.md)"
            if of_questions[0] in ("choices", "options"):
                where = "and the right one into the response, as choices.py in docs/extending.md"
            ways.append(
                f"--data_format FILE.py:FUNCTION can put '{of_questions[0]}' into the prompt"
                f" {where}"
            )
        for reading in sorted(readings.values(), key=lambda one: self._length_of(one.dropped)):
            # what a question is about may be left out, but not the question
            if of_questions and not set(reading.dropped) <= set(lost or of_questions):
                continue
            ways.append(_reading_in_words(reading))
        return ways

    def _length_of(self, columns: Sequence[str]) -> int:
        """The characters in some columns of the rows."""
        return sum(len(str(row.get(column) or "")) for row in self.rows for column in columns)

    def _prompts_beside(self, choice: Choice) -> Iterator[dict[str, str]]:
        """Flags for the prompt beside those of a choice, one attempt after another.

        If a flag names the prompt already, or the answers are chat messages, which hold it: no
        further flag is the only attempt. Else the attempts are the columns most of whose texts have
        several words: first those with names of prompts, then those with the longest texts. No
        further flag is tried before them if a form knows the prompt by the name of a column, and
        after them if none does.
        """
        first_path = next(iter(choice.flags.values()))
        first_values = [
            json_value(field_at(row, first_path)) for row in self.rows if has_value(row, first_path)
        ]
        column_names = {column.lower() for column in self.columns}
        has_known_prompt = bool(column_names & _OF_FORMS)
        if self.flags.prompt_column or any(map(looks_like_messages, first_values)):
            yield {}
            return
        if has_known_prompt:
            yield {}
        named = [*choice.flags.values(), *self.flags.columns.values()]
        taken = {path.split(".")[0] for paths in named for path in re.split("[, ]", paths)}
        lengths = dict[str, int]()
        for column in self.columns:
            if column in taken or column in self.flags.ignore_columns:
                continue
            for path in _texts_in(column, self.rows):
                texts = [str(field_at(row, path)) for row in self.rows if has_value(row, path)]
                if 2 * sum(" " in text.strip() for text in texts) >= len(self.rows):
                    lengths[path] = sum(map(len, texts))
        ranks = {name: rank for rank, name in enumerate(_PROMPTS)}
        for path in sorted(
            lengths, key=lambda one: (ranks.get(one.lower(), len(ranks)), -lengths[one])
        ):
            yield {"prompt_column": path}
        if not has_known_prompt:
            yield {}

    def _read_with(self, change: dict[str, Any], use: Use) -> Reading | None:
        """What is read with further flags; None if most rows are not. Columns that no form reads
        beside them are left out by a flag."""
        named = {name: value for name, value in change.items() if name != "ignore_columns"}
        for name, value in named.items():
            if getattr(self.flags, name) not in (None, "auto", value):
                return None
        ignored = [*self.flags.ignore_columns, *str(change.get("ignore_columns", "")).split()]
        form = None
        for _ in range(_ROUNDS):
            try:
                form = self.detect(replace(self.flags, **named, ignore_columns=ignored))
            except UnreadError as problem:
                roots = {str(path).split(".")[0] for path in named.values()}
                if not problem.lost or roots & set(problem.lost):
                    return None
                ignored += problem.lost
                continue
            except UserError:
                return None
            unread = self._unread_of_prompt(form, ignored)
            if not unread:
                break
            ignored += unread
            form = None
        if form is None or not self._reads_most(form, ignored, use):
            return None
        further = ignored[len(self.flags.ignore_columns) :]
        flags = dict(named)
        if further:
            flags["ignore_columns"] = further
        roles = ["prompt", "input", "messages"]
        if use != "prompt":
            roles += ["response", "chosen"]
        if use in ("preference", "unpaired"):
            roles += ["rejected", "first", "second"]
        if use in further_uses():
            roles += further_uses()[use].roles
        columns = tuple(form.columns[role] for role in roles if role in form.columns)
        if "apply_chat_template" in named:
            columns = (*columns, "")  # not the same as what is read without it
        dropped = tuple(column for column in further if column.lower() in OF_PROMPTS)
        return Reading(flags, columns, dropped)

    def _read_with_system(self, change: dict[str, Any], use: Use) -> Reading | None:
        """As `_read_with`, with a flag that makes chat messages of the prompts if their system
        messages would be left out without it."""
        reading = self._read_with(change, use)
        if reading is None or not _leaves_out_system(reading):
            return reading
        as_chat = self._read_with({**change, "apply_chat_template": True}, use)
        if as_chat is None or _leaves_out_system(as_chat):
            return reading
        return as_chat

    def _unread_of_prompt(self, form: Form, ignored: list[str]) -> list[str]:
        """The columns with content of a prompt that a form neither reads nor names."""
        left = [
            column
            for column in self.columns
            if column.lower() in OF_PROMPTS
            and column not in form.used_columns
            and column not in ignored
        ]
        watched = replace(form.watched, names=tuple(left))
        lost = dict[str, Any]()
        for row in self.rows:
            lost |= watched.lost_in(row)
        return list(lost)

    def _reads_most(self, form: Form, ignored: list[str], use: Use) -> bool:
        """Whether a form reads most rows for a use, and an example at least."""
        read = 0
        has_examples = False
        for row in self.rows:
            row_left = {column: value for column, value in row.items() if column not in ignored}
            with suppress(UserError):
                examples = form.read(row_left, use)
                has_examples = has_examples or bool(examples)
                read += 1
        return has_examples and 2 * read >= len(self.rows)


def _leaves_out_system(reading: Reading) -> bool:
    return not set(SYSTEM_COLUMNS).isdisjoint(reading.flags.get("ignore_columns", ()))


def _reading_in_words(reading: Reading) -> str:
    """A reading in a message."""
    names = [repr(column) for column in reading.columns if column]
    about = " and ".join(names)
    if len(names) > 2:
        about = f"{', '.join(names[:-1])} and {names[-1]}"
    if "apply_chat_template" in reading.flags:
        about += " as chat messages"
    return f"{named_flags(reading.flags)} reads {about}{_without(reading.dropped)}"


def _without(dropped: Sequence[str]) -> str:
    """What flags leave out of a prompt, in a message."""
    if not dropped:
        return ""
    return f", without {', '.join(map(repr, dropped))}"


def _with_lost(
    columns: list[str],
    rows: list[Row],
    flags: DataFlags,
    use: Use,
    lost: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Flags that use the first column whose content would be lost, none besides `--ignore_columns`,
    flags that use the other columns, and those that need none of them."""
    if flags.apply_chat_template is None and {*SYSTEM_COLUMNS, "tools"} & set(lost):
        yield {"apply_chat_template": True}
    for rank, column in enumerate(lost):
        if column in KINDS["alpaca"].roles["input"].split():
            for prompt in islice(_named(columns, rows, _PROMPTS), 1):
                for answer in _named(columns, rows, _ANSWERS):
                    yield {
                        "data_format": "alpaca",
                        "prompt_column": prompt,
                        "response_column": answer,
                    }
        for path in _paths(rows, column):
            if column.lower() in _PROMPTS:
                yield {"prompt_column": path}
                for answer in _named(columns, rows, _ANSWERS):
                    if use == "sft" and answer != path:
                        yield {"prompt_column": path, "response_column": answer}
            elif use == "sft" and _is_answer(column):
                yield {"response_column": path}
                for prompt in islice(_named(columns, rows, _PROMPTS), 1):
                    yield {"prompt_column": prompt, "response_column": path}
            yield {"messages_column": path}
        if rank == 0:
            yield {}
    yield from _with_names(columns, rows, use)


def _with_names(columns: list[str], rows: list[Row], use: Use) -> Iterator[dict[str, Any]]:
    """Flags for columns whose names or values tell what they may be."""
    for column in columns:
        values = [json_value(row.get(column)) for row in rows]
        if any(looks_like_messages(value) or turns_in(value) for value in values) or (
            column.lower() in _DIALOGUES and any(isinstance(value, list) for value in values)
        ):
            yield {"messages_column": column}
        if use == "sft" and any(map(_is_hh_transcript, values)):
            yield {"data_format": "text", "response_column": column}
    prompts = list(_named(columns, rows, _PROMPTS))
    if use == "prompt":
        yield from ({"prompt_column": prompt} for prompt in prompts)
        return
    answers = list(_named(columns, rows, _ANSWERS))
    yield from ({"response_column": answer} for answer in answers)
    for prompt, answer in product(prompts, answers):
        if prompt != answer:
            yield {"prompt_column": prompt, "response_column": answer}


def _named(columns: list[str], rows: list[Row], names: list[str]) -> Iterator[str]:
    """The columns with one of these names, in the order of the names; of answers also those whose
    name tells so, or ends with `answer`, `response` or `output`."""
    for name in names:
        for column in columns:
            if column.lower() == name:
                for path in _paths(rows, column):
                    texts = [str(field_at(row, path)) for row in rows if has_value(row, path)]
                    has_words = any(" " in text.strip() for text in texts)
                    if name not in _WITH_WORDS or has_words:
                        yield path
    if names is _ANSWERS:
        for column in columns:
            if column.lower() not in names and _is_answer(column) and _has_content(column, rows):
                yield from _paths(rows, column)


def _is_answer(column: str) -> bool:
    """Whether the name of a column tells of an answer."""
    is_said = column.lower().rstrip("s").endswith(("answer", "response", "output", "completion"))
    return is_said or column.lower() in _ANSWERS or names_an_answer(column)


def _has_content(column: str, rows: list[Row]) -> bool:
    """Whether a column whose name tells of an answer or of thoughts holds any, and not a switch of
    thoughts (`reasoning: "on"`)."""
    if not names_an_answer(column):
        return True
    values = [row[column] for row in rows if row.get(column) is not None]
    return not is_switch(values) and any(is_content(column, value) for value in values)


def _is_hh_transcript(value: Any) -> bool:
    """Whether a text holds messages that begin with the names of a user and of an assistant."""
    return isinstance(value, str) and all(map(value.lower().__contains__, ("user:", "assistant:")))


def _paths(rows: list[Row], column: str) -> list[str]:
    """The column, the messages in an object, or the first one of a list of texts in it, as in
    `answers.text` of SQuAD."""
    raw_values = [field_at(row, column) for row in rows if has_value(row, column)]
    values = list(map(json_value, raw_values))
    for key in ("text", "messages"):
        if values and all(isinstance(value, dict) and key in value for value in values):
            values = [value[key] for value in values]
            column = f"{column}.{key}"
    if values and all(isinstance(value, list) for value in values):
        if all(isinstance(one, str) for value in values for one in value[:1]):
            return [f"{column}.0"]
        # messages, or the JSON text of something else, as of calls of tools
        if all(map(looks_like_messages, values)) or all(isinstance(one, str) for one in raw_values):
            return [column]
        return []
    if any(isinstance(value, str | int) for value in values):
        return [column]
    return []


def _texts_in(column: str, rows: list[Row]) -> list[str]:
    """The column if it holds texts or messages, or the fields with texts of the objects that it
    holds."""
    values = [row[column] for row in rows if row.get(column) is not None]
    if values and all(isinstance(value, str) or looks_like_messages(value) for value in values):
        return [column]
    if values and all(isinstance(value, dict) for value in values):
        return [f"{column}.{key}" for key, inner in values[0].items() if isinstance(inner, str)]
    return []
