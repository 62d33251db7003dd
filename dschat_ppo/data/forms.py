"""Forms of data sets: which columns a row has, and how it becomes examples.

A data set has one form and one rendering in all three steps. `detect_form` finds them from columns and first rows. When
rows can be read in two ways, it stops and shows both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dschat_ppo.common.own_functions import cause_of, file_named, own_function
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.own_names import is_own_function
from dschat_ppo.data.deepspeed_chat_sets import SETS
from dschat_ppo.data.examples import Example, Row, Use, has_value, value_at
from dschat_ppo.data.form_choice import (
    Candidate,
    Rendered,
    chosen_form,
    exists,
    listed,
    rendering_of,
    rows_inside,
    two_ways,
)
from dschat_ppo.data.form_kinds import KINDS, NAMED_BY, NEEDED, kind_named
from dschat_ppo.data.form_labels import group_by_prompt
from dschat_ppo.data.form_rows import PICTURES, Reading, Rendering, is_label, left_out, read_row
from dschat_ppo.data.messages import THOUGHTS, WEIGHTS, alternates
from dschat_ppo.errors import UserError

FIRST_ROWS = 20
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")  # used unless --system_column says otherwise
_FLAG = "--data_format"
_CONTENT = ("prompt", "response", "chosen", "rejected", "messages", "better")  # roles that flags name and forms have
# Columns that no flag can name, and that say what the model sees or what is trained, wherever they are.
_ALWAYS_CONTENT = {*PICTURES, *WEIGHTS, *THOUGHTS, "history", "functions", "rejected_messages"}
_NO_TEXT = ("source", "truth", "task", "scores", "ranks", "better")  # roles
# Columns that may hold the prompt or the answers of a row in some form. What only rewards use is not among them, nor
# are names that mostly stand for who asked, and which model answered.
_MAY_BE_CONTENT = {
    name for kind in KINDS for role in kind.roles for name in kind.names(role)
    if "." not in name and role not in _NO_TEXT
} - {"answer", "answers", "user", "model", "bot"} | {"context", "tools", *SYSTEM_COLUMNS}  # fmt: skip
_OF_REWARDS = {"response", "responses", "completion", "completions", "output", "label", "labels", "steps", *THOUGHTS}


@dataclass(frozen=True)
class Form:
    """How the rows of one data set are read.

    Attributes:
        rendering: "chat" if the chat template renders prompts, "text" if they are used as they are.
        read: `(row, use, where)` -> the examples of one row, none or more; raises `UserError` for a bad row, and for a
            use that the form does not serve. It can be pickled.
        description: what was understood, one line for the log.
        uses: what the form serves: some of the values of `Use`.
        about: the data set, its columns and the form, for messages.
        identity: text that differs between forms that read rows differently, for keys of caches.
        uses_flags: whether the column flags name columns of this data set.
        ignored: those of its columns that `--ignore_columns` names.
        regroup: None, or a function of the whole `datasets.Dataset` that must run before its rows are split or read.
        warning: what may be wrong with this reading, one line for the log; "" if nothing is.
    """

    name: str
    rendering: Rendering
    read: Callable[[Row, Use, str], list[Example]]
    description: str
    uses: tuple[Use, ...]
    about: str
    identity: str
    uses_flags: bool
    ignored: tuple[str, ...] = ()
    regroup: Callable[[Any], Any] | None = None
    warning: str = ""

    def require(self, use: Use) -> None:
        """Refuse a use that the form does not serve. The message lists the columns and what the step needs."""
        _require(self.uses, self.about, use)


def detect_form(
    name: str, columns: list[str], rows: list[Row], has_template: bool, flags: DataFlags, is_only: bool = True
) -> Form:
    """The form of a data set. It does not depend on the step.

    `UserError` if no form fits, a flag names no column, or the rows can be read in two ways; the message then shows
    both and how to choose.

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
    columns = [column for column in columns if column not in ignored]
    rows = [{column: value for column, value in row.items() if column in columns} for row in rows]
    by_flag, note = _columns_by_flag(name, columns, rows, flags, is_only)
    content = {role: column for role, column in by_flag.items() if role in _CONTENT}
    chosen, others = chosen_form(name, columns, rows, flags, content)
    kind, uses = chosen.kind, chosen.kind.uses(chosen.columns)
    rendered = rendering_of(name, chosen, has_template, flags)
    truth = _truth(chosen, rows, flags, by_flag, is_only)
    reading = _reading(columns, rows, flags, chosen, others, by_flag, rendered, truth)
    _check_system(name, reading, rows, flags, by_flag)
    for number, row in enumerate(rows):
        if missed := left_out(kind.read, reading, uses, row):
            other = next((one for one in others if missed[0] in one.columns.values()), None)
            raise UserError(two_ways(name, number, chosen, other) if other else f"{name}: its column {missed[1]}")
    about = f"{name}: has the columns {listed(columns)}, read as form {kind.name}"
    warning = rendered.warning
    if chosen.columns.get("response") == "text" and "response" not in content:
        hint = "'text' is read as the answer to 'prompt'; --ignore_columns text leaves it out"
        warning = "; ".join(filter(None, [hint, warning]))
    return Form(
        kind.name, rendered.rendering, partial(_read, reading, uses, about),
        _description(columns, rows, flags, chosen, others, reading, rendered.about, note), uses, about, repr(reading),
        bool(by_flag), ignored, _regrouping(name, columns, reading), warning,
    )  # fmt: skip


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
    if any(forms[spec].name in SETS for spec in text):  # the flag does not apply to them
        return note
    return f"{note}; --apply_chat_template True makes chat messages of them all"


