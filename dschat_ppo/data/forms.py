"""Forms of data sets: which columns a row has, and how it becomes examples.

A data set has one form and one rendering in all three steps. `detect_form` finds them from columns and first rows. When
rows can be read in two ways, it stops and shows both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.deepspeed_chat_sets import SETS, set_named
from dschat_ppo.data.examples import Example, Row, Use, has_value, value_at
from dschat_ppo.data.form_answer_lists import LABELS, group_by_prompt
from dschat_ppo.data.form_choice import Candidate, choose, shown, try_kind
from dschat_ppo.data.form_kinds import KINDS, NAMED_BY, NEEDED, Kind, kind_named
from dschat_ppo.data.form_rendering import rendering_of
from dschat_ppo.data.form_rows import PICTURES, Reading, Rendering, has_content, leave_out, read_row
from dschat_ppo.data.messages import alternates, from_json, looks_like_messages
from dschat_ppo.errors import UserError

FIRST_ROWS = 20
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")  # used unless --system_column says otherwise
_CONTENT = ("prompt", "response", "chosen", "rejected", "messages", "better")
_PLACEHOLDERS = ("<image>\n", "<image>", "<video>\n", "<video>", "<audio>\n", "<audio>")
# Columns that no flag can name, and that say what the model sees or what is trained, wherever they are.
_ALWAYS_CONTENT = (*PICTURES, "history", "weight", "weights", "loss_mask", "mask", "functions", "rejected_messages")
# Those among them whose values may stand in the texts by chance: a weight of 0 in "10".
_NO_COPIES = (*PICTURES, "weight", "weights", "loss_mask", "mask", "functions")
# Columns that may hold the prompt or the answers of a row in some form. What only rewards use is not among them, nor
# are names that mostly stand for who asked, and which model answered.
_MAY_BE_CONTENT = {
    name for kind in KINDS for role, names in kind.roles.items() for name in names
    if "." not in name and role not in ("source", "truth", "task", "scores", "ranks", "better")
} - {"answer", "answers", "user", "model", "bot"} | {"context", "tools", *SYSTEM_COLUMNS}  # fmt: skip
_OF_REWARDS = (
    "response",
    "responses",
    "completion",
    "output",
    "label",
    "labels",
    "steps",
    "completions",
)


@dataclass(frozen=True)
class Form:
    """How the rows of one data set are read.

    Attributes:
        name: as `--data_format` names it, or the name of a DeepSpeed-Chat data set.
        rendering: "chat" if the chat template renders prompts, "text" if they are used as they are.
        read: `(row, use, where)` -> the examples of one row, none or more; raises `UserError` for a bad row, and for a
            use that the form does not serve. It can be pickled.
        description: what was understood, one line for the log.
        uses: what the form serves: some of the values of `Use`.
        about: the data set, its columns and the form, for messages.
        identity: text that differs between forms that read rows differently, for keys of caches.
        uses_flags: whether the column flags name columns of this data set.
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
    regroup: Callable[[Any], Any] | None = None
    warning: str = ""

    def require(self, use: Use) -> None:
        """Refuse a use that the form does not serve.

        Raises:
            UserError: the message lists the columns and what the step needs.
        """
        _require(self.uses, self.about, use)


