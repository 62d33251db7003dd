"""The form of a data set, detected once from its columns and first rows: which form fits, and whether its prompts are
text or chat."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dschat_ppo.common.own_functions import file_named, own_function
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.schema import is_own_function
from dschat_ppo.data.examples import (
    THOUGHTS,
    Example,
    Row,
    Use,
    has_value,
    value_at,
    without_pictures,
)
from dschat_ppo.data.form_kinds import FORMS, KINDS, Kind, set_named
from dschat_ppo.data.forms import (
    ALWAYS_CONTENT,
    CONTENT,
    NAME_COLUMNS,
    PICTURES,
    SYSTEM_COLUMNS,
    Form,
    Rendering,
    rows_made,
)
from dschat_ppo.errors import UserError

FIRST_ROWS = 20
_ROLES = ("prompt", "response", "chosen", "rejected", "messages", "better")  # that flags name and forms have
_OF_REWARDS = {"response", "responses", "completion", "completions", "output", "label", "labels", "steps", *THOUGHTS}
_SENTENCE_ENDS = ".!?…。！？｡．;；,，、)）]】\"'”’»」』*"
_QUESTIONS = ("question", "query", "input", "instruction")  # columns of what a user says, not of text to continue


class Candidate(NamedTuple):
    """A form with its columns, and what it reads in the first rows: the examples of each row and use that it can read.
    `is_chat`: whether it finds chat messages. `fits`: whether it reads at least half of the rows."""

    form: Form
    read: list[dict[Use, list[Example]]]
    is_chat: bool
    fits: bool

    def first(self, use: Use) -> list[Example]:
        """The first example of each row for a use."""
        return [found[use][0] for found in self.read if found.get(use)]

    def repeats_prompt(self) -> bool:
        """Whether most answers repeat the text of a column with the prompt, so that the model would see it twice."""
        pairs = self.first("preference") if self.form.name == "preference" else []
        repeated = [
            pair for pair in pairs
            if isinstance(pair.prompt, str) and all(str(answer).startswith(pair.prompt) for answer in pair.answers)
        ]  # fmt: skip
        return 2 * len(repeated) > len(pairs)


def detect_form(
    name: str, columns: list[str], rows: list[Row], has_template: bool, flags: DataFlags, is_only: bool = True
) -> Form:
    """The form of a data set. It does not depend on the step. `UserError` if no form fits, a flag names no column, or
    the first rows have content that the form does not use.

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
    by_choice = {role: column for role, column in by_flag.items() if role in _ROLES}
    chosen = _chosen(name, columns, rows, flags, by_choice)
    kind, by_role = chosen.form.kind, chosen.form.columns
    rendering, about_prompts, warning = _rendering(name, chosen, has_template, flags)
    by_name = next((column for column in SYSTEM_COLUMNS if column in columns), None)
    is_named = flags.system_column is not None or kind.is_known_set
    system = by_flag.get("system", None if is_named else by_name)
    tools = "tools" if "tools" in columns and not kind.is_known_set else None
    truth, pattern = _truth(chosen.form, rows, flags, by_flag, is_only)
    applying: dict[str, Any] = {
        "input_template": None if kind.inside or chosen.is_chat else flags.input_template,
        "system_message": flags.system_message if rendering == "chat" else None,
    }
    used = {path.split(".")[0] for path in (*by_role.values(), system, tools, truth) if path}
    used |= {"margin"} if "rejected" in by_role else set()
    used |= set(SYSTEM_COLUMNS) if flags.system_column is not None else set()
    left = used | set(flags.ignore_columns) | (_OF_REWARDS if chosen.form.uses == ("prompt",) else set())
    left |= {"label", "labels"} if kind.name == "text" else set()  # classes of texts
    chosen_by_flag = flags.data_format != "auto" or (by_choice and kind.by_flag)  # other forms are found without flags
    settled = {
        name for role in by_choice for name in kind.roles[role].split()
    }  # other columns of a role that a flag named
    known = ALWAYS_CONTENT if chosen_by_flag else CONTENT - settled

    # What was understood of the data set, for the log
    parts = [f"form {kind.name} ({', '.join(f'{role}: {column}' for role, column in by_role.items())})", about_prompts]
    parts += [f"system messages from '{system}'"] if system else []
    parts += [f"tools from '{tools}'"] if tools else []
    unused = [column for column in columns if column not in used and not column.startswith("_")]
    if unused and not kind.is_known_set:
        parts.append(f"columns that training does not use: {_listed(unused)}")
    if truth:
        parts.append(f"the correct answer from '{truth}'" + (f" by '{pattern}'" if pattern else ""))
    parts += [f"--{name} does not apply" for name, value in applying.items() if getattr(flags, name) and value is None]
    if {"response", "chosen"} <= set(by_role):
        parts.append(f"SFT learns '{by_role['response']}', not '{by_role['chosen']}'")
    if not chosen.fits:
        warning = f"most of the first rows do not fit the form {kind.name}; --prompt_column, ... name other columns"
    form = replace(
        chosen.form, **applying, rendering=rendering, wrap=rendering == "chat" and not chosen.is_chat,
        system=system, tools=tools, truth=truth, truth_pattern=pattern, pictures=pictures,
        watched=() if kind.is_known_set else tuple(sorted(known - left)),
        about=f"{name}: has the columns {_listed(columns)}, read as form {kind.name}",
        description="; ".join(filter(None, [*parts, note])), warning=warning,
        uses_flags=bool(by_flag), ignored=ignored,
    )  # fmt: skip
    try:
        for row in rows:
            if rendering == "text":
                form.system_of(row)
            form.check_unused(row)
    except UserError as problem:
        raise UserError(f"{name}: {problem}") from None
    return form


