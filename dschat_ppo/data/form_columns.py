"""The columns of a data set besides the prompt and the answers that its form reads: the correct
answer, those whose content would be lost, and what the log says of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dschat_ppo.data.advice import as_known_set
from dschat_ppo.data.content import (
    ALWAYS_CONTENT,
    CONTENT,
    SYSTEM_COLUMNS,
    is_of_rewards,
    names_an_answer,
)
from dschat_ppo.data.examples import VARIABLES_COLUMN, Row, field_at, has_value
from dschat_ppo.data.form_kinds import SETS
from dschat_ppo.data.form_sample import DataSample, exists, quoted_names
from dschat_ppo.data.forms import Rendering, RowReader, SideColumns
from dschat_ppo.data.verdicts import (
    MEANINGS,
    TURNING,
    VERDICT_ROLES,
    Answers,
    lead_by_names,
)

# Columns that hold the correct answer beside a prompt, the likeliest first
_TRUTHS = (
    "ground_truth",
    "reward_model.ground_truth",
    "answer",
    "gold",
    "gold_answer",
    "correct_answer",
    "reference_answer",
    "expected_answer",
    "final_answer",
    "solution",
)
_GSM8K = r"(?s).*####\s*(.*?)\s*$"


class CorrectAnswer(NamedTuple):
    """Where the correct answer stands, for reward functions. `pattern` finds it in its column;
    `is_optional`: rows may lack it, since the name of the column alone tells of it."""

    column: str | None = None
    pattern: str | None = None
    is_optional: bool = False


def side_columns(sample: DataSample, reader: RowReader, rendering: Rendering) -> SideColumns:
    """The columns that a form reads besides those of the prompt and the answers."""
    columns = sample.columns
    is_known_set = reader.kind.is_known_set
    system = sample.by_flag.get("system")
    if sample.flags.system_column is None and not is_known_set:
        system = next((column for column in SYSTEM_COLUMNS if column in columns), None)
    tools = None
    if "tools" in columns and not is_known_set:
        tools = "tools"
    variables = None
    if rendering == "chat" and VARIABLES_COLUMN in columns:
        variables = VARIABLES_COLUMN
    truth = _correct_answer(sample, reader)
    return SideColumns(system, tools, variables, truth.column, truth.pattern, truth.is_optional)


def _correct_answer(sample: DataSample, reader: RowReader) -> CorrectAnswer:
    """The correct answer that a flag names, that a form knows, or else that a column beside the
    prompt holds. Beside a solution, a short `answer` is the correct one; a long one is another
    answer."""
    if "answer" in sample.by_flag:
        return CorrectAnswer(sample.by_flag["answer"], sample.flags.answer_pattern)
    name = reader.kind.name
    if reader.kind.is_known_set or "prompt" not in reader.uses:
        return CorrectAnswer()
    answer = reader.columns.get("truth")
    if name == "question_answer":
        answer = reader.columns["response"]
        if "####" in _text_of(sample.rows, answer):
            return CorrectAnswer(answer, _GSM8K)
        return CorrectAnswer(answer if answer == "answer" else None)
    if name == "problem_solution":
        solution = reader.columns["response"]
        if answer is None or not _text_of(sample.rows, answer):
            return CorrectAnswer(solution, is_optional=True)
        if len(_text_of(sample.rows, answer)) > len(_text_of(sample.rows, solution)):
            return CorrectAnswer()
    if answer is None:
        used = reader.used_columns
        for path in _TRUTHS:
            is_free = path.split(".")[0] not in used and exists(path, sample.columns, sample.rows)
            if is_free and _text_of(sample.rows, path):
                pattern = _GSM8K if "####" in _text_of(sample.rows, path) else None
                return CorrectAnswer(path, pattern, is_optional=True)
    return CorrectAnswer(answer)


def _text_of(rows: list[Row], path: str) -> str:
    """The values of a column, or of a field inside it, as one text."""
    values = [field_at(row, path) for row in rows if has_value(row, path)]
    return "".join(map(str, values))


def watched_columns(
    sample: DataSample, reader: RowReader, side: SideColumns, rendering: Rendering
) -> set[str]:
    """Columns whose content would be lost: all that some form reads or whose names tell of answers,
    or fewer of them if flags choose how to read the rows, beside prompts alone, and beside texts,
    which may have classes."""
    kind = reader.kind
    flags = sample.flags
    of_content = sample.of_content
    if kind.is_known_set:
        return {column for column in (side.system, side.tools) if column}
    only_prompts = reader.uses == ("prompt",)
    of_texts = set(of_content) - {"label", *VERDICT_ROLES}
    answer_is_chosen = flags.data_format != "auto" or bool(of_texts - {"prompt"})
    watched = set(CONTENT)
    if flags.data_format != "auto" or (of_texts and kind.by_flag and not only_prompts):
        watched = set(ALWAYS_CONTENT)
    if not answer_is_chosen:
        watched |= set(filter(names_an_answer, sample.columns))
        if kind.name == "problem_solution":
            watched.add("answer")
    for role in of_content:
        watched -= set(kind.roles[role].split())
    if {"chosen", "rejected"} <= set(of_content):  # which a verdict may turn around
        watched |= TURNING.intersection(sample.columns)
    if {"chosen", "rejected"} <= set(reader.columns):
        answers = (reader.columns["chosen"], reader.columns["rejected"])
        watched |= set(_verdicts_by_names(sample, answers))
    watched -= reader.used_columns | side.used_columns | set(flags.ignore_columns)
    if flags.system_column is not None:
        watched -= set(SYSTEM_COLUMNS)
    if only_prompts:
        watched = {column for column in watched if not is_of_rewards(column)}
    elif kind.name == "text":
        watched -= {"label", "labels"}
    if rendering == "text":  # which has no place for them
        watched |= {column for column in (side.system, side.tools) if column}
    return watched


def _verdicts_by_names(sample: DataSample, answers: Answers) -> Iterator[str]:
    """The columns that say which of two answers is better, by the names of the answers."""
    for column in sample.columns:
        leads = {lead_by_names(column, row.get(column), answers) for row in sample.rows}
        if leads & {1, -1}:
            yield column


def description_of(
    sample: DataSample,
    reader: RowReader,
    side: SideColumns,
    about_prompts: str,
    unused_flags: list[str],
) -> str:
    """What was understood of a data set, in one line for the log. `about_prompts`: of its prompts;
    `unused_flags` do not apply to them."""
    columns = reader.columns
    roles = ", ".join(f"{role}: {column}" for role, column in columns.items())
    facts = [f"form {reader.kind.name} ({roles})", about_prompts]
    if side.system:
        facts.append(f"system messages from '{side.system}'")
    if side.tools:
        facts.append(f"tools from '{side.tools}'")
    if side.variables:
        facts.append(f"variables of the chat template from '{side.variables}'")
    used = reader.used_columns | side.used_columns
    truth_column = (side.truth or "").split(".")[0]
    unused = [
        column
        for column in sample.columns
        if column not in used and column != truth_column and not column.startswith("_")
    ]
    if unused and not reader.kind.is_known_set:
        facts.append(f"other columns: {quoted_names(unused)}")
    if side.truth:
        by_pattern = ""
        if side.truth_pattern:
            by_pattern = f" by '{side.truth_pattern}'"
        facts.append(f"the correct answer from '{side.truth}'{by_pattern}")
    facts += [f"{flag} does not apply" for flag in unused_flags]
    if {"response", "chosen"} <= set(columns):
        facts.append(f"SFT learns '{columns['response']}', not '{columns['chosen']}'")
    known_sets = [
        name for name in sample.advice.sets if not set(SETS[name].columns.split()) <= used
    ]
    if known_sets and not reader.kind.is_known_set:
        facts.append(as_known_set(tuple(known_sets)))
    if reader.scale != "words":
        facts.append(f"'{columns['better']}' is {MEANINGS[reader.scale]}")
    if sample.missing:
        facts.append(f"{', '.join(sample.missing)}: it has no such column")
    description = "; ".join(facts)
    if sample.function is not None:
        return f"{sample.function} makes {description}"
    return description