def _read(reading: Reading, uses: tuple[Use, ...], about: str, row: Row, use: Use, where: str) -> list[Example]:
    _require(uses, about, use)
    try:
        return read_row(kind_named(reading.form).read, reading, uses, row, use)
    except UserError as problem:
        raise UserError(f"{where}: {problem}") from None


def _require(uses: tuple[Use, ...], about: str, use: Use) -> None:
    if use not in uses:
        flags = f"; name its columns with {NAMED_BY[use]}" if use in NAMED_BY else ""
        raise UserError(f"{about}; this step needs {NEEDED[use]}{flags}")


def _columns_by_flag(
    name: str, columns: list[str], rows: list[Row], flags: DataFlags, is_only: bool
) -> tuple[dict[str, str], str]:
    """(role -> column that a flag names, a note for the log). One of several data sets may lack all of them."""
    wanted = {role: column for role, column in flags.columns.items() if column}
    missing = {role: column for role, column in wanted.items() if not exists(column, columns, rows)}
    if not missing:
        return wanted, ""
    named = ", ".join(f"--{role}_column {column}" for role, column in missing.items())
    if len(missing) == len(wanted) and not is_only:
        return {}, f"has none of the columns that flags name ({', '.join(missing.values())}), so they do not apply"
    raise UserError(f"{named}: {name} has no such column; it has {listed(columns)}{rows_inside(rows)}")


def _truth(
    chosen: Candidate, rows: list[Row], flags: DataFlags, by_flag: dict[str, str], is_only: bool
) -> tuple[str | None, str | None]:
    """(column of the correct answer, pattern that finds it there)."""

    def texts(column: str) -> list[Any]:
        return [value_at(row, column) for row in rows if has_value(row, column)]

    if "answer" in by_flag:
        return by_flag["answer"], flags.answer_pattern
    if flags.answer_pattern is not None and "answer" not in flags.columns:
        column = chosen.columns.get("response") or chosen.columns.get("chosen")
        if column is not None and any(isinstance(value, str) for value in texts(column)):
            return column, flags.answer_pattern
        if is_only:
            raise UserError("--answer_pattern needs --answer_column, the column in which it finds the correct answer")
    if chosen.kind.name == "verl":
        return chosen.columns["truth"], None
    if chosen.kind.name == "question_answer":
        column = chosen.columns["response"]
        has_mark = any("####" in str(value) for value in texts(column))
        if column == "answer" or has_mark:
            return column, r"(?s).*####\s*(.*?)\s*$" if has_mark else None
    return None, None