def detect_form(name: str, columns: list[str], rows: list[Row], has_template: bool, flags: DataFlags) -> Form:
    """The form of a data set. It does not depend on the step.

    Args:
        name: location of the data set, for messages and for the data sets of DeepSpeed-Chat.
        columns: names of all columns.
        rows: the first rows of the whole data set; `FIRST_ROWS` of them are read.
        has_template: whether the tokenizer has a chat template.
        flags: `--data_format`, column names and the other flags that say how rows are read.

    Raises:
        UserError: no form fits, a flag names a column that does not exist, or the rows can be read in two ways; the
            message then shows both and how to choose.
    """
    columns, rows = _without_ignored(name, columns, rows[:FIRST_ROWS], flags)
    by_flag, note = _columns_by_flag(name, columns, rows, flags)
    content = {role: column for role, column in by_flag.items() if role in _CONTENT}
    known = set_named(name) if flags.data_format == "auto" and not content else None
    if flags.data_format != "auto" or known:
        kind = kind_named(known or flags.data_format)
        located = _located(kind, columns, rows, content)
        _check_forced(name, columns, kind, located, content, by_name=known is not None)
        chosen = try_kind(kind, located, rows)
    else:
        found = []
        for kind in KINDS:
            located = _located(kind, columns, rows, content)
            if set(kind.not_with) & set(columns) - set(content.values()):
                continue
            if set(content) <= set(kind.by_flag) and set(content) <= set(located) and kind.uses(located):
                found.append(try_kind(kind, located, rows))
        if not found:
            raise UserError(
                f"{name}: has the columns {_listed(columns)}, which fit no known form; name them with --prompt_column, "
                f"--response_column, --chosen_column, --rejected_column or --messages_column{_rows_inside(rows)}"
            )
        chosen = choose(name, found)
    _require_one_column(name, columns, rows, chosen, content)
    return _form(name, columns, rows, has_template, flags, chosen, by_flag, note)


def check_flags_used(forms: Sequence[Form], flags: DataFlags) -> None:
    """Refuse column flags that name a column of no data set.

    Raises:
        UserError: they do.
    """
    named = ", ".join(f"--{role}_column {column}" for role, column in flags.columns.items() if column)
    if named and forms and not any(form.uses_flags for form in forms):
        raise UserError(f"{named}: no data set has such a column")


def mixed_renderings(forms: dict[str, Form]) -> str:
    """Which data sets the chat template renders and which have text prompts; "" if all are alike.

    Plain text, which has no prompts, does not count.
    """
    with_prompts = {spec: form for spec, form in forms.items() if form.name != "text"}
    chat, text = ([spec for spec, form in with_prompts.items() if form.rendering == kind] for kind in ("chat", "text"))
    if not chat or not text:
        return ""
    note = f"the chat template renders {', '.join(chat)}, but the prompts of {', '.join(text)} are text"
    if any(forms[spec].name in SETS for spec in text):  # the flag does not apply to them
        return note
    return f"{note}; --apply_chat_template True makes chat messages of them all"


