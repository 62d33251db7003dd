"""The form of a data set, detected once from its columns and first rows: which form fits, and
whether its prompts are text or chat."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

from dschat_ppo.common.own_functions import file_named, own_function
from dschat_ppo.config.data_flags import DataFlags, Use
from dschat_ppo.config.schema import is_own_function
from dschat_ppo.data.advice import Advice, advice_for, as_known_set
from dschat_ppo.data.examples import (
    THOUGHTS,
    VARIABLES_COLUMN,
    Example,
    Row,
    has_value,
    value_at,
)
from dschat_ppo.data.form_kinds import FORMS, KINDS, SETS, Kind, set_named
from dschat_ppo.data.forms import ALWAYS_CONTENT, CONTENT, SYSTEM_COLUMNS, Form, rows_made
from dschat_ppo.data.verdicts import MEANINGS, TURNING, VERDICT_ROLES, Scale, scale_of
from dschat_ppo.errors import UserError

FIRST_ROWS = 20
# Roles that flags name and forms have
_ROLES = ("prompt", "response", "chosen", "rejected", "messages", "label", *VERDICT_ROLES)
_OF_REWARDS = {
    "response",
    "responses",
    "completion",
    "completions",
    "output",
    "label",
    "labels",
    "steps",
    *THOUGHTS,
}
_SENTENCE_ENDS = ".!?…。！？｡．;；,，、)）]】\"'”’»」』*"
# columns of what a user says, not of text to continue
_QUESTIONS = "question", "query", "input", "instruction"


class Candidate(NamedTuple):
    """A form with its columns, and what it reads in the first rows: for each use the examples of
    each row that it can read. `is_chat`: whether it finds chat messages. `fits`: whether it reads
    at least half of the rows."""

    form: Form
    read: dict[Use, list[list[Example]]]
    is_chat: bool
    fits: bool


def detect_form(
    name: str,
    columns: list[str],
    rows: list[Row],
    has_template: bool,
    flags: DataFlags,
    is_only: bool = True,
) -> Form:
    """The form of a data set with these columns and first rows. It does not depend on the step.
    `UserError` if no form fits, the first rows have content that the form does not use, or a flag
    names no column and `is_only`: there is no other data set, to which the flag may apply."""
    rows = rows[:FIRST_ROWS]
    if is_own_function(flags.data_format):
        return _own_form(name, rows, has_template, flags, is_only)

    # Columns and form
    names = tuple(columns)
    columns = [column for column in columns if column not in flags.ignore_columns]
    rows = [{column: value for column, value in row.items() if column in columns} for row in rows]
    by_flag = {
        role: column
        for role, column in flags.columns.items()
        if column and _exists(column, columns, rows)
    }
    missing = [
        f"{flags.name_of(role)} {column}"
        for role, column in flags.columns.items()
        if column and role not in by_flag
    ]
    if missing and is_only:
        raise UserError(
            f"{', '.join(missing)}: {name} has no such column; it has {_listed(columns)}"
        )
    of_content = {role: column for role, column in by_flag.items() if role in _ROLES}
    if set(VERDICT_ROLES) & set(of_content):  # then the flags name two answers in any order
        other_names = {"chosen": "first", "rejected": "second"}
        of_content = {other_names.get(role, role): path for role, path in of_content.items()}
    advice = advice_for(columns, rows)
    chosen = _chosen(name, columns, rows, flags, of_content, advice)
    kind = chosen.form.kind
    rendering, about_prompts, warning = _rendering(name, chosen, has_template, flags, advice)
    row_way = ""
    if not chosen.fits:
        if advice.sets and not of_content:
            raise UserError(
                f"{name}: has the columns {_listed(columns)}, which do not fit the form"
                f" {kind.name}; {as_known_set(advice.sets)}"
            )
        way = "--prompt_column, ... name other columns"
        warning = f"most of the first rows do not fit the form {kind.name}; {way}"
        if kind.name == "ranked" and advice.pairs:  # answers without scores
            row_way = advice.pairs

    # Columns besides prompt and answers
    by_name = () if flags.system_column is not None or kind.is_known_set else SYSTEM_COLUMNS
    system = by_flag.get("system") or next((name for name in by_name if name in columns), None)
    truth, pattern = _truth(chosen.form, rows, flags, by_flag)
    has_variables = rendering == "chat" and VARIABLES_COLUMN in columns
    variables = VARIABLES_COLUMN if has_variables else None
    form = replace(
        chosen.form,
        rendering=rendering,
        input_template=None if kind.inside or chosen.is_chat else flags.input_template,
        system=system,
        tools="tools" if "tools" in columns and not kind.is_known_set else None,
        variables=variables,
        truth=truth,
        truth_pattern=pattern,
        system_message=flags.system_message if rendering == "chat" else None,
        names=names,
        advice=advice,
        row_way=row_way,
        warning=warning,
        about=f"{name}: has the columns {_listed(columns)}, read as form {kind.name}",
    )
    watched = _watched(form, columns, flags, of_content)
    description = [about_prompts, *_about_columns(form, columns, flags)]
    description += [f"{', '.join(missing)}: it has no such column"] if missing else []
    roles = ", ".join(f"{role}: {column}" for role, column in form.columns.items())
    form = replace(
        form,
        watched=tuple(sorted(watched)),
        description="; ".join([f"form {kind.name} ({roles})", *description]),
    )
    try:
        for row in rows:
            form.check_unused(row)
    except UserError as problem:
        raise UserError(f"{name}: {problem}") from None
    return form


def _used(form: Form) -> set[str]:
    """The columns of the data set that a form reads."""
    paths = (*form.columns.values(), form.system, form.tools, form.variables, form.truth)
    used = {path.split(".")[0] for path in paths if path}
    return used | {"margin"} if "rejected" in form.columns else used


def _watched(
    form: Form, columns: list[str], flags: DataFlags, of_content: dict[str, str]
) -> set[str]:
    """Columns whose content would be lost: all that some form reads, or fewer of them if flags
    choose how to read the rows, beside prompts alone, and beside texts, which may have classes."""
    kind = form.kind
    only_prompts = form.uses == ("prompt",)
    of_texts = set(of_content) - {"label", *VERDICT_ROLES}
    chosen_by_columns = of_texts and kind.by_flag and not only_prompts
    watched = CONTENT
    if kind.is_known_set:
        watched = set()
    elif flags.data_format != "auto" or chosen_by_columns:
        watched = ALWAYS_CONTENT
    watched = watched - {other for role in of_content for other in kind.roles[role].split()}
    if {"chosen", "rejected"} <= set(of_content):  # which a verdict may turn around
        watched = watched | TURNING.intersection(columns)
    watched -= _used(form) | set(flags.ignore_columns)
    if flags.system_column is not None:
        watched -= set(SYSTEM_COLUMNS)
    if only_prompts:
        watched -= _OF_REWARDS
    elif kind.name == "text":
        watched -= {"label", "labels"}
    if form.rendering == "text":  # which has no place for them
        watched |= {column for column in (form.system, form.tools) if column}
    return watched


def _about_columns(form: Form, columns: list[str], flags: DataFlags) -> list[str]:
    """What was understood of the other columns, for the log."""
    parts = []
    if form.system:
        parts.append(f"system messages from '{form.system}'")
    if form.tools:
        parts.append(f"tools from '{form.tools}'")
    if form.variables:
        parts.append(f"variables of the chat template from '{form.variables}'")
    used = _used(form)
    unused = [column for column in columns if column not in used and not column.startswith("_")]
    if unused and not form.kind.is_known_set:
        parts.append(f"other columns: {_listed(unused)}")
    if form.truth:
        by_pattern = f" by '{form.truth_pattern}'" if form.truth_pattern else ""
        parts.append(f"the correct answer from '{form.truth}'{by_pattern}")
    for flag in ("input_template", "system_message"):
        if getattr(flags, flag) and getattr(form, flag) is None:
            parts.append(f"--{flag} does not apply")
    if {"response", "chosen"} <= set(form.columns):
        parts.append(f"SFT learns '{form.columns['response']}', not '{form.columns['chosen']}'")
    others = [name for name in form.advice.sets if not set(SETS[name].columns.split()) <= used]
    if others and not form.kind.is_known_set:
        parts.append(as_known_set(tuple(others)))
    if form.scale != "words":
        parts.append(f"'{form.columns['better']}' is {MEANINGS[form.scale]}")
    return parts


def _own_form(
    name: str, rows: list[Row], has_template: bool, flags: DataFlags, is_only: bool
) -> Form:
    """The form of the rows that `FILE.py:FUNCTION` makes of the first rows."""
    function = flags.data_format
    own_function("--data_format", function)  # a missing file is no bad row
    made = list[Row]()
    for number, row in enumerate(rows, start=1):
        try:
            made += rows_made(function, row)
        except UserError as problem:
            raise UserError(f"{name}, row {number}: {problem}") from None
    if not made:
        raise UserError(
            f"--data_format {function}: makes no row of the first {len(rows)}, by which the form is"
            " found"
        )
    columns = list(dict.fromkeys(column for row in made for column in row))
    flags = replace(flags, data_format="auto")
    form = detect_form(f"{name} through {function}", columns, made, has_template, flags, is_only)
    sha = hashlib.sha256(Path(file_named(function)).read_bytes()).hexdigest()
    return replace(
        form, function=function, file_sha=sha, description=f"{function} makes {form.description}"
    )


def _exists(path: str, columns: list[str], rows: list[Row]) -> bool:
    """Whether rows have a column, or a field inside one."""
    return path in columns or (
        path.split(".")[0] in columns and any(has_value(row, path) for row in rows)
    )


def _listed(columns: list[str]) -> str:
    return ", ".join(map(repr, columns))


def _located(
    kind: Kind, columns: list[str], rows: list[Row], by_flag: dict[str, str]
) -> dict[str, str]:
    """Role -> column of a form: the one that a flag names, or else the first of its names that
    exists."""
    found = dict[str, str]()
    for role, names in kind.roles.items():
        free = [
            path
            for path in names.split()
            if _exists(path, columns, rows) and path not in {*by_flag.values(), *found.values()}
        ]
        if role in by_flag or free:
            found[role] = by_flag.get(role) or free[0]
    # of several choices of columns the one that flags name counts, or the first one; a column that
    # only the others have, or whose partner is missing, as chosen without rejected, has no role
    choices = sorted(kind.choices(), key=lambda choice: -len(choice[1] & set(by_flag)))
    taken = {use: roles for use, roles in reversed(choices) if roles <= set(found)}
    served, all_needed = (
        set().union(*sets) for sets in (taken.values(), [roles for _, roles in choices])
    )
    return {
        role: column for role, column in found.items() if role in served or role not in all_needed
    }


def _chosen(
    name: str,
    columns: list[str],
    rows: list[Row],
    flags: DataFlags,
    by_flag: dict[str, str],
    advice: Advice,
) -> Candidate:
    """The form of a data set: by a flag or its name, or else the first one of the table that reads
    the rows. `by_flag` are the columns of content that flags name: a form of text or messages may
    have them in any place, another one if its prompt has the name that the form gives it.
    `UserError` if no form has the columns."""
    known = set_named(name) if flags.data_format == "auto" and not by_flag else None
    wanted = known or (flags.data_format if flags.data_format != "auto" else "")
    found = list[Candidate]()
    for kind in [FORMS[wanted]] if wanted else KINDS.values():
        located = _located(kind, columns, rows, by_flag)
        is_open = (
            wanted
            or not by_flag
            or kind.by_flag
            or located.get("prompt") in kind.roles.get("prompt", "").split()
        )
        if not (is_open and kind.uses(located) and set(by_flag) <= set(located)):
            continue
        form = Form(
            kind,
            located,
            "chat" if kind.rendering in ("chat", "content") else "text",
            role_names=flags.roles,
            scale=_scale(name, located, rows, by_flag),
        )
        read: dict[Use, list[list[Example]]] = {use: [] for use in form.uses}
        for use, row in product(read, rows):
            with suppress(UserError):
                read[use].append(form.examples_of(row, use))
        prompts = [
            one.prompt for of_rows in read.values() for examples in of_rows for one in examples
        ]
        has_messages = kind.rendering == "as given" and any(
            isinstance(prompt, list) for prompt in prompts
        )
        fits = any(
            2 * len(each) >= len(rows)
            for use, each in read.items()
            if use != "prompt" or kind.alone
        )
        one = Candidate(form, read, kind.rendering == "chat" or has_messages, fits)
        if fits and (kind.by_flag or not by_flag):
            return one
        found.append(one)
    if not found:
        names = (
            ", ".join(names.replace(" ", "/") for names in FORMS[wanted].roles.values())
            if wanted
            else ""
        )
        what = f"do not fit the form {wanted} ({names})" if wanted else "fit no known form"
        hint = "; --data_format FORM reads it in another way than DeepSpeed-Chat" if known else ""
        raise UserError(
            f"{name}: has the columns {_listed(columns)}, which {what}; {advice.for_any}{hint}"
        )
    # whose reader says what is wrong with each row
    closest = max(
        reversed(found), key=lambda one: (len(one.form.columns), one.form.kind.rendering == "chat")
    )
    return next((one for one in found if one.fits), closest)


def _scale(name: str, located: dict[str, str], rows: list[Row], by_flag: dict[str, str]) -> Scale:
    """What the numbers of a verdict on two answers mean, if these columns have one."""
    if not {"first", "second", "better"} <= set(located):
        return "words"
    column = located["better"]
    values = [value_at(row, column) for row in rows if has_value(row, column)]
    try:
        answers = located["first"], located["second"]
        return scale_of(values, column, answers, is_named="better" in by_flag)
    except UserError as problem:
        raise UserError(f"{name}: {problem}") from None


# Text or chat


def _rendering(
    name: str, chosen: Candidate, has_template: bool, flags: DataFlags, advice: Advice
) -> tuple[Literal["chat", "text"], str, str]:
    """Whether the prompts of a data set are text or chat, in all three steps; words for the log; a
    warning or "". `UserError` if a flag does not fit the form, or chat messages lack a
    template."""
    kind, wanted = chosen.form.kind, flags.apply_chat_template
    if wanted and kind.rendering == "text":
        raise UserError(
            f"{name}: the form {kind.name} is text, so --apply_chat_template True does not apply"
        )
    asks = kind.rendering == "content" or (
        kind.name in ("preference", "better_of_two", "prompt_response", "ranked", "kto")
        and chosen.form.columns.get("prompt") in _QUESTIONS
        and flags.prompt_column is None
    )
    if (
        chosen.is_chat
        or wanted
        or (asks and wanted is None and flags.input_template is None and has_template)
    ):
        if not has_template:
            raise UserError(
                f"{name}: its prompts become chat messages, but the model's tokenizer has no chat"
                " template; --chat_template chatml (or llama-3, zephyr, human-assistant, a file)"
                " gives it one"
            )
        what = (
            "chat messages, rendered by" if chosen.is_chat else "text and become user messages of"
        )
        return "chat", f"prompts are {what} the chat template", ""
    # plain text has no prompts; other data sets may have some
    if flags.system_message and kind.name != "text":
        way = "omit it, or make chat messages of both with --apply_chat_template True"
        raise UserError(
            f"{name}: --system_message precedes chat messages, but the prompts are text; {way}"
        )
    about = "prompts are text, without the chat template"
    glued = _glued(chosen)
    if kind.inside or flags.input_template is not None or wanted is False or not glued:
        return "text", about, ""
    ways = "--input_template puts text around a prompt"
    if has_template:
        ways = f"--apply_chat_template True makes user messages of the prompts, {ways}"
    if advice.spaced_sets:
        ways += f"; {as_known_set(advice.spaced_sets)}"
    warning = f"nothing separates prompt and answer: {glued}; the text is used as it is; {ways}"
    return "text", about, warning


def _glued(chosen: Candidate) -> str:
    """The end of a text prompt and the start of its answer, if in more than half of the first rows
    a word or sentence ends the prompt and a word starts the answer, without a space between
    them."""
    read = chosen.read.get("sft") or chosen.read.get("steps") or []
    texts = [(one[0].prompt, one[0].answers[0]) for one in read if one and one[0].answers]
    glued = [
        f"...{prompt[-40:]}{answer[:40]}..."
        for prompt, answer in texts
        if isinstance(prompt, str)
        and isinstance(answer, str)
        and answer[:1].isalnum()
        and (prompt[-1:].isalnum() or prompt[-1:] in _SENTENCE_ENDS)
    ]
    return repr(glued[0]) if 2 * len(glued) > len(texts) else ""


def _truth(
    form: Form, rows: list[Row], flags: DataFlags, by_flag: dict[str, str]
) -> tuple[str | None, str | None]:
    """(column of the correct answer, pattern that finds it there)."""
    if "answer" in by_flag:
        return by_flag["answer"], flags.answer_pattern
    if form.name != "question_answer":
        return form.columns.get("truth"), None
    answer = form.columns["response"]
    # as in GSM8K
    has_mark = any("####" in str(value_at(row, answer)) for row in rows if has_value(row, answer))
    return (
        answer if has_mark or answer == "answer" else None,
        r"(?s).*####\s*(.*?)\s*$" if has_mark else None,
    )