def _reading(
    columns: list[str], rows: list[Row], flags: DataFlags, chosen: Candidate, others: list[Candidate],
    by_flag: dict[str, str], rendered: Rendered, truth: tuple[str | None, str | None],
) -> Reading:  # fmt: skip
    """How rows are read in the chosen form."""
    kind, is_named = chosen.kind, chosen.kind.name in SETS
    by_name = next((column for column in SYSTEM_COLUMNS if column in columns), None)
    system = by_flag.get("system", by_name if flags.system_column is None else None)
    tools = "tools" if "tools" in columns and not any(_is_prose(row.get("tools")) for row in rows) else None
    reading = Reading(
        kind.name, chosen.columns, rendered.rendering, rendered.wrap,
        flags.input_template if not kind.inside and not chosen.is_chat else None,
        None if is_named else system, None if is_named else tools, *truth,
        flags.system_message if rendered.rendering == "chat" else None, flags.roles,
        tuple(column for column in PICTURES if column in flags.ignore_columns),
    )  # fmt: skip
    if is_named:
        return reading
    # if flags choose the reading, what others would read is left out knowingly
    by_choice = set(by_flag) & set(_CONTENT) or flags.data_format != "auto"
    known = _ALWAYS_CONTENT if by_choice else _ALWAYS_CONTENT | _MAY_BE_CONTENT
    known = known - (_OF_REWARDS if set(chosen.examples) == {"prompt"} else set())
    for name in ("label", "labels"):
        if kind.name == "text" or not all(is_label(row[name]) for row in rows if row.get(name) is not None):
            known = known - {name}  # a class, which calls no answer good
    known = known | {column for one in others for role, column in one.columns.items() if role not in _NO_TEXT}
    known |= {name for role in chosen.columns if role not in by_flag for name in kind.roles.get(role, "").split()}
    used = _used(columns, reading, flags)
    return replace(reading, watched=tuple(sorted(known - used - set(flags.ignore_columns))))


def _used(columns: list[str], reading: Reading, flags: DataFlags) -> set[str]:
    """The columns that a reading uses, with those of which flags or the log say that they are left out."""
    paths = [*reading.columns.values(), reading.system, reading.truth]
    used = {path.split(".")[0] for path in paths if path} | {"tools"} & set(columns)
    used |= {"margin"} if "rejected" in reading.columns else set()
    return used | (set(SYSTEM_COLUMNS) if flags.system_column is not None else set())