def _form(
    name: str,
    columns: list[str],
    rows: list[Row],
    has_template: bool,
    flags: DataFlags,
    chosen: Candidate,
    by_flag: dict[str, str],
    note: str,
) -> Form:
    kind = chosen.kind
    is_named = kind.name in SETS
    rendering, wrap, about, warning = rendering_of(name, chosen, has_template, flags)
    template = flags.input_template if not kind.inside and not chosen.is_chat else None
    unnamed = next((column for column in SYSTEM_COLUMNS if column in columns), None)
    system = by_flag.get("system", unnamed if flags.system_column is None else None)
    has_prose = any(_is_prose(row.get("tools")) for row in rows)
    tools = "tools" if "tools" in columns and not has_prose else None
    truth, pattern = _truth(chosen, rows, flags, by_flag)
    reading = Reading(
        kind.name, tuple(chosen.columns.items()), rendering, wrap, template,
        None if is_named else system, None if is_named else tools, truth, pattern, flags.system_message,
        tuple(flags.roles.items()), _PLACEHOLDERS if set(PICTURES) & set(flags.ignore_columns) else (),
    )  # fmt: skip
    used = {path.split(".")[0] for path in (*chosen.columns.values(), system, tools, truth) if path}
    used |= {"margin"} if "rejected" in chosen.columns else set()
    unused = [] if is_named else [column for column in columns if column not in used and not column.startswith("_")]
    unused = [column for column in unused if column != "tools" or not has_prose]
    if flags.system_column is not None:
        unused = [column for column in unused if column not in SYSTEM_COLUMNS]
    is_chosen = bool(set(by_flag) & set(_CONTENT)) or flags.data_format != "auto"
    known = _known_content(unused, chosen, is_chosen)
    _require_no_content(name, known, rows, chosen)
    empty = [column for column in known if not any(has_content(column, row.get(column)) for row in rows)]
    reading = replace(reading, empty=tuple(empty))
    if is_named and by_flag.get("system"):
        raise UserError(f"{name}: has the text prompts of DeepSpeed-Chat, so --system_column does not apply")
    if flags.system_message and (is_named or rendering == "text"):
        raise UserError(
            f"{name}: --system_message precedes chat messages, but the prompts are text; --apply_chat_template True "
            "makes chat messages of them"
        )
    systems = [value_at(row, reading.system) for row in rows if reading.system and has_value(row, reading.system)]
    if rendering == "text" and any(systems):
        raise UserError(
            f"{name}: the column '{reading.system}' holds system messages, but the prompts are text, which has no "
            "place for them; choose: --apply_chat_template True makes chat messages of both, --system_column '' "
            "ignores the column"
        )
    uses = kind.uses(chosen.columns)
    parts = [f"form {kind.name} ({', '.join(f'{role}: {column}' for role, column in chosen.columns.items())})", about]
    parts += [f"system messages from '{system}'"] if reading.system else []
    parts += [f"tools from '{tools}'"] if reading.tools else []
    parts += [f"columns that training does not use: {_listed(unused)}"] if unused else []
    messages = [value_at(row, chosen.columns["messages"]) for row in rows[:1]] if "messages" in chosen.columns else []
    parts += ["the texts of a row are turns of user and assistant in turn"] if any(map(alternates, messages)) else []
    parts += ["the column 'tools' is not used, since it is not JSON"] if has_prose else []
    parts += [f"the correct answer from '{truth}'" + (f" by '{pattern}'" if pattern else "")] if truth else []
    if flags.input_template is not None and template is None:
        parts.append("--input_template does not apply")
    if {"response", "chosen"} <= set(chosen.columns):
        parts.append(f"SFT learns '{chosen.columns['response']}', not '{chosen.columns['chosen']}'")
    regroup = None
    if kind.name == "kto" and "messages" not in chosen.columns:
        context = tuple(column for column in (reading.system, reading.tools) if column)
        nested = [column for column in (*chosen.columns.values(), *context) if column not in columns]
        if nested:
            raise UserError(f"{name}: rows are grouped by prompt, so '{nested[0]}' must be a column, not inside one")
        regroup = partial(group_by_prompt, **{role: chosen.columns[role] for role in ("prompt", "label")},
                          answer=chosen.columns["response"], context=context)  # fmt: skip
    about = f"{name}: has the columns {_listed(columns)}, read as form {kind.name}"
    return Form(
        kind.name, rendering, partial(_read, reading, uses, about), "; ".join([*parts, *([note] if note else [])]),
        uses, about, repr(reading), bool(by_flag), regroup, warning,
    )  # fmt: skip


def _read(reading: Reading, uses: tuple[Use, ...], about: str, row: Row, use: Use, where: str) -> list[Example]:
    _require(uses, about, use)
    return read_row(kind_named(reading.form).read, reading, row, use, where)


def _require(uses: tuple[Use, ...], about: str, use: Use) -> None:
    if use not in uses:
        flags = f"; name its columns with {NAMED_BY[use]}" if use in NAMED_BY else ""
        raise UserError(f"{about}; this step needs {NEEDED[use]}{flags}")


def _columns_by_flag(name: str, columns: list[str], rows: list[Row], flags: DataFlags) -> tuple[dict[str, str], str]:
    """(role -> column that a flag names, a note for the log).

    Raises:
        UserError: a column does not exist. In a mixture, a data set may lack all of them.
    """
    wanted = {role: column for role, column in flags.columns.items() if column}
    missing = {role: column for role, column in wanted.items() if not _exists(column, columns, rows)}
    if not missing:
        return wanted, ""
    named = ", ".join(f"--{role}_column {column}" for role, column in missing.items())
    if len(missing) == len(wanted) and len(flags.data_path) > 1:
        return {}, f"has none of the columns that flags name ({', '.join(missing.values())}), so they do not apply"
    raise UserError(f"{named}: {name} has no such column; it has {_listed(columns)}{_rows_inside(rows)}")


def _rows_inside(rows: list[Row]) -> str:
    """A hint for a file that is one object with all rows in one of its values; else ""."""
    if len(rows) != 1:
        return ""
    lists = [name for name, value in rows[0].items()
             if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)]  # fmt: skip
    if len(lists) != 1:
        return ""
    query = f"'.[{json.dumps(lists[0])}][]'"
    return f"; the rows seem to be in '{lists[0]}': write them as JSON Lines, as with: jq -c {query} FILE > rows.jsonl"