def _own_form(name: str, rows: list[Row], has_template: bool, flags: DataFlags, is_only: bool) -> Form:
    """The form of the rows that `FILE.py:FUNCTION` makes of the first rows."""
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


def _listed(columns: list[str]) -> str:
    return ", ".join(map(repr, columns))


def _rows_inside(rows: list[Row]) -> str:
    """A hint for a file that is one object with all rows in one of its values; "" for other files."""
    values = rows[0].items() if len(rows) == 1 else ()
    lists = [name for name, value in values if isinstance(value, list) and {type(one) for one in value} == {dict}]
    return f"; the rows seem to be inside '{lists[0]}': write each on a line of a .jsonl file" if lists else ""


def _located(kind: Kind, columns: list[str], rows: list[Row], by_flag: dict[str, str]) -> dict[str, str]:
    """Role -> column of a form: the one that a flag names, or else the first of its names that exists."""
    found = {}
    for role, names in kind.roles.items():
        free = [path for path in names.split() if _exists(path, columns, rows) and path not in by_flag.values()]
        if role in by_flag or free:
            found[role] = by_flag.get(role) or free[0]
    asked = found.get("prompt", "") if kind.name == "implicit_preference" else ""
    if asked and not any(has_value(row, asked) and value_at(row, asked) != "" for row in rows):
        del found["prompt"]  # an empty column: the prompt is what both answers start with
    # of several choices of columns the one that flags name counts, or the first one; a column that only the others
    # have, or whose partner is missing, as chosen without rejected, has no role
    choices = sorted(kind.choices(), key=lambda choice: -len(choice[1] & set(by_flag)))
    taken = {use: roles for use, roles in reversed(choices) if roles <= set(found)}
    served, all_needed = (set().union(*sets) for sets in (taken.values(), [roles for _, roles in choices]))
    return {role: column for role, column in found.items() if role in served or role not in all_needed}


# The choice among forms


def _chosen(name: str, columns: list[str], rows: list[Row], flags: DataFlags, by_flag: dict[str, str]) -> Candidate:
    """The form of a data set: by a flag or its name, or else the first one of the table that reads the rows, messages
    first. `by_flag` are the columns of content that flags name. `UserError` if no form has the columns."""
    known = set_named(name) if flags.data_format == "auto" and not by_flag else None
    wanted = known or (flags.data_format if flags.data_format != "auto" else "")
    found, filled = [], {column for column in columns if any(row.get(column) is not None for row in rows)}
    for kind in [FORMS[wanted]] if wanted else KINDS.values():
        if not wanted and filled.difference(by_flag.values()) & set(kind.not_with.split()):
            continue
        located = _located(kind, columns, rows, by_flag)
        says_the_same = "prompt" in kind.roles and all(
            column in kind.roles.get(role, "").split() for role, column in by_flag.items()
        )
        if (
            kind.uses(located)
            and set(by_flag) <= set(located)
            and (wanted or kind.by_flag or says_the_same or not by_flag)
        ):
            one = _try(kind, located, rows, flags)
            # an answer that a flag names makes no lists of answers or steps of texts, so that prompts alone were read
            if one.fits or wanted or "response" not in by_flag or kind.name not in ("ranked", "stepwise"):
                found.append(one)
    if not found:
        names = ", ".join(names.replace(" ", "/") for names in FORMS[wanted].roles.values()) if wanted else ""
        what = f"do not fit the form {wanted} ({names})" if wanted else "fit no known form"
        hint = "; --data_format FORM reads it in another way than DeepSpeed-Chat" if known else ""
        raise UserError(
            f"{name}: has the columns {_listed(columns)}, which {what}; {NAME_COLUMNS}{hint}{_rows_inside(rows)}"
        )
    # its reader says what is wrong with each row; of equal ones not the one that looks for the prompt in the answers
    closest = max(reversed(found), key=lambda one: len(one.form.columns) - one.form.kind.inside)
    fits = [one for one in found if one.fits and not one.repeats_prompt()]
    fitting = [one for one in fits if one.form.kind.by_flag or not by_flag] or fits or [closest]
    talks = [one for one in fitting if one.form.kind.rendering == "chat"]
    return talks[0] if talks and not fitting[0].is_chat else fitting[0]


