"""Forms with several answers to one prompt: ranked lists, and rows that call one answer good or bad (KTO)."""

from __future__ import annotations

import hashlib
import json
import math
from itertools import accumulate
from typing import Any

import pyarrow
from datasets import Dataset

from dschat_ppo.data.examples import Row, Use, value_at
from dschat_ppo.data.form_readers import prompt_value
from dschat_ppo.data.form_rows import Draft, Reading
from dschat_ppo.data.messages import Message, Messages, from_json, kind_of, looks_like_messages, split_answer
from dschat_ppo.errors import UserError

SCORES = ("scores", "ratings", "rewards")  # columns with a number per answer: more is better
RANKS = ("ranks", "rankings", "ranking", "rank")  # less is better
_TEXTS = ("text", "answer", "response", "completion", "content")
_SCORE = ("score", "overall_score", "rating", "reward")
LABELS = {  # of KTO, in lower case
    **dict.fromkeys(("true", "1", "1.0", "good", "yes", "chosen", "desirable", "positive", "accepted"), True),
    **dict.fromkeys(("false", "0", "0.0", "-1", "-1.0", "bad", "no", "rejected", "undesirable", "negative"), False),
}
_GROUPS = 10_000
GROUP_ANSWERS, GROUP_LABELS = "_answers", "_labels"  # columns that `group_by_prompt` adds