def _exists(path: str, columns: list[str], rows: list[Row]) -> bool:
    return path in columns or (path.split(".")[0] in columns and any(has_value(row, path) for row in rows))


def _without_ignored(name: str, columns: list[str], rows: list[Row], flags: DataFlags) -> tuple[list[str], list[Row]]:
    """Columns and rows without those that `--ignore_columns` names.

    Raises:
        UserError: the only data set has no such column.
    """
    missing = [column for column in flags.ignore_columns if column not in columns]
    if missing and len(flags.data_path) == 1:
        raise UserError(f"--ignore_columns {missing[0]}: {name} has no such column; it has {_listed(columns)}")
    kept = [column for column in columns if column not in flags.ignore_columns]
    return kept, [{column: value for column, value in row.items() if column in kept} for row in rows]


def _known_content(unused: list[str], chosen: Candidate, by_flag: bool) -> list[str]:
    """Those of the unused columns that hold content by their names. If flags choose the reading, what others would read
    is left out knowingly."""
    known = _ALWAYS_CONTENT if by_flag else (*_ALWAYS_CONTENT, *_MAY_BE_CONTENT)
    of_rewards = _OF_REWARDS if set(chosen.drafts) == {"prompt"} else ()
    return [column for column in unused if column in known and column not in of_rewards]


def _require_no_content(name: str, known: list[str], rows: list[Row], chosen: Candidate) -> None:
    """Refuse a reading that leaves out a column with content: no other form would tell.

    What a column holds is no loss if it stands in what is read (a conversation beside its prompt and answer), or if it
    holds all that is read (the same as one text).

    Args:
        name: of the data set.
        known: columns that the reading does not use, see `_known_content`.
        rows: the first rows.
        chosen: the reading.

    Raises:
        UserError: the message shows the column, the reading and the way out.
    """
    for column in known:
        if column in ("label", "labels") and not all(_is_label(row.get(column)) for row in rows):
            continue
        for number, row in enumerate(rows):
            value = row.get(column)
            with_answers = [found for use, found in chosen.drafts.items() if use != "prompt"]
            by_use = [[line for draft in found[number] or [] for line in _lines([draft.prompt, *draft.answers])]
                      for found in with_answers or chosen.drafts.values()]  # fmt: skip
            if not has_content(column, value) or not all(by_use):
                continue
            held, everything = list(_lines(from_json(value))), "\n".join(line for lines in by_use for line in lines)
            is_read = bool(held) and all(line in everything for line in held)
            holds_all = any(all(line in "\n".join(held) for line in lines) for lines in by_use)
            if column in _NO_COPIES or not (is_read or holds_all):
                draft = next(draft for found in chosen.drafts.values() for draft in found[number] or [])
                way = leave_out(column)
                raise UserError(
                    f"{name}: its column '{column}' holds content, {str(value)[:60]!r}, that the form "
                    f"{chosen.kind.name} does not use; it reads {shown(draft)}. {way}; --prompt_column, "
                    "--response_column, ... and --data_format choose another reading"
                )


def _is_label(value: Any) -> bool:
    return isinstance(value, list) or str(value).strip().lower() in LABELS


def _lines(value: Any) -> Iterator[str]:
    """The lines of all texts inside a value, without the white space around them; of a message its content alone."""
    if isinstance(value, dict) and looks_like_messages(value):
        value = value.get("content", value.get("value"))
    if isinstance(value, str):
        yield from (line.strip() for line in value.splitlines() if line.strip())
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _lines(inner)
    elif value is not None:
        yield json.dumps(value, default=str)