def _try(kind: Kind, columns: dict[str, str], rows: list[Row], flags: DataFlags) -> Candidate:
    """Read the first rows in one form."""
    form = Form(kind, columns, "chat" if kind.rendering in ("chat", "content") else "text", role_names=flags.roles)
    read: list[dict[Use, list[Example]]] = [{} for _ in rows]
    for found, row in zip(read, rows, strict=True):
        for use in form.uses:
            with suppress(UserError):
                found[use] = form.examples_of(row, use)
    prompts = [one.prompt for found in read for examples in found.values() for one in examples]
    is_chat = kind.rendering == "chat" or (kind.rendering == "as given" and any(isinstance(p, list) for p in prompts))
    telling = [use for use in form.uses if use != "prompt" or kind.alone]
    fits = any(2 * sum(use in found for found in read) >= len(rows) for use in telling)
    return Candidate(form, read, is_chat, fits)


# Text or chat


def _rendering(name: str, chosen: Candidate, has_template: bool, flags: DataFlags) -> tuple[Rendering, str, str]:
    """Whether the prompts of a data set are text or chat, in all three steps; words for the log; a warning or "".
    `UserError` if a flag does not fit the form, chat messages lack a template, or text prompts and answers are glued
    together while there is a chat template."""
    kind, wanted = chosen.form.kind, flags.apply_chat_template
    if wanted and kind.rendering == "text":
        way = "so --apply_chat_template True does not apply; --data_format chooses another form"
        raise UserError(f"{name}: the form {kind.name} is text, {way}")
    is_question = chosen.form.columns.get("prompt") in _QUESTIONS and flags.prompt_column is None
    asks = kind.rendering == "content" or (
        is_question and kind.name in ("preference", "better_of_two", "prompt_response")
    )
    if chosen.is_chat or wanted or (asks and wanted is None and flags.input_template is None and has_template):
        if not has_template:
            raise UserError(
                f"{name}: its prompts become chat messages, but the model's tokenizer has no chat template; "
                "--chat_template chatml (or llama-3, zephyr, human-assistant, a file) gives it one"
            )
        what = "chat messages, rendered by" if chosen.is_chat else "text and become user messages of"
        return "chat", f"prompts are {what} the chat template", ""
    if flags.system_message and kind.name != "text":  # plain text has no prompts; other data sets may have some
        way = "omit it, or make chat messages of both with --apply_chat_template True"
        raise UserError(f"{name}: --system_message precedes chat messages, but the prompts are text; {way}")
    if kind.inside or flags.input_template is not None or kind.name == "alpaca":
        return "text", "prompts are text, without the chat template", ""
    glued = _glued(chosen)
    if not glued or wanted is False:
        return "text", "prompts are text, used as they are, without the chat template", ""
    chat = "--apply_chat_template True makes user messages of the prompts, False keeps the text, and "
    problem = f"nothing separates prompt and answer: {glued}; "
    problem += f"{chat if has_template else ''}--input_template puts text around a prompt"
    if has_template and not asks and "steps" not in chosen.form.uses:
        raise UserError(f"{name}: {problem}")
    return "text", "prompts are text, used as they are", problem


def _glued(chosen: Candidate) -> str:
    """The end of a text prompt and the start of its answer, if in more than half of the first rows a word or sentence
    ends the prompt and a word starts the answer, without a space between them."""
    first = chosen.first("sft") or chosen.first("steps")
    glued = [
        f"...{one.prompt[-40:]}{one.answers[0][:40]}..." for one in first
        if one.answers and isinstance(one.prompt, str) and isinstance(one.answers[0], str)
        and (one.prompt[-1].isalnum() or one.prompt[-1] in _SENTENCE_ENDS) and one.answers[0][:1].isalnum()
    ]  # fmt: skip
    return repr(glued[0]) if 2 * len(glued) > len(first) else ""


# What else a row holds


def _truth(
    form: Form, rows: list[Row], flags: DataFlags, by_flag: dict[str, str], is_only: bool
) -> tuple[str | None, str | None]:
    """(column of the correct answer, pattern that finds it there)."""
    if "answer" in by_flag:
        return by_flag["answer"], flags.answer_pattern
    answer = form.columns.get("response") or form.columns.get("chosen") or ""
    texts = [
        text for row in rows if answer and has_value(row, answer) and isinstance(text := value_at(row, answer), str)
    ]
    if flags.answer_pattern is not None and "answer" not in flags.columns:
        if texts:
            return answer, flags.answer_pattern
        if is_only:
            raise UserError("--answer_pattern needs --answer_column, the column in which it finds the correct answer")
    has_mark = any("####" in text for text in texts)
    if form.name == "question_answer" and (answer == "answer" or has_mark):
        return answer, r"(?s).*####\s*(.*?)\s*$" if has_mark else None
    return form.columns.get("truth"), None
