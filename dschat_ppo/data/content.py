"""Which columns of a data set hold content, that no form may leave out without a word."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from dschat_ppo.data.cells import LABELS
from dschat_ppo.data.examples import json_value
from dschat_ppo.data.form_kinds import KINDS
from dschat_ppo.data.messages import (
    THOUGHTS,
    WEIGHTS,
    leaves_out,
    looks_like_messages,
    names_thoughts,
    words_of_name,
)
from dschat_ppo.data.uses import further_uses
from dschat_ppo.data.verdicts import TURNING, VERDICT_ROLES

PICTURES = ("image", "images", "video", "videos", "audio", "audios")
# used unless --system_column says otherwise
SYSTEM_COLUMNS = "system", "system_prompt", "system_message"
# Columns that no flag can name, and that say what the model sees or what is trained
ALWAYS_CONTENT = {*PICTURES, *WEIGHTS, *THOUGHTS, "history", "functions", "rejected_messages"}
# What a question is about, or what it leaves to choose from
OF_QUESTIONS = {
    *("context", "passage", "passages", "document", "documents", "article", "choices", "options")
}
# Columns that hold a prompt or a part of one
OF_PROMPTS = OF_QUESTIONS | {"prompt", "question", "query", "instruction", "input", "problem"}
# Columns that may hold the prompt or the answers of a row in some form. What only rewards use is
# not among them, nor are names that mostly stand for who asked, and which model answered.
CONTENT = (
    ALWAYS_CONTENT
    | {"tools", *SYSTEM_COLUMNS}
    | OF_QUESTIONS
    | {
        name
        for kind in KINDS.values()
        for role, names in kind.roles.items()
        for name in names.split()
        if "." not in name
        and role not in ("source", "truth", "scores", "ranks", *VERDICT_ROLES, *kind.signs)
    }
    - {"answer", "answers", "user", "model", "bot"}
)
# Columns whose values are in texts by chance: a weight of "0" in "10"
NO_COPIES = (*PICTURES, *WEIGHTS, *TURNING, "functions")
# What reward functions get and no prompt needs
_OF_REWARDS = {
    "answer",
    "response",
    "responses",
    "completion",
    "completions",
    "output",
    "label",
    "labels",
    *THOUGHTS,
}
# The last word of the name of a column that holds an answer
_OF_AN_ANSWER = re.compile(
    r"(^|_)(solution|code|explanation|generation|derivation|trajectory|target)s?$|(^|_)trajectories$"
)
_MOST_OF_SWITCH = 30  # characters
_OF_TESTS = re.compile(r"^(test|unit|challenge|is|has|num)_")
_WORDS_OR_CODE = re.compile(r"\S\s+\S|[(){}=]")


@cache
def names_an_answer(column: str) -> bool:
    """Whether a name tells of an answer or of thoughts, in any spelling: `r1_solution_1`,
    `Complex_CoT`, `modelRationale`."""
    words = words_of_name(column)
    is_named = bool(_OF_AN_ANSWER.search(words)) or names_thoughts(column)
    return is_named and not _OF_TESTS.search(words)


def is_of_rewards(column: str) -> bool:
    """Whether a column tells of answers: with prompts alone it is no loss, and reward functions get
    it."""
    is_of_further_use = any(column == use.column for use in further_uses().values())
    return column in _OF_REWARDS or is_of_further_use or names_an_answer(column)


def is_content(column: str, value: Any) -> bool:
    """Whether a column that a form does not use holds content: weights of 1 change nothing, nor do
    measured losses, names of splits (`training: "train"`), switches of thoughts (`reasoning: "on"`)
    and labels of classes. A column whose name tells of an answer holds one if its text has more
    than one word, or code: it is no name of a country or a language."""
    if column in ("label", "labels"):
        return isinstance(value, list) or str(value).strip().lower() in LABELS
    if column in ("train", "training", "loss") and not isinstance(value, list):
        return str(value).strip().lower() in ("0", "0.0", "false")
    if column in WEIGHTS:
        return leaves_out(value)
    if column in THOUGHTS and str(value).strip().lower() in (
        "on",
        "off",
        "yes",
        "no",
        "true",
        "false",
    ):
        return False
    if names_an_answer(column):
        return bool(_WORDS_OR_CODE.search("\n".join(lines_of(json_value(value)))))
    return value not in (None, "", [], {})


def is_switch(values: list[Any]) -> bool:
    """Whether values of a column are few and short, each in many rows, as of a flag
    (`thinking on`)."""
    distinct = {str(value).strip().lower() for value in values}
    is_short = all(len(word) <= _MOST_OF_SWITCH for word in distinct)
    return is_short and 4 * len(distinct) <= len(values)


def lines_of(value: Any) -> list[str]:
    """The lines of all texts inside a value, without the white space around them; of a message its
    content alone."""
    if isinstance(value, dict) and looks_like_messages(value):
        value = value.get("content", value.get("value"))
    if isinstance(value, str):
        return [line.strip() for line in value.splitlines() if line.strip()]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return []
    return [line for inner in value for line in lines_of(inner)]


def all_in(lines: list[str], others: list[str]) -> bool:
    """Whether each line is in one of the others."""
    text = "\n".join(others)
    return all(line in text for line in lines)