def read_ranked(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """A list of answers with scores or ranks: the best one, every pair of different rank, or the best answer as a
    desirable and the worst one as an undesirable answer (of equal ones the first; nothing if all are equal)."""
    prompt = prompt_value(row, reading)
    if use == "prompt":
        return [Draft(prompt)]
    column = dict(reading.columns)["response"]
    values = reading.listed(row, "response")
    if not isinstance(values, list) or not values:
        raise UserError(f"'{column}' is {kind_of(values)}; expected a list of answers")
    texts = [_text(value, f"answer {number} of '{column}'") for number, value in enumerate(values, start=1)]
    worths = _worths(row, reading, values, column)
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise UserError(f"answer {number} of '{column}' is empty")
    order = sorted(range(len(texts)), key=lambda at: -worths[at])  # stable: equal ones in the order of the row
    if use == "sft":
        return [Draft(prompt, [texts[order[0]]])]
    if use == "unpaired":
        best, lowest = order[0], min(range(len(texts)), key=lambda at: worths[at])
        ends = ((best, 1.0), (lowest, 0.0)) if worths[best] > worths[lowest] else ()
        return [Draft(prompt, [texts[at]], f", answer {at + 1}", (label,)) for at, label in ends]
    pairs = [(a, b) for at, a in enumerate(order) for b in order[at + 1 :] if worths[a] > worths[b]]
    for a, b in pairs:
        if texts[a] == texts[b]:
            raise UserError(f"answers {a + 1} and {b + 1} of '{column}' are equal, but their ranks differ")
    return [Draft(prompt, [texts[a], texts[b]], f", answers {a + 1} and {b + 1}") for a, b in pairs]


def _text(value: Any, name: str) -> str:
    if isinstance(value, dict):
        value = next((value[key] for key in _TEXTS if value.get(key) is not None), value)
    if not isinstance(value, str):
        raise UserError(f"{name} is {kind_of(value)}; expected text, or an object with {', '.join(_TEXTS[:3])}")
    return value


def _worths(row: Row, reading: Reading, values: list[Any], column: str) -> list[float]:
    """How good each answer is: its score, or minus its rank."""
    role = "ranks" if reading.column("ranks") else "scores"
    given = reading.column(role)
    if given is not None:
        numbers, sign, name = reading.listed(row, role), -1 if role == "ranks" else 1, f"'{given}'"
        if not isinstance(numbers, list) or len(numbers) != len(values):
            raise UserError(f"{name} is {kind_of(numbers)}; expected a list of {len(values)} numbers, one per answer")
    else:
        dicts = [value if isinstance(value, dict) else {} for value in values]
        keys = [(key, sign) for names, sign in ((RANKS, -1), (_SCORE, 1)) for key in names]
        key, sign = next(((key, sign) for key, sign in keys if all(key in value for value in dicts)), ("", 1))
        if not key:
            raise UserError(
                f"the answers of '{column}' have no score or rank, and no column {', '.join(SCORES)} is there"
            )
        numbers, name = [value[key] for value in dicts], f"'{key}' in '{column}'"
    worths = []
    for number in numbers:
        try:
            worths.append(sign * float(number))
        except (TypeError, ValueError):
            raise UserError(f"{name} holds {kind_of(number)}; expected a number") from None
        if not math.isfinite(worths[-1]):
            raise UserError(f"{name} holds {number}; expected a finite number")
    return worths


def read_kto(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """An answer and whether it is good; or all answers to one prompt, after `group_by_prompt`. SFT takes the good
    answers, a preference is every good answer with every bad one. KTO takes each answer alone."""
    if reading.column("messages"):
        column = dict(reading.columns)["messages"]
        asked, said = split_answer(reading.messages(value_at(row, column), "messages"), column, use != "prompt")
        if not asked:
            raise UserError(f"'{column}' has nothing before the assistant's answer")
        label = _is_good(value_at(row, dict(reading.columns)["label"]))
        answers = {"prompt": [], "sft": [said] if label else [], "unpaired": [said]}[use]
        if use == "sft" and not label:
            return []
        return [Draft(asked, answers, labels=(float(label),) if use == "unpaired" else ())]
    prompt = prompt_value(row, reading)
    if use == "prompt":
        return [Draft(_as_chat(prompt, row, reading))]
    column = dict(reading.columns)["response"]
    is_group = GROUP_ANSWERS in row
    values = row[GROUP_ANSWERS] if is_group else [value_at(row, column)]
    labels = row[GROUP_LABELS] if is_group else [value_at(row, dict(reading.columns)["label"])]
    good: list[tuple[int, str | Message]] = []
    bad: list[tuple[int, str | Message]] = []
    for number, (value, label) in enumerate(zip(values, labels, strict=True), start=1):
        (good if _is_good(label) else bad).append((number, _completion(value, reading)))
    prompt = _as_chat(prompt, row, reading)
    if use == "sft":
        return [Draft(prompt, [answer], f", answer {number}" if len(values) > 1 else "") for number, answer in good]
    if use == "unpaired":
        both = sorted([*((at, answer, 1.0) for at, answer in good), *((at, answer, 0.0) for at, answer in bad)],
                      key=lambda one: one[0])  # fmt: skip
        return [Draft(prompt, [answer], f", answer {at}" if is_group else "", (label,)) for at, answer, label in both]
    if not is_group:
        raise UserError("pairs of KTO rows need all rows of a prompt, so the data set cannot be streamed")
    return [
        Draft(prompt, [better, worse], f", answers {first} and {second}")
        for first, better in good
        for second, worse in bad
    ]


def _completion(value: Any, reading: Reading) -> str | Message:
    column, value = dict(reading.columns)["response"], from_json(value)
    if isinstance(value, str):
        return value
    if looks_like_messages(value):
        prefix, answer = split_answer(reading.messages(value, "response"), column)
        if not prefix:
            return answer
    raise UserError(f"'{column}' is {kind_of(value)}; expected text or one message of the assistant")


def _as_chat(prompt: str | Messages, row: Row, reading: Reading) -> str | Messages:
    """A text prompt whose answers are messages is the user's message."""
    values = row.get(GROUP_ANSWERS) or [row.get(dict(reading.columns)["response"])]
    is_chat = isinstance(prompt, str) and looks_like_messages(values[0])
    return [{"role": "user", "content": prompt}] if is_chat else prompt


def _is_good(label: Any) -> bool:
    """The label of an answer: true or false, 1 or 0 (also -1), as numbers of any type or as text, or a word for it."""
    text = str(label).strip().lower()
    if text not in LABELS:
        raise UserError(f"'label' is {kind_of(label)}; expected true or false (also good/bad, yes/no, 1/0, ...)")
    return LABELS[text]


def group_by_prompt(rows: Dataset, prompt: str, answer: str, label: str, context: tuple[str, ...] = ()) -> Dataset:
    """One row for each prompt of a whole data set of KTO rows; `prompt`, `answer` and `label` name its columns,
    `context` further ones that are part of what is asked, such as that of the system message.

    Returns:
        The first row of each prompt, in order, with all its answers in `GROUP_ANSWERS` and their labels in
        `GROUP_LABELS`, in the order of the rows.
    """
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(rows.select_columns([prompt, *context])):
        asked = row[prompt] if not context else [row[name] for name in (prompt, *context)]
        key = asked if isinstance(asked, str) else json.dumps(asked, default=str)
        groups.setdefault(key, []).append(number)
    order = [number for numbers in groups.values() for number in numbers]
    members = rows.select_columns([answer, label]).select(order).with_format("arrow")[:]
    grouped = rows.select([numbers[0] for numbers in groups.values()])
    for name, column in ((GROUP_ANSWERS, answer), (GROUP_LABELS, label)):
        key = hashlib.sha256(f"{grouped._fingerprint} {name} {column}".encode()).hexdigest()[:32]
        lists = _lists(members[column], [len(numbers) for numbers in groups.values()])
        grouped = grouped.add_column(name, lists, new_fingerprint=key)
    return grouped


def _lists(values: pyarrow.ChunkedArray, lengths: list[int]) -> pyarrow.ChunkedArray:
    """Consecutive values as lists of these lengths, some thousands at a time: 32-bit offsets hold 2 GiB of text."""
    parts, start = [], 0
    for at in range(0, len(lengths), _GROUPS):
        offsets = [0, *accumulate(lengths[at : at + _GROUPS])]
        part = values.slice(start, offsets[-1]).combine_chunks()
        parts.append(pyarrow.ListArray.from_arrays(pyarrow.array(offsets, pyarrow.int32()), part))
        start += offsets[-1]
    return pyarrow.chunked_array(parts)
