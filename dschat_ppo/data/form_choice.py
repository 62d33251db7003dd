"""Choice among the forms that fit the columns of a data set, by what they read in its first rows, and of the rendering:
text or chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.deepspeed_chat_sets import SETS, set_named
from dschat_ppo.data.examples import Example, Row, Use, has_value, value_at
from dschat_ppo.data.form_kinds import KINDS, Kind, kind_named
from dschat_ppo.data.form_rows import Cells, Reading, Rendering, lines_of, shown
from dschat_ppo.data.messages import from_json
from dschat_ppo.errors import UserError

_SENTENCE_ENDS = ".!?…。！？｡．;；,，、)）]】\"'”’»」』*"
_WITHOUT_ANSWER = ("prompt_response", "messages", "sharegpt", "verl")  # they also hold prompts alone
_SPECIAL = ("verl", "kto", "ranked", "hh", "stepwise", "prm800k", "math_shepherd")  # no other form has their columns
_QUESTIONS = (
    "question",
    "query",
    "input",
    "instruction",
)  # columns of what a user says, not of text as a model reads it


@dataclass(frozen=True)
class Candidate:
    """A form with its columns (role -> column), and what it reads in the first rows.

    Attributes:
        examples: use -> for each row its examples, or None where it cannot be read.
        is_chat: whether the form finds chat messages, not text.
        fits: whether it reads at least half of the rows.
        problem: with the first row that it cannot read, or "".
    """

    kind: Kind
    columns: dict[str, str]
    examples: dict[Use, list[list[Example] | None]]
    is_chat: bool
    fits: bool
    problem: str


def chosen_form(
    name: str, columns: list[str], rows: list[Row], flags: DataFlags, by_flag: dict[str, str]
) -> tuple[Candidate, list[Candidate]]:
    """The form of a data set, and the other ones that fit. A flag or the name chooses the form; otherwise it is the one
    whose columns are there and that reads the rows. `by_flag` are the columns of content that flags name. `UserError`
    if no form fits."""
    known = set_named(name) if flags.data_format == "auto" and not by_flag else None
    if flags.data_format != "auto" or known:
        kind = kind_named(known or flags.data_format)
        located = _located(kind, columns, rows, by_flag)
        _check_forced(name, columns, kind, located, by_flag, by_name=known is not None)
        return _try(kind, located, rows), []
    found = []
    for kind in KINDS:
        located = _located(kind, columns, rows, by_flag)
        fits_flags = set(by_flag) <= set(kind.by_flag.split()) & set(located)
        if fits_flags and kind.uses(located) and not set(kind.not_with.split()) & set(columns) - {*by_flag.values()}:
            found.append(_try(kind, located, rows))
    if not found:
        raise UserError(
            f"{name}: has the columns {listed(columns)}, which fit no known form; name them with --prompt_column, "
            f"--response_column, --chosen_column, --rejected_column or --messages_column{rows_inside(rows)}"
        )
    return _choose(name, found)


def _located(kind: Kind, columns: list[str], rows: list[Row], by_flag: dict[str, str]) -> dict[str, str]:
    """Role -> column of a form: the one that a flag names, or else the first of its names that exists."""
    found = {}
    for role in kind.roles:
        free = [path for path in kind.names(role) if exists(path, columns, rows) and path not in by_flag.values()]
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
    of_needs = [roles for use in kind.needs for roles in kind.choices(use)]
    served = set().union(*(roles for roles in of_needs if roles <= set(found)))
    return {role: column for role, column in found.items() if role in served or role not in set().union(*of_needs)}


def _repeats(row: Row, prompt: str) -> bool:
    """Whether the column `text` of a row holds its prompt, and so is no answer to it."""
    return has_value(row, prompt) and all(line in row["text"] for line in lines_of(from_json(value_at(row, prompt))))


def _check_forced(
    name: str, columns: list[str], kind: Kind, located: dict[str, str], by_flag: dict[str, str], by_name: bool
) -> None:
    """Refuse a form that the user or the name of the data set chooses, and that does not fit its columns."""
    unknown = [role for role in by_flag if role not in kind.roles]
    if unknown:
        raise UserError(f"{name}: --{unknown[0]}_column does not apply to the form {kind.name}")
    if not kind.uses(located):
        names = ", ".join("/".join(kind.names(role)) for role in kind.roles)
        hint = f"; --data_format FORM reads it in another way than DeepSpeed-Chat reads {kind.name}" if by_name else ""
        raise UserError(f"{name}: has the columns {listed(columns)}; the form {kind.name} needs some of {names}{hint}")


def _try(kind: Kind, columns: dict[str, str], rows: list[Row]) -> Candidate:
    """Read the first rows in one form."""
    reading = Reading(kind.name, columns, "chat" if kind.rendering in ("chat", "content") else "text")
    uses = [use for use in kind.uses(columns) if use != "unpaired" and (kind.name, use) != ("kto", "preference")]
    examples: dict[Use, list[list[Example] | None]] = {use: [] for use in uses}
    problems = []
    for use, found in examples.items():
        for row in rows:
            try:
                found.append(kind.read(Cells(row, reading), use))
            except UserError as problem:
                found.append(None)
                problems.append(str(problem))
    is_chat = kind.rendering == "chat" or (
        kind.rendering == "as given"
        and any(isinstance(d.prompt, list) for found in examples.values() for some in found for d in some or [])
    )
    telling = [use for use in uses if use != "prompt" or kind.name in _WITHOUT_ANSWER]
    fits = any(2 * sum(some is not None for some in examples[use]) >= len(rows) for use in telling)
    return Candidate(kind, columns, examples, is_chat, fits, problems[0] if problems else "")


def _choose(name: str, found: list[Candidate]) -> tuple[Candidate, list[Candidate]]:
    """The form of a data set among those that fit its columns: chat first, then the one that serves most. What it
    leaves out of the columns of the others is judged by `left_out`. `UserError` if no form reads the rows."""
    fitting = [candidate for candidate in found if candidate.fits]
    shadowed = {
        other for candidate in fitting for other in candidate.kind.shadows.split()
        if other != "text" or "messages" in candidate.columns  # pairs of transcripts say nothing of `text`
    }  # fmt: skip
    if any(one.kind.name == "prompt_response" and one.columns.get("response") == "text" for one in fitting):
        shadowed.add("text")  # the answer to a prompt
    fitting = [candidate for candidate in fitting if candidate.kind.name not in shadowed]
    if not fitting:
        likely = min(found, key=lambda one: one.kind.name in _SPECIAL)
        if likely.kind.name not in _SPECIAL:
            return likely, []  # its reader says what is wrong with each row
        raise UserError(
            f"{name}: its columns are those of the form {likely.kind.name}, but its first rows are not: "
            f"{likely.problem}; name the columns to use (--prompt_column, --response_column, ...) or correct the rows"
        )
    chosen = max(fitting, key=lambda one: (one.is_chat, one.kind.name != "text", len(one.examples)))
    if chosen.kind.name == "preference":
        _require_prompt_outside(name, chosen)
    return chosen, [one for one in fitting if one is not chosen]


def two_ways(name: str, number: int, chosen: Candidate, other: Candidate) -> str:
    """What two forms read in row `number` of the first ones, and how to choose."""
    ways = []
    for one in (chosen, other):
        read = next((found[number] for found in one.examples.values() if found[number]), None)
        ways.append(f"as {one.kind.name}, {shown(read[0]) if read else 'nothing'}")
    return (
        f"{name}: its rows can be read in two ways: {ways[0]}, or {ways[1]}; choose with --data_format "
        f"{chosen.kind.name} or --data_format {other.kind.name}, or name the columns (--prompt_column, "
        "--messages_column, ...)"
    )


def _require_prompt_outside(name: str, chosen: Candidate) -> None:
    """Refuse text answers that repeat the prompt: either the prompt is read twice, or it belongs to the answers."""
    pairs = [some[0] for some in chosen.examples.get("preference", []) if some]
    repeated = [
        pair for pair in pairs
        if isinstance(pair.prompt, str) and pair.prompt
        and all(isinstance(answer, str) and answer.startswith(pair.prompt) for answer in pair.answers)
    ]  # fmt: skip
    if 2 * len(repeated) > len(pairs):
        raise UserError(
            f"{name}: its rows can be read in two ways, because chosen and rejected repeat the prompt "
            f"{str(repeated[0].prompt)[:40]!r}: as preference, the prompt occurs twice (--data_format preference); as "
            "implicit_preference, once (--data_format implicit_preference)"
        )


# Text or chat


class Rendered(NamedTuple):
    """Rendering, whether text prompts become user messages, words for the log, and a warning or ""."""

    rendering: Rendering
    wrap: bool
    about: str
    warning: str = ""


def rendering_of(name: str, chosen: Candidate, has_template: bool, flags: DataFlags) -> Rendered:
    """Whether the prompts of a data set are text or chat, in all three steps. `UserError` if a flag does not fit the
    form, chat messages lack a template, or text prompts and answers are glued together while there is a chat
    template."""
    kind, wanted = chosen.kind, flags.apply_chat_template
    if wanted and (kind.name in SETS or kind.name == "text"):
        reason = "has the text prompts of DeepSpeed-Chat" if kind.name in SETS else "is plain text without prompts"
        raise UserError(f"{name}: {reason}, so --apply_chat_template True does not apply; --data_format chooses a form")
    of_a_question = flags.prompt_column is None and kind.name in ("preference", "better_of_two", "prompt_response")
    asks = kind.rendering == "content" or (of_a_question and chosen.columns.get("prompt") in _QUESTIONS)
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
        return Rendered("chat", not chosen.is_chat, about)
    if kind.inside:
        return Rendered("text", False, "text is used as it is")
    if flags.input_template is not None:
        return Rendered("text", False, f"prompts are text, put into --input_template {flags.input_template!r}")
    if kind.name == "alpaca":
        return Rendered("text", False, "prompts are put into Alpaca's text template")
    about = "prompts are text, used as they are"
    glued = _glued_row(chosen)
    if glued is None or wanted is False:
        without = ", without the chat template" if has_template and wanted is None else ""
        return Rendered("text", False, about + without)
    text = f"...{glued.prompt[-40:]}{str(glued.answers[0])[:40]}..."
    if not has_template or asks or "steps" in chosen.examples:
        chat = "--apply_chat_template True makes user messages of the prompts, and " if has_template else ""
        way = f"{chat}--input_template puts text around a prompt"
        return Rendered("text", False, about, f"nothing separates prompt and answer: {text!r}; {way}")
    raise UserError(
        f"{name}: its rows can be read in two ways: as text, {text!r} (--apply_chat_template False), or as chat, "
        f"{shown(glued, as_chat=True)} (--apply_chat_template True); choose one of them, or give the text around a "
        "prompt, such as --input_template 'Question: {} Answer: '"
    )


def _glued_row(chosen: Candidate) -> Example | None:
    """A row in which a word or sentence ends the text prompt, and a word starts the answer, without a space between
    them, if more than half of the first rows are such."""
    read = chosen.examples.get("sft") or chosen.examples.get("steps") or []
    first = [some[0] for some in read if some]
    glued = [
        one for one in first
        if one.answers and isinstance(one.prompt, str) and isinstance(one.answers[0], str)
        and one.prompt and (one.prompt[-1].isalnum() or one.prompt[-1] in _SENTENCE_ENDS)
        and one.answers[0][:1].isalnum()
    ]  # fmt: skip
    return glued[0] if 2 * len(glued) > len(first) else None


# Columns


def exists(path: str, columns: list[str], rows: list[Row]) -> bool:
    """Whether rows have a column, or a field inside one."""
    return path in columns or (path.split(".")[0] in columns and any(has_value(row, path) for row in rows))


def listed(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns))


def rows_inside(rows: list[Row]) -> str:
    """A hint for a file that is one object with all rows in one of its values; else ""."""
    if len(rows) != 1:
        return ""
    lists = [name for name, value in rows[0].items()
             if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)]  # fmt: skip
    if len(lists) != 1:
        return ""
    query = f"'.[{json.dumps(lists[0])}][]'"
    return f"; the rows seem to be in '{lists[0]}': write them as JSON Lines, as with: jq -c {query} FILE > rows.jsonl"
