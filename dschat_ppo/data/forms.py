"""Forms of data sets: which columns a row has, and how it becomes examples.

A data set has one form and one rendering in all three steps. `detect_form` finds them from columns and first rows. When
rows can be read in two ways, it stops and shows both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.own_names import is_own_function
from dschat_ppo.data.deepspeed_chat_sets import SETS, set_named
from dschat_ppo.data.examples import Example, Row, Use, has_value, value_at
from dschat_ppo.data.form_answer_lists import LABELS, group_by_prompt
from dschat_ppo.data.form_choice import Candidate, choose, shown, try_kind
from dschat_ppo.data.form_kinds import KINDS, NAMED_BY, NEEDED, Kind, kind_named
from dschat_ppo.data.form_rendering import Rendered, rendering_of
from dschat_ppo.data.form_rows import LABELLED, Draft, Reading, Rendering, read_row
from dschat_ppo.data.messages import THOUGHTS, WEIGHTS, alternates, from_json, leaves_out, looks_like_messages
from dschat_ppo.data.own_form import made_by_own, made_of_first
from dschat_ppo.errors import UserError

FIRST_ROWS = 20
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")  # used unless --system_column says otherwise
_CONTENT = ("prompt", "response", "chosen", "rejected", "messages", "better")
_PICTURES = ("image", "images", "video", "videos", "audio", "audios")
# Columns that no flag can name, and that say what the model sees or what is trained, wherever they are.
_ALWAYS_CONTENT = (*_PICTURES, *WEIGHTS, *THOUGHTS, "history", "functions", "rejected_messages")
# Those among them whose values may stand in the texts by chance: a weight of 0 in "10".
_NO_COPIES = (*_PICTURES, *WEIGHTS, "functions")
# Columns that may hold the prompt or the answers of a row in some form. What only rewards use is not among them, nor
# are names that mostly stand for who asked, and which model answered.
_MAY_BE_CONTENT = {
    name for kind in KINDS for role, names in kind.roles.items() for name in names
    if "." not in name and role not in ("source", "truth", "task", "scores", "ranks", "better")
} - {"answer", "answers", "user", "model", "bot"} | {"context", "tools", *SYSTEM_COLUMNS}  # fmt: skip
_OF_REWARDS = ("response", "responses", "completion", "completions", "output", "label", "labels", "steps", *THOUGHTS)


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
    if is_own_function(flags.data_format):
        columns, rows = made_of_first(flags.data_format, name, rows[:FIRST_ROWS])
        through = f"{name} through {flags.data_format}"
        form = detect_form(through, columns, rows, has_template, replace(flags, data_format="auto"), is_only)
        return made_by_own(form, flags.data_format)
    ignored = tuple(column for column in columns if column in flags.ignore_columns)
    columns = [column for column in columns if column not in ignored]
    rows = [{column: value for column, value in row.items() if column in columns} for row in rows[:FIRST_ROWS]]
    by_flag, note = _columns_by_flag(name, columns, rows, flags, is_only)
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
    rendered = rendering_of(name, chosen, has_template, flags)
    truth = _truth(chosen, rows, flags, by_flag, is_only)
    reading = _reading(columns, rows, flags, chosen, by_flag, rendered, truth)
    _check_system(name, reading, rows, flags, by_flag)
    uses = chosen.kind.uses(chosen.columns)
    for row in rows:
        _require_no_content(f"{name}: its column ", reading, uses, row)
    about = f"{name}: has the columns {_listed(columns)}, read as form {chosen.kind.name}"
    warning = rendered.warning
    if chosen.columns.get("response") == "text" and "response" not in content:
        warning = "'text' is read as the answer to 'prompt'; --ignore_columns text leaves it out" + "; " * bool(warning)
        warning += rendered.warning
    return Form(
        chosen.kind.name, rendered.rendering, partial(_read, reading, uses, about),
        _description(columns, rows, flags, chosen, reading, rendered.about, note), uses, about, repr(reading),
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


def _reading(
    columns: list[str], rows: list[Row], flags: DataFlags, chosen: Candidate, by_flag: dict[str, str],
    rendered: Rendered, truth: tuple[str | None, str | None],
) -> Reading:  # fmt: skip
    """How rows are read in the chosen form."""
    kind, rendering = chosen.kind, rendered.rendering
    is_named = kind.name in SETS
    by_name = next((column for column in SYSTEM_COLUMNS if column in columns), None)
    system = by_flag.get("system", by_name if flags.system_column is None else None)
    tools = "tools" if "tools" in columns and not any(_is_prose(row.get("tools")) for row in rows) else None
    is_chosen = bool(set(by_flag) & set(_CONTENT)) or flags.data_format != "auto"
    reading = Reading(
        kind.name, tuple(chosen.columns.items()), rendering, rendered.wrap,
        flags.input_template if not kind.inside and not chosen.is_chat else None,
        None if is_named else system, None if is_named else tools, *truth,
        flags.system_message if rendering == "chat" else None, tuple(flags.roles.items()),
        tuple(column for column in _PICTURES if column in flags.ignore_columns),
    )  # fmt: skip
    unused = _known_content(_unused(columns, reading, flags), chosen, rows, is_chosen)
    return replace(reading, unused=tuple(unused))


def _unused(columns: list[str], reading: Reading, flags: DataFlags) -> list[str]:
    """The columns that a reading does not use, without those that flags leave out knowingly."""
    if reading.form in SETS:
        return []
    paths = [*dict(reading.columns).values(), reading.system, reading.truth]
    used = {path.split(".")[0] for path in paths if path} | {"tools"}
    used |= {"margin"} if reading.column("rejected") else set()
    used |= set(SYSTEM_COLUMNS) if flags.system_column is not None else set()
    return [column for column in columns if column not in used and not column.startswith("_")]


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
        way = "--apply_chat_template True makes chat messages of both, " if can_be_chat else ""
        raise UserError(
            f"{name}: the column '{reading.system}' holds system messages, but the prompts are text, which has no "
            f"place for them; {'choose: ' if way else ''}{way}--system_column '' ignores the column"
        )


def _description(
    columns: list[str], rows: list[Row], flags: DataFlags, chosen: Candidate, reading: Reading, about: str, note: str
) -> str:
    """What was understood of a data set, for the log."""
    unused = _unused(columns, reading, flags)
    texts = chosen.columns.get("messages")
    parts = [f"form {reading.form} ({', '.join(f'{role}: {column}' for role, column in reading.columns)})", about]
    parts += [f"system messages from '{reading.system}'"] if reading.system else []
    parts += [f"tools from '{reading.tools}'"] if reading.tools else []
    parts += [f"columns that training does not use: {_listed(unused)}"] if unused else []
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
    roles = dict(reading.columns)
    if reading.form != "kto" or "messages" in roles:
        return None
    context = tuple(column for column in (reading.system, reading.tools) if column)
    nested = [column for column in (*roles.values(), *context) if column not in columns]
    if nested:
        raise UserError(f"{name}: rows are grouped by prompt, so '{nested[0]}' must be a column, not inside one")
    return partial(group_by_prompt, prompt=roles["prompt"], label=roles["label"], answer=roles["response"],
                   context=context)  # fmt: skip


def _read(reading: Reading, uses: tuple[Use, ...], about: str, row: Row, use: Use, where: str) -> list[Example]:
    _require(uses, about, use)
    examples = read_row(kind_named(reading.form).read, reading, row, use, where)
    _require_no_content(f"{where}: ", reading, uses, row)
    return examples


def _require(uses: tuple[Use, ...], about: str, use: Use) -> None:
    if use not in uses:
        flags = f"; name its columns with {NAMED_BY[use]}" if use in NAMED_BY else ""
        raise UserError(f"{about}; this step needs {NEEDED[use]}{flags}")


def _columns_by_flag(
    name: str, columns: list[str], rows: list[Row], flags: DataFlags, is_only: bool
) -> tuple[dict[str, str], str]:
    """(role -> column that a flag names, a note for the log). One of several data sets may lack all of them."""
    wanted = {role: column for role, column in flags.columns.items() if column}
    missing = {role: column for role, column in wanted.items() if not _exists(column, columns, rows)}
    if not missing:
        return wanted, ""
    named = ", ".join(f"--{role}_column {column}" for role, column in missing.items())
    if len(missing) == len(wanted) and not is_only:
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


def _known_content(unused: list[str], chosen: Candidate, rows: list[Row], by_flag: bool) -> list[str]:
    """Those of the unused columns that hold content by their names. If flags choose the reading, what others would read
    is left out knowingly."""
    known = set(_ALWAYS_CONTENT) if by_flag else {*_ALWAYS_CONTENT, *_MAY_BE_CONTENT}
    known -= set(_OF_REWARDS) if set(chosen.drafts) == {"prompt"} else set()
    labels = [name for name in ("label", "labels") if not all(_is_label(row.get(name)) for row in rows)]
    known -= {"label", "labels"} if chosen.kind.name == "text" else set(labels)  # classes of texts call no answer good
    return [column for column in unused if column in known]


def _require_no_content(where: str, reading: Reading, uses: tuple[Use, ...], row: Row) -> None:
    """Refuse a row of which a column holds content that the reading leaves out: no other form would tell. What a column
    holds is no loss if it stands in what is read (a conversation beside its prompt and answer), or if it holds all that
    is read (the same as one text)."""
    held = [column for column in reading.unused if has_value(row, column) and _has_content(column, row[column])]
    drafts = _all_drafts(reading, uses, row) if held else []
    by_use = [list(_lines([[draft.prompt, *draft.answers] for draft in found])) for found in drafts]
    everything = "\n".join(line for lines in by_use for line in lines)
    for column in held if by_use else ():
        value = from_json(row[column])
        lines = list(_lines(value))
        is_read = bool(lines) and all(line in everything for line in lines)
        holds_all = any(all(line in "\n".join(lines) for line in read) for read in by_use)
        if column in _NO_COPIES or not (is_read or holds_all):
            way = f"--ignore_columns {column} leaves it out"
            if column in _PICTURES:
                way = f"models are trained on text; --ignore_columns {column} leaves out pictures and placeholders"
            raise UserError(
                f"{where}'{column}' holds content, {str(value)[:60]!r}, that the form {reading.form} does not use; it "
                f"reads {shown(drafts[0][0])}. {way}; --prompt_column, --response_column, ... and --data_format choose "
                "another reading"
            )


def _all_drafts(reading: Reading, uses: tuple[Use, ...], row: Row) -> list[list[Draft]]:
    """What a form reads in a row for each use that trains on answers, or else for prompts; without uses that get
    nothing."""
    kind, found = kind_named(reading.form), list[list[Draft]]()
    split = () if reading.form in LABELLED else ("unpaired",)
    for use in [use for use in uses if use not in ("prompt", *split)] or uses:
        with suppress(UserError):
            found.append(kind.read(row, reading, use))
    return [drafts for drafts in found if drafts]


def _has_content(column: str, value: Any) -> bool:
    """Whether a column that a reading does not use holds content: weights of 1 change nothing, nor do switches of
    thoughts (`reasoning: "on"`), measured losses, and names of splits (`training: "train"`)."""
    if column in ("train", "training", "loss") and not isinstance(value, list):
        return str(value).strip().lower() in ("0", "0.0", "false")
    if column in THOUGHTS and not isinstance(value, list | dict):
        return str(value).strip().lower() not in ("", "on", "off", "yes", "no", "true", "false")
    return leaves_out(value) if column in WEIGHTS else value not in ("", [], {})


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
    if kind.name == "prompt_response" and set(found) == {"prompt"} and "text" not in by_flag.values():
        beside = [row for row in rows if isinstance(row.get("text"), str) and not _repeats(row, found["prompt"])]
        found |= {"response": "text"} if 2 * len(beside) > len(rows) else {}
    if kind.name == "preference" and "instruction" in columns and found.get("prompt") == "input":
        del found["prompt"]  # of Alpaca's form
    answers = found.get("response")
    if kind.name == "alpaca" and answers and any(isinstance(row.get(answers), list) for row in rows):
        found["pair"] = found.pop("response")
    # a column whose partner is missing, as chosen without rejected, has no role
    of_needs = [set(roles) for choices in kind.needs.values() for roles in choices]
    served = set().union(*(roles for roles in of_needs if roles <= set(found)))
    return {role: column for role, column in found.items() if role in served or role not in set().union(*of_needs)}


def _repeats(row: Row, prompt: str) -> bool:
    """Whether the column `text` of a row holds its prompt, and so is no answer to it."""
    return has_value(row, prompt) and all(line in row["text"] for line in _lines(from_json(value_at(row, prompt))))


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
    chosen: Candidate, rows: list[Row], flags: DataFlags, by_flag: dict[str, str], is_only: bool
) -> tuple[str | None, str | None]:
    """(column of the correct answer, pattern that finds it there)."""
    if "answer" in by_flag:
        return by_flag["answer"], flags.answer_pattern
    if flags.answer_pattern is not None and "answer" not in flags.columns:
        column = chosen.columns.get("response") or chosen.columns.get("chosen")
        if column is not None and any(isinstance(value_at(row, column), str) for row in rows if has_value(row, column)):
            return column, flags.answer_pattern
        if is_only:
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
