"""Flags by which rows can be read that are not read as they are. A message names only flags that
have been tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from typing import Any

from dschat_ppo.config.data_flags import DataFlags, Use
from dschat_ppo.data.content import SYSTEM_COLUMNS, names_an_answer
from dschat_ppo.data.examples import (
    Row,
    field_at,
    has_value,
    json_value,
    looks_like_messages,
    turns_in,
)
from dschat_ppo.data.forms import Form, UnreadError
from dschat_ppo.errors import UserError

MOST_WAYS = 3
# Names of columns that may hold a prompt or an answer, whatever their case, the likeliest first;
# some of them hold a prompt only if that has several words
_PROMPTS = (
    "prompt question problem query instruction input inputs user human source text context task"
).split()
_WITH_WORDS = ("source", "text", "context", "task")
_ANSWERS = (
    "response completion output outputs answer answers solution target targets assistant gpt"
).split()
_DIALOGUES = ("data", "dialogue", "dialog", "chat", "turns", "conversation", "conversations")
_ROUNDS = 4  # of columns that are ignored, until the rest is read


def tried_ways(
    detect: Callable[[DataFlags], Form],
    columns: list[str],
    rows: list[Row],
    flags: DataFlags,
    use: Use,
    lost: Sequence[str],
) -> list[str]:
    """Halves of sentences with flags by which `detect` reads these rows for a use, and what is then
    read: at most `MOST_WAYS` different readings. `lost` are the columns whose content would be lost
    without them, if that is what is wrong."""
    if not lost and use not in ("sft", "prompt"):
        return []
    columns = [column for column in columns if column not in flags.ignore_columns]
    if lost:
        changes = _with_lost(columns, rows, flags, use, lost)
    else:
        changes = _with_names(columns, rows, use)
    ways = dict[tuple[str, ...], str]()
    for column in columns:
        if not lost and any(_is_transcript(row.get(column)) for row in rows):
            ways[column, ""] = (
                f"'{column}' is a conversation in one text: --data_format FILE.py:FUNCTION makes"
                " messages of it, as transcripts.py in docs/extending.md"
            )
    for change in changes:
        way = _tried(detect, rows, flags, use, change)
        if way is not None:
            reading, words = way
            ways.setdefault(reading, words)
        if len(ways) == MOST_WAYS:
            break
    return list(ways.values())


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
    for number, column in enumerate(lost):
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
        if number == 0:
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
        if use == "sft" and any(map(_is_transcript, values)):
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
            if column.lower() not in names and _is_answer(column):
                yield from _paths(rows, column)


def _is_answer(column: str) -> bool:
    """Whether the name of a column tells of an answer."""
    is_said = column.lower().rstrip("s").endswith(("answer", "response", "output", "completion"))
    return is_said or column.lower() in _ANSWERS or names_an_answer(column)


def _is_transcript(value: Any) -> bool:
    """Whether a text has turns that begin with the names of a user and of an assistant."""
    return isinstance(value, str) and all(map(value.lower().__contains__, ("user:", "assistant:")))


def _paths(rows: list[Row], column: str) -> list[str]:
    """The column, or the first one of a list of texts in it, as in `answers.text` of SQuAD."""
    values = [json_value(field_at(row, column)) for row in rows if has_value(row, column)]
    if values and all(isinstance(value, dict) and "text" in value for value in values):
        values = [value["text"] for value in values]
        column = f"{column}.text"
    if values and all(isinstance(value, list) for value in values):
        if all(isinstance(one, str) for value in values for one in value[:1]):
            return [f"{column}.0"]
        if all(map(looks_like_messages, values)):
            return [column]
        return []
    if any(isinstance(value, str | int) for value in values):
        return [column]
    return []


def _tried(
    detect: Callable[[DataFlags], Form],
    rows: list[Row],
    flags: DataFlags,
    use: Use,
    change: dict[str, Any],
) -> tuple[tuple[str, ...], str] | None:
    """What is read with further flags, as the columns and as words; None if most rows are not."""
    if any(getattr(flags, name) not in (None, "auto") for name in change):
        return None
    form = None
    ignored = list(flags.ignore_columns)
    named = {str(path).split(".")[0] for path in change.values()}
    for _ in range(_ROUNDS):
        try:
            form = detect(replace(flags, **change, ignore_columns=ignored))
            break
        except UnreadError as problem:
            if not problem.lost or named & set(problem.lost):
                return None
            ignored += problem.lost
        except UserError:
            return None
    read = 0
    for row in rows if form is not None else ():
        with suppress(UserError):
            assert form is not None
            kept = {column: value for column, value in row.items() if column not in ignored}
            read += bool(form.read(kept, use))
    if form is None or 2 * read < len(rows) or not read:
        return None
    asked = [form.columns[role] for role in ("prompt", "input", "messages") if role in form.columns]
    said = [form.columns[role] for role in ("response", "chosen") if role in form.columns]
    reading = list(asked) if use == "prompt" else asked + said[:1]
    words = [f"--{name} {value}" for name, value in change.items()]
    if len(ignored) > len(flags.ignore_columns):
        words.append(f"--ignore_columns {' '.join(ignored)}")
    about = " and ".join(map(repr, reading))
    if "apply_chat_template" in change:
        about += " as chat messages"
        reading.append("")  # not the same as what is read without it
    return tuple(reading), f"{' '.join(words)} reads {about}"
