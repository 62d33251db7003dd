"""The columns of a data set besides the prompt and the answers that its form reads: the correct
answer, those whose content would be lost, and what the log says of them."""

from __future__ import annotations

from typing import NamedTuple

from dschat_ppo.data.advice import as_known_set
from dschat_ppo.data.content import (
    ALWAYS_CONTENT,
    CONTENT,
    SYSTEM_COLUMNS,
    is_of_rewards,
    names_an_answer,
)
from dschat_ppo.data.examples import Row, field_at, has_value
from dschat_ppo.data.form_kinds import SETS
from dschat_ppo.data.form_sample import Sample, exists, quoted_names
from dschat_ppo.data.forms import Form
from dschat_ppo.data.verdicts import MEANINGS, TURNING, VERDICT_ROLES, tells_of_a_side

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


def correct_answer(sample: Sample, form: Form) -> CorrectAnswer:
    """The correct answer that a flag names, that a form knows, or else that a column beside the
    prompt holds. Beside a solution, a short `answer` is the correct one; a long one is another
    answer."""
    if "answer" in sample.by_flag:
        return CorrectAnswer(sample.by_flag["answer"], sample.flags.answer_pattern)
    if form.kind.is_known_set or "prompt" not in form.uses:
        return CorrectAnswer()
    answer = form.columns.get("truth")
    if form.name == "question_answer":
        answer = form.columns["response"]
        if "####" in _text_of(sample.rows, answer):
            return CorrectAnswer(answer, _GSM8K)
        return CorrectAnswer(answer if answer == "answer" else None)
    if form.name == "problem_solution":
        solution = form.columns["response"]
        if answer is None or not _text_of(sample.rows, answer):
            return CorrectAnswer(solution, is_optional=True)
        if len(_text_of(sample.rows, answer)) > len(_text_of(sample.rows, solution)):
            return CorrectAnswer()
    if answer is None:
        used = form.used_columns
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


def watched_columns(sample: Sample, form: Form) -> set[str]:
    """Columns whose content would be lost: all that some form reads or whose names tell of answers,
    or fewer of them if flags choose how to read the rows, beside prompts alone, and beside texts,
    which may have classes."""
    kind = form.kind
    flags = sample.flags
    of_content = sample.of_content
    if kind.is_known_set:
        return {column for column in (form.system, form.tools) if column}
    only_prompts = form.uses == ("prompt",)
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
        answers = (of_content["chosen"], of_content["rejected"])
        watched |= TURNING.intersection(sample.columns)
        for column in sample.columns:
            values = [row[column] for row in sample.rows if row.get(column) is not None]
            if tells_of_a_side(column, values, answers):
                watched.add(column)
    watched -= form.used_columns | set(flags.ignore_columns)
    if flags.system_column is not None:
        watched -= set(SYSTEM_COLUMNS)
    if only_prompts:
        watched = {column for column in watched if not is_of_rewards(column)}
    elif kind.name == "text":
        watched -= {"label", "labels"}
    if form.rendering == "text":  # which has no place for them
        watched |= {column for column in (form.system, form.tools) if column}
    return watched


def description_of(sample: Sample, form: Form, about_prompts: str) -> str:
    """What was understood of a data set, in one line for the log."""
    columns = sample.columns
    flags = sample.flags
    roles = ", ".join(f"{role}: {column}" for role, column in form.columns.items())
    facts = [f"form {form.name} ({roles})", about_prompts]
    if form.system:
        facts.append(f"system messages from '{form.system}'")
    if form.tools:
        facts.append(f"tools from '{form.tools}'")
    if form.variables:
        facts.append(f"variables of the chat template from '{form.variables}'")
    used = form.used_columns
    truth_column = (form.truth or "").split(".")[0]
    unused = [
        column
        for column in columns
        if column not in used and column != truth_column and not column.startswith("_")
    ]
    if unused and not form.kind.is_known_set:
        facts.append(f"other columns: {quoted_names(unused)}")
    if form.truth:
        by_pattern = ""
        if form.truth_pattern:
            by_pattern = f" by '{form.truth_pattern}'"
        facts.append(f"the correct answer from '{form.truth}'{by_pattern}")
    for flag in ("input_template", "system_message"):
        if getattr(flags, flag) and getattr(form, flag) is None:
            facts.append(f"--{flag} does not apply")
    if {"response", "chosen"} <= set(form.columns):
        facts.append(f"SFT learns '{form.columns['response']}', not '{form.columns['chosen']}'")
    known_sets = [name for name in form.advice.sets if not set(SETS[name].columns.split()) <= used]
    if known_sets and not form.kind.is_known_set:
        facts.append(as_known_set(tuple(known_sets)))
    if form.scale != "words":
        facts.append(f"'{form.columns['better']}' is {MEANINGS[form.scale]}")
    if sample.missing:
        facts.append(f"{', '.join(sample.missing)}: it has no such column")
    return "; ".join(facts)
