"""The form of a data set, detected once from its columns and first rows: which form fits, and whether its prompts are
text or chat."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dschat_ppo.common.own_functions import file_named, own_function
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.schema import is_own_function
from dschat_ppo.data.examples import Example, Row, Use, has_value, value_at
from dschat_ppo.data.form_kinds import FORMS, KINDS, set_named
from dschat_ppo.data.forms import (
    PICTURES,
    Form,
    Kind,
    Reading,
    Rendering,
    is_label,
    lines_of,
    read_uses,
    rows_made,
    shown,
)
from dschat_ppo.data.messages import THOUGHTS, WEIGHTS, alternates, from_json, without_pictures
from dschat_ppo.errors import UserError

FIRST_ROWS = 20
_SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")  # used unless --system_column says otherwise
_CONTENT = ("prompt", "response", "chosen", "rejected", "messages", "better")  # roles that flags name and forms have
# Columns that no flag can name, and that say what the model sees or what is trained, wherever they are.
_ALWAYS_CONTENT = {*PICTURES, *WEIGHTS, *THOUGHTS, "history", "functions", "rejected_messages"}
_NO_TEXT = ("source", "truth", "task", "scores", "ranks", "better")  # roles
# Columns that may hold the prompt or the answers of a row in some form. What only rewards use is not among them, nor
# are names that mostly stand for who asked, and which model answered.
_MAY_BE_CONTENT = {
    name for kind in KINDS.values() for role, names in kind.roles.items() for name in names.split()
    if "." not in name and role not in _NO_TEXT
} - {"answer", "answers", "user", "model", "bot"} | {"context", "tools", *_SYSTEM_COLUMNS}  # fmt: skip
_OF_REWARDS = {"response", "responses", "completion", "completions", "output", "label", "labels", "steps", *THOUGHTS}
_SENTENCE_ENDS = ".!?…。！？｡．;；,，、)）]】\"'”’»」』*"
_QUESTIONS = ("question", "query", "input", "instruction")  # columns of what a user says, not of text to continue


class Candidate(NamedTuple):
    """A form with its columns (role -> column), and what it reads in the first rows: use -> examples of each row,
    without the uses for which the row cannot be read. `is_chat`: whether it finds chat messages. `fits`: whether it
    reads at least half of the rows."""

    kind: Kind
    columns: dict[str, str]
    read: list[dict[Use, list[Example]]]
    is_chat: bool
    fits: bool

    def first(self, use: Use) -> list[Example]:
        """The first example of each row for a use."""
        return [found[use][0] for found in self.read if found.get(use)]


def detect_form(
    name: str, columns: list[str], rows: list[Row], has_template: bool, flags: DataFlags, is_only: bool = True
) -> Form:
    """The form of a data set. It does not depend on the step. `UserError` if no form fits, a flag names no column, or
    the rows can be read in two ways.

    Args:
        columns: names of all columns.
        rows: the first rows of the whole data set; `FIRST_ROWS` of them are read.
        has_template: whether the tokenizer has a chat template.
        is_only: whether there is no other data set, to which the flags may apply.
    """
    rows = rows[:FIRST_ROWS]
    if is_own_function(flags.data_format):
        return _own_form(name, rows, has_template, flags, is_only)
    ignored = tuple(column for column in columns if column in flags.ignore_columns)
    pictures = tuple(column for column in PICTURES if column in flags.ignore_columns)
    rows = [without_pictures(row) if any(row.get(column) for column in pictures) else row for row in rows]
    columns = [column for column in columns if column not in ignored]
    rows = [{column: value for column, value in row.items() if column in columns} for row in rows]
    by_flag, note = _columns_by_flag(name, columns, rows, flags, is_only)
    content = {role: column for role, column in by_flag.items() if role in _CONTENT}
    chosen, *others = _fitting(name, columns, rows, flags, content)
    kind, by_role = chosen.kind, chosen.columns
    rendering, about_prompts, warning = _rendering(name, chosen, has_template, flags)
    by_name = next((column for column in _SYSTEM_COLUMNS if column in columns), None)
    system = by_flag.get("system", by_name if flags.system_column is None else None)
    has_prose = any(_is_prose(row.get("tools")) for row in rows)
    reading = Reading(
        kind.name, by_role, rendering, rendering == "chat" and not chosen.is_chat,
        flags.input_template if not kind.inside and not chosen.is_chat else None,
        None if kind.is_known_set else system,
        "tools" if "tools" in columns and not has_prose and not kind.is_known_set else None,
        *_truth(chosen, rows, flags, by_flag, is_only),
        flags.system_message if rendering == "chat" else None, flags.roles, pictures,
    )  # fmt: skip
    grouped = [path for path in (*by_role.values(), reading.system) if path]
    used = {path.split(".")[0] for path in (*grouped, reading.truth) if path} | {"tools"} & set(columns)
    used |= {"margin"} if "rejected" in by_role else set()
    used |= set(_SYSTEM_COLUMNS) if flags.system_column is not None else set()
    watched = _watched(rows, flags, chosen, others, by_flag)
    watched = {column: other for column, other in sorted(watched.items()) if column not in used}

    # What was understood of the data set, for the log
    parts = [f"form {kind.name} ({', '.join(f'{role}: {column}' for role, column in by_role.items())})", about_prompts]
    parts += [f"system messages from '{reading.system}'"] if reading.system else []
    parts += [f"tools from '{reading.tools}'"] if reading.tools else []
    unused = [column for column in columns if column not in used and not column.startswith("_")]
    if unused and not kind.is_known_set:
        parts.append(f"columns that training does not use: {_listed(unused)}")
    if "messages" in by_role and any(alternates(value_at(row, by_role["messages"])) for row in rows[:1]):
        parts.append("the texts of a row are turns of user and assistant in turn")
    parts += ["the column 'tools' is not used, since it is not JSON"] if has_prose else []
    if reading.truth:
        pattern = f" by '{reading.truth_pattern}'" if reading.truth_pattern else ""
        parts.append(f"the correct answer from '{reading.truth}'{pattern}")
    for flag in ("input_template", "system_message"):
        if getattr(flags, flag) and getattr(reading, flag) is None:
            parts.append(f"--{flag} does not apply")
    if {"response", "chosen"} <= set(by_role):
        parts.append(f"SFT learns '{by_role['response']}', not '{by_role['chosen']}'")
    if by_role.get("response") == "text" and kind.name == "prompt_response" and "response" not in content:
        hint = "'text' is read as the answer to 'prompt'; --ignore_columns text leaves it out"
        warning = "; ".join(filter(None, [hint, warning]))
    if not chosen.fits:
        warning = f"most of the first rows do not fit the form {kind.name}; --prompt_column, ... name other columns"
    form = Form(
        kind, replace(reading, watched=watched), kind.uses(by_role),
        f"{name}: has the columns {_listed(columns)}, read as form {kind.name}",
        "; ".join(filter(None, [*parts, note])), warning, bool(by_flag), ignored,
    )  # fmt: skip
    if form.regroup and (nested := [path for path in grouped if path not in columns]):
        raise UserError(f"{name}: rows are grouped by prompt, so '{nested[0]}' must be a column, not inside one")
    for row in rows:
        try:
            if rendering == "text":
                form.system_of(row)
            form.check_left_out(row)
        except UserError as problem:
            raise UserError(f"{name}: {problem}") from None
    return form


def _own_form(name: str, rows: list[Row], has_template: bool, flags: DataFlags, is_only: bool) -> Form:
    """The form of the rows that `FILE.py:FUNCTION` makes of the first rows. `UserError` for a form that groups rows
    before they are read, which is before they are made."""
    function = flags.data_format
    own_function("--data_format", function)  # a missing file is no bad row
    made, problem = list[Row](), f"it returns None for each of the first {len(rows)} rows, by which the form is found"
    for number, row in enumerate(rows):
        try:
            made += rows_made(function, row)
        except UserError as raised:
            problem = f"{name}, row {number}: {raised}"
    if not made:
        raise UserError(f"--data_format {function}: makes no row: {problem}")
    columns = list(dict.fromkeys(column for row in made for column in row))
    known = replace(flags, data_format="auto")
    form = detect_form(f"{name} through {function}", columns, made, has_template, known, is_only)
    if form.regroup is not None:
        raise UserError(
            f"--data_format {function}: makes rows of the form {form.name}, which are grouped by prompt before they "
            "are read; make pairs, or messages with a label"
        )
    sha = hashlib.sha256(Path(file_named(function)).read_bytes()).hexdigest()
    return replace(form, function=function, file_sha=sha, description=f"{function} makes {form.description}")


# Columns


def _columns_by_flag(
    name: str, columns: list[str], rows: list[Row], flags: DataFlags, is_only: bool
) -> tuple[dict[str, str], str]:
    """(role -> column that a flag names, a note for the log). One of several data sets may lack all of them."""
    wanted = {role: column for role, column in flags.columns.items() if column}
    missing = {role: column for role, column in wanted.items() if not _exists(column, columns, rows)}
    if not missing:
        return wanted, ""
    if len(missing) == len(wanted) and not is_only:
        return {}, f"has none of the columns that flags name ({', '.join(missing.values())}), so they do not apply"
    named = ", ".join(f"--{role}_column {column}" for role, column in missing.items())
    raise UserError(f"{named}: {name} has no such column; it has {_listed(columns)}{_rows_inside(rows)}")


def _exists(path: str, columns: list[str], rows: list[Row]) -> bool:
    """Whether rows have a column, or a field inside one."""
    return path in columns or (path.split(".")[0] in columns and any(has_value(row, path) for row in rows))


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns))


def _rows_inside(rows: list[Row]) -> str:
    """A hint for a file that is one object with all rows in one of its values; else ""."""
    values = rows[0].items() if len(rows) == 1 else ()
    lists = [name for name, value in values if isinstance(value, list) and {type(item) for item in value} == {dict}]
    if len(lists) != 1:
        return ""
    query = f"'.[{json.dumps(lists[0])}][]'"
    return f"; the rows seem to be in '{lists[0]}': write them as JSON Lines, as with: jq -c {query} FILE > rows.jsonl"


def _located(kind: Kind, columns: list[str], rows: list[Row], by_flag: dict[str, str]) -> dict[str, str]:
    """Role -> column of a form: the one that a flag names, or else the first of its names that exists."""
    found = {}
    for role, names in kind.roles.items():
        free = [path for path in names.split() if _exists(path, columns, rows) and path not in by_flag.values()]
        if role in by_flag or free:
            found[role] = by_flag.get(role) or free[0]
    if kind.name == "hh" and {"chosen", "messages"} <= set(found):  # pairs of transcripts, or one transcript
        unused = ("chosen", "rejected") if "messages" in by_flag else ("messages",)
        found = {role: column for role, column in found.items() if role not in unused}
    if kind.name == "prompt_response" and set(found) == {"prompt"} and "text" not in by_flag.values():
        told = [row for row in rows if isinstance(row.get("text"), str) and has_value(row, found["prompt"])]
        asked = [lines_of(from_json(value_at(row, found["prompt"]))) for row in told]
        # a text that repeats its prompt is no answer to it
        repeats = [all(line in row["text"] for line in lines) for row, lines in zip(told, asked, strict=True)]
        found |= {"response": "text"} if 2 * repeats.count(False) > len(rows) else {}
    if kind.name == "preference" and "instruction" in columns and found.get("prompt") == "input":
        del found["prompt"]  # of Alpaca's form
    if kind.name == "alpaca" and any(isinstance(row.get(found.get("response", "")), list) for row in rows):
        found["pair"] = found.pop("response")
    # a column whose partner is missing, as chosen without rejected, has no role
    needed = [roles for _, roles in kind.choices()]
    served = set().union(*(roles for roles in needed if roles <= set(found)))
    return {role: column for role, column in found.items() if role in served or role not in set().union(*needed)}


# The choice among forms


def _fitting(
    name: str, columns: list[str], rows: list[Row], flags: DataFlags, by_flag: dict[str, str]
) -> list[Candidate]:
    """The form of a data set and the others that fit. A flag or the name chooses it, or else columns and rows, messages
    first. `by_flag` are the columns of content that flags name. `UserError` if no form has the columns."""
    known = set_named(name) if flags.data_format == "auto" and not by_flag else None
    if known or flags.data_format != "auto":
        kind = FORMS[known or flags.data_format]
        located = _located(kind, columns, rows, by_flag)
        if unknown := [role for role in by_flag if role not in kind.roles]:
            raise UserError(f"{name}: --{unknown[0]}_column does not apply to the form {kind.name}")
        if not kind.uses(located):
            names = ", ".join(names.replace(" ", "/") for names in kind.roles.values())
            hint = f"; --data_format FORM reads it in another way than DeepSpeed-Chat reads {known}" if known else ""
            raise UserError(
                f"{name}: has the columns {_listed(columns)}; the form {kind.name} needs some of {names}{hint}"
            )
        return [_try(kind, located, rows)]
    found, filled = [], {column for column in columns if any(row.get(column) is not None for row in rows)}
    for kind in KINDS.values():
        located = _located(kind, columns, rows, by_flag)
        is_named = set(by_flag) <= set(kind.by_flag.split()) & set(located)
        if is_named and kind.uses(located) and not set(kind.not_with.split()) & filled - {*by_flag.values()}:
            found.append(_try(kind, located, rows))
    if not found:
        raise UserError(
            f"{name}: has the columns {_listed(columns)}, which fit no known form; name them with --prompt_column, "
            f"--response_column, --chosen_column, --rejected_column or --messages_column{_rows_inside(rows)}"
        )
    fitting = [one for one in found if one.fits] or found[-1:]  # whose reader says what is wrong with each row
    if not fitting[0].is_chat:
        fitting.sort(key=lambda one: one.kind.rendering != "chat")
    pairs = fitting[0].first("preference") if fitting[0].kind.name == "preference" else []
    repeated = [
        pair for pair in pairs if isinstance(pair.prompt, str) and pair.prompt
        and all(isinstance(answer, str) and answer.startswith(pair.prompt) for answer in pair.answers)
    ]  # fmt: skip
    if 2 * len(repeated) > len(pairs):  # read twice, or part of the answers
        raise UserError(
            f"{name}: its rows can be read in two ways, because chosen and rejected repeat the prompt "
            f"{str(repeated[0].prompt)[:40]!r}: as preference, the prompt occurs twice (--data_format preference); as "
            "implicit_preference, once (--data_format implicit_preference)"
        )
    return fitting


def _try(kind: Kind, columns: dict[str, str], rows: list[Row]) -> Candidate:
    """Read the first rows in one form."""
    reading = Reading(kind.name, columns, "chat" if kind.rendering in ("chat", "content") else "text")
    uses = [use for use in kind.uses(columns) if (kind.name, use) != ("kto", "preference")]  # which needs all rows
    read = [read_uses(kind, reading, uses, row) for row in rows]
    prompts = [one.prompt for found in read for examples in found.values() for one in examples]
    is_chat = kind.rendering == "chat" or (kind.rendering == "as given" and any(isinstance(p, list) for p in prompts))
    telling = [use for use in uses if use != "prompt" or kind.alone]
    fits = any(2 * sum(use in found for found in read) >= len(rows) for use in telling)
    return Candidate(kind, columns, read, is_chat, fits)


# Text or chat


def _rendering(name: str, chosen: Candidate, has_template: bool, flags: DataFlags) -> tuple[Rendering, str, str]:
    """Whether the prompts of a data set are text or chat, in all three steps; words for the log; a warning or "".
    `UserError` if a flag does not fit the form, chat messages lack a template, or text prompts and answers are glued
    together while there is a chat template."""
    kind, wanted = chosen.kind, flags.apply_chat_template
    if wanted and (kind.is_known_set or kind.name == "text"):
        reason = "has the text prompts of DeepSpeed-Chat" if kind.is_known_set else "is plain text without prompts"
        raise UserError(f"{name}: {reason}, so --apply_chat_template True does not apply; --data_format chooses a form")
    if kind.is_known_set and flags.columns.get("system"):
        raise UserError(f"{name}: has the text prompts of DeepSpeed-Chat, so --system_column does not apply")
    is_question = chosen.columns.get("prompt") in _QUESTIONS and flags.prompt_column is None
    asks = kind.rendering == "content" or (
        is_question and kind.name in ("preference", "better_of_two", "prompt_response")
    )
    is_content = asks and wanted is None and flags.input_template is None and has_template
    if chosen.is_chat or wanted or is_content:
        if not has_template:
            raise UserError(
                f"{name}: its prompts become chat messages, but the model's tokenizer has no chat template; "
                "--chat_template chatml (or llama-3, zephyr, human-assistant, a file) gives it one"
            )
        about = "prompts are text and become user messages of the chat template"
        if chosen.is_chat:
            about = "prompts are chat messages, rendered by the chat template"
        elif kind.name == "hh":
            about = "the turns of the transcripts become messages of the chat template"
        return "chat", about, ""
    if flags.system_message and kind.name != "text":  # plain text has no prompts; other data sets may have some
        way = "omit it" if kind.is_known_set else "--apply_chat_template True makes chat messages of both"
        raise UserError(f"{name}: --system_message precedes chat messages, but the prompts are text; {way}")
    if kind.inside:
        return "text", "text is used as it is", ""
    if flags.input_template is not None:
        return "text", f"prompts are text, put into --input_template {flags.input_template!r}", ""
    if kind.name == "alpaca":
        return "text", "prompts are put into Alpaca's text template", ""
    about, glued = "prompts are text, used as they are", _glued_row(chosen)
    if glued is None or wanted is False:
        return "text", about + (", without the chat template" if has_template and wanted is None else ""), ""
    text = f"...{glued.prompt[-40:]}{str(glued.answers[0])[:40]}..."
    if not has_template or asks or "steps" in kind.uses(chosen.columns):
        chat = "--apply_chat_template True makes user messages of the prompts, and " if has_template else ""
        way = f"{chat}--input_template puts text around a prompt"
        return "text", about, f"nothing separates prompt and answer: {text!r}; {way}"
    raise UserError(
        f"{name}: its rows can be read in two ways: as text, {text!r} (--apply_chat_template False), or as chat, "
        f"{shown(replace(glued, prompt=[{'role': 'user', 'content': glued.prompt}]))} (--apply_chat_template True); "
        "choose one of them, or give the text around a prompt, such as --input_template 'Question: {} Answer: '"
    )


def _glued_row(chosen: Candidate) -> Example | None:
    """A row in which a word or sentence ends the text prompt, and a word starts the answer, without a space between
    them, if more than half of the first rows are such."""
    first = chosen.first("sft") or chosen.first("steps")
    glued = [
        one for one in first
        if one.answers and isinstance(one.prompt, str) and isinstance(one.answers[0], str)
        and one.prompt and (one.prompt[-1].isalnum() or one.prompt[-1] in _SENTENCE_ENDS)
        and one.answers[0][:1].isalnum()
    ]  # fmt: skip
    return glued[0] if 2 * len(glued) > len(first) else None


# What else a row holds


def _truth(
    chosen: Candidate, rows: list[Row], flags: DataFlags, by_flag: dict[str, str], is_only: bool
) -> tuple[str | None, str | None]:
    """(column of the correct answer, pattern that finds it there)."""

    def has_text(column: str, mark: str) -> bool:
        values = [value_at(row, column) for row in rows if has_value(row, column)]
        return any(mark in value for value in values if isinstance(value, str))

    if "answer" in by_flag:
        return by_flag["answer"], flags.answer_pattern
    answer = chosen.columns.get("response") or chosen.columns.get("chosen") or ""
    if flags.answer_pattern is not None and "answer" not in flags.columns:
        if answer and has_text(answer, ""):
            return answer, flags.answer_pattern
        if is_only:
            raise UserError("--answer_pattern needs --answer_column, the column in which it finds the correct answer")
    if chosen.kind.name == "verl":
        return chosen.columns["truth"], None
    has_mark = chosen.kind.name == "question_answer" and has_text(answer, "####")
    if chosen.kind.name == "question_answer" and (answer == "answer" or has_mark):
        return answer, r"(?s).*####\s*(.*?)\s*$" if has_mark else None
    return None, None


def _watched(
    rows: list[Row], flags: DataFlags, chosen: Candidate, others: list[Candidate], by_flag: dict[str, str]
) -> dict[str, str]:
    """Columns that hold content, wherever they come -> the other form that reads them, or "". If flags choose the
    reading, what others would read is left out knowingly."""
    kind = chosen.kind
    if kind.is_known_set:
        return {}
    by_choice = set(by_flag) & set(_CONTENT) or flags.data_format != "auto"
    known = _ALWAYS_CONTENT if by_choice else _ALWAYS_CONTENT | _MAY_BE_CONTENT
    known = known | {
        name for role in chosen.columns if role not in by_flag for name in kind.roles.get(role, "").split()
    }
    elsewhere = {
        column: one.kind.name
        for one in reversed(others) for role, column in one.columns.items() if role not in _NO_TEXT
    }  # fmt: skip
    left_out = set(flags.ignore_columns)
    if set(kind.uses(chosen.columns)) == {"prompt"}:
        left_out |= _OF_REWARDS
    for name in ("label", "labels"):
        if kind.name == "text" or not all(is_label(row[name]) for row in rows if row.get(name) is not None):
            left_out |= {name}  # a class, which calls no answer good
    return {name: elsewhere.get(name, "") for name in (known | set(elsewhere)) - left_out}


def _is_prose(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and not value.lstrip().startswith(("[", "{"))