def _is_prose(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and not value.lstrip().startswith(("[", "{"))


def _check_system(name: str, reading: Reading, rows: list[Row], flags: DataFlags, by_flag: dict[str, str]) -> None:
    """Refuse system messages where prompts are text, which has no place for them."""
    is_named = reading.form in SETS
    if is_named and by_flag.get("system"):
        raise UserError(f"{name}: has the text prompts of DeepSpeed-Chat, so --system_column does not apply")
    if reading.rendering == "chat":
        return
    can_be_chat = not is_named and reading.form != "text"
    if flags.system_message and reading.form != "text":  # plain text has no prompts; other data sets may have some
        way = "--apply_chat_template True makes chat messages of them" if can_be_chat else "omit it"
        raise UserError(f"{name}: --system_message precedes chat messages, but the prompts are text; {way}")
    if any(has_value(row, reading.system) and value_at(row, reading.system) for row in rows if reading.system):
        way = "choose: --apply_chat_template True makes chat messages of both, " if can_be_chat else ""
        raise UserError(
            f"{name}: the column '{reading.system}' holds system messages, but the prompts are text, which has no "
            f"place for them; {way}--system_column '' ignores the column"
        )


def _description(
    columns: list[str],
    rows: list[Row],
    flags: DataFlags,
    chosen: Candidate,
    others: list[Candidate],
    reading: Reading,
    about: str,
    note: str,
) -> str:
    """What was understood of a data set, for the log."""
    used = _used(columns, reading, flags)
    unused = [column for column in columns if column not in used and not column.startswith("_")]
    texts = chosen.columns.get("messages")
    parts = [
        f"form {reading.form} ({', '.join(f'{role}: {column}' for role, column in reading.columns.items())})",
        about,
    ]
    parts += [f"as {one.kind.name} the rows would say the same" for one in others]
    parts += [f"system messages from '{reading.system}'"] if reading.system else []
    parts += [f"tools from '{reading.tools}'"] if reading.tools else []
    if unused and reading.form not in SETS:
        parts.append(f"columns that training does not use: {listed(unused)}")
    if texts and any(alternates(value_at(row, texts)) for row in rows[:1]):
        parts.append("the texts of a row are turns of user and assistant in turn")
    if any(_is_prose(row.get("tools")) for row in rows):
        parts.append("the column 'tools' is not used, since it is not JSON")
    if reading.truth:
        pattern = f" by '{reading.truth_pattern}'" if reading.truth_pattern else ""
        parts.append(f"the correct answer from '{reading.truth}'{pattern}")
    if flags.input_template is not None and reading.input_template is None:
        parts.append("--input_template does not apply")
    if flags.system_message and reading.system_message is None:
        parts.append("--system_message does not apply")
    if {"response", "chosen"} <= set(chosen.columns):
        parts.append(f"SFT learns '{chosen.columns['response']}', not '{chosen.columns['chosen']}'")
    return "; ".join([*parts, *([note] if note else [])])


def _regrouping(name: str, columns: list[str], reading: Reading) -> Callable[[Any], Any] | None:
    """What joins the rows of a prompt, for KTO; None for other forms."""
    roles = reading.columns
    if reading.form != "kto" or "messages" in roles:
        return None
    context = tuple(column for column in (reading.system, reading.tools) if column)
    nested = [column for column in (*roles.values(), *context) if column not in columns]
    if nested:
        raise UserError(f"{name}: rows are grouped by prompt, so '{nested[0]}' must be a column, not inside one")
    return partial(group_by_prompt, prompt=roles["prompt"], label=roles["label"], answer=roles["response"],
                   context=context)  # fmt: skip


# A form of one's own: a function that makes rows of a known form of each row


def _own_form(name: str, rows: list[Row], has_template: bool, flags: DataFlags, is_only: bool) -> Form:
    """The form of the rows that `FILE.py:FUNCTION` makes of the first rows. `UserError` for a form that groups rows
    before they are read, which is before they are made."""
    function = flags.data_format
    own_function(_FLAG, function)  # a missing file is no bad row
    made, problem = list[Row](), f"it returns None for each of the first {len(rows)} rows, by which the form is found"
    for number, row in enumerate(rows):
        try:
            made += _made_by(function, row, f"{name}, row {number}")
        except UserError as raised:
            problem = str(raised)
    if not made:
        raise UserError(f"{_FLAG} {function}: makes no row: {problem}")
    columns = list(dict.fromkeys(column for row in made for column in row))
    known = replace(flags, data_format="auto")
    form = detect_form(f"{name} through {function}", columns, made, has_template, known, is_only)
    if form.regroup is not None:
        raise UserError(
            f"{_FLAG} {function}: makes rows of the form {form.name}, which are grouped by prompt before they are read;"
            " make pairs, or messages with a label"
        )
    sha = hashlib.sha256(Path(file_named(function)).read_bytes()).hexdigest()
    return replace(
        form, read=partial(_read_made, function, form.read), description=f"{function} makes {form.description}",
        identity=f"{function} {sha} {form.identity}",
    )  # fmt: skip


def _read_made(
    function: str, read: Callable[[Row, Use, str], list[Example]], row: Row, use: Use, where: str
) -> list[Example]:
    return [example for made in _made_by(function, row, where) for example in read(made, use, where)]


def _made_by(function: str, row: Row, where: str) -> list[Row]:
    try:
        made = own_function(_FLAG, function)(deepcopy(row))  # rewards get the row as it is
    except Exception as problem:  # noqa: BLE001  the function may raise anything; this row is then bad
        raise UserError(f"{where}: {function} raised {cause_of(problem, file_named(function))}") from None
    rows = [] if made is None else made if isinstance(made, list) else [made]
    if not all(isinstance(one, dict) for one in rows):
        raise UserError(f"{where}: {function} must return a dict, a list of dicts or None, not {type(made).__name__}")
    return rows