def _located(kind: Kind, columns: list[str], rows: list[Row], by_flag: dict[str, str]) -> dict[str, str]:
    """Role -> column of a form: the one that a flag names, or else the first of its names that exists."""
    found = {}
    for role, names in kind.roles.items():
        free = [path for path in names if _exists(path, columns, rows) and path not in by_flag.values()]
        if role in by_flag or free:
            found[role] = by_flag.get(role) or free[0]
    if kind.name == "hh" and {"chosen", "messages"} <= set(found):  # pairs of transcripts, or one transcript
        unused = ("chosen", "rejected") if "messages" in by_flag else ("messages",)
        found = {role: column for role, column in found.items() if role not in unused}
    if kind.name == "preference" and "instruction" in columns and found.get("prompt") == "input":
        del found["prompt"]  # of Alpaca's form
    answers = found.get("response")
    if kind.name == "alpaca" and answers and any(isinstance(row.get(answers), list) for row in rows):
        found["pair"] = found.pop("response")
    # a column whose partner is missing, as chosen without rejected, has no role
    of_needs = [set(roles) for choices in kind.needs.values() for roles in choices]
    served = set().union(*(roles for roles in of_needs if roles <= set(found)))
    return {role: column for role, column in found.items() if role in served or role not in set().union(*of_needs)}


def _require_one_column(
    name: str, columns: list[str], rows: list[Row], chosen: Candidate, by_flag: dict[str, str]
) -> None:
    """Refuse two columns with different values that can both have a role, unless a flag names the one that has it."""
    for role, names in chosen.kind.roles.items():
        used = chosen.columns.get(role)
        others = [path for path in names if path not in (used, *by_flag.values()) and _exists(path, columns, rows)]
        if used is None or role in by_flag:
            continue
        for other, row in ((other, row) for other in others for row in rows):
            if has_value(row, used) and has_value(row, other) and _differ(value_at(row, used), value_at(row, other)):
                values = (f"'{path}', {str(value_at(row, path))[:40]!r}" for path in (used, other))
                choice = f"--ignore_columns {other} leaves the second one out"
                if role in chosen.kind.by_flag:
                    choice = f"name it with --{role}_column"
                raise UserError(
                    f"{name}: its rows can be read in two ways, as the {role} of the form {chosen.kind.name} is "
                    f"{' or '.join(values)}; {choice}"
                )


def _differ(used: Any, other: Any) -> bool:
    """Whether the second value says what the first does not."""
    return used != other and not (isinstance(used, str) and isinstance(other, str) and other.strip() in used)


def _check_forced(
    name: str, columns: list[str], kind: Kind, located: dict[str, str], by_flag: dict[str, str], by_name: bool
) -> None:
    """Refuse a form that the user or the name of the data set chooses, and that does not fit its columns."""
    unknown = [role for role in by_flag if role not in kind.roles]
    if unknown:
        raise UserError(f"{name}: --{unknown[0]}_column does not apply to the form {kind.name}")
    if not kind.uses(located):
        names = ", ".join("/".join(names) for names in kind.roles.values())
        hint = f"; --data_format FORM reads it in another way than DeepSpeed-Chat reads {kind.name}" if by_name else ""
        raise UserError(f"{name}: has the columns {_listed(columns)}; the form {kind.name} needs some of {names}{hint}")


def _truth(
    chosen: Candidate, rows: list[Row], flags: DataFlags, by_flag: dict[str, str]
) -> tuple[str | None, str | None]:
    """(column of the correct answer, pattern that finds it there)."""
    if "answer" in by_flag:
        return by_flag["answer"], flags.answer_pattern
    if flags.answer_pattern is not None and "answer" not in flags.columns:
        column = chosen.columns.get("response") or chosen.columns.get("chosen")
        if column is not None and any(isinstance(value_at(row, column), str) for row in rows if has_value(row, column)):
            return column, flags.answer_pattern
        if len(flags.data_path) == 1:
            raise UserError("--answer_pattern needs --answer_column, the column in which it finds the correct answer")
    if chosen.kind.name == "verl":
        return chosen.columns["truth"], None
    if chosen.kind.name == "question_answer":
        column = chosen.columns["response"]
        has_mark = any("####" in str(value_at(row, column)) for row in rows if has_value(row, column))
        if column == "answer" or has_mark:
            return column, r"(?s).*####\s*(.*?)\s*$" if has_mark else None
    return None, None


def _is_prose(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and not value.lstrip().startswith(("[", "{"))


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns))
