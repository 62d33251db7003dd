"""Readers of answers that are judged: two of which one is better, lists with scores or ranks, and
single ones that are good or bad. As other readers (`form_readers.py`), these take `(cells, use)`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dschat_ppo.config.data_flags import Use
from dschat_ppo.data.cells import LABELS, Cells, JudgedAnswer, PromptAndAnswers, judged
from dschat_ppo.data.examples import checked, field_at, json_value, kind_of, number_of
from dschat_ppo.data.form_readers import (
    is_transcript,
    read_alpaca,
    read_columns,
    read_transcript,
)
from dschat_ppo.errors import UserError, counted

# columns with a number for each answer: more is better
SCORES = ("scores", "ratings", "rewards", "rating")
RANKS = ("ranks", "rankings", "ranking", "rank")  # less is better
# keys of a ranked answer that is an object
TEXTS = "text", "answer", "response", "completion", "content"
_SCORE = ("score", "overall_score", "rating", "reward")


def read_better(cells: Cells, use: Use) -> PromptAndAnswers:
    """Two answers to a prompt, or two conversations or transcripts that begin with it, and which
    one is better. In lists of texts (Chatbot Arena's 55k) the prompt has the texts of the user,
    each answer those of the assistant."""
    pair, lead = judged(cells, use)
    asked = None
    if cells.has("prompt"):
        asked = json_value(field_at(cells.row, cells.columns["prompt"]))
    if isinstance(asked, list) and asked and all(isinstance(text, str) for text in asked):
        row = dict(cells.row)
        for role in ("chosen", "rejected"):
            said = pair.listed(role, f"a list of texts, as {cells.called('prompt')}")
            if len(said) != len(asked):
                raise UserError(
                    f"{pair.called(role)} has {counted(len(said), 'text')}, but"
                    f" {cells.called('prompt')} {len(asked)}"
                )
            texts = [text for turn in zip(asked, said, strict=True) for text in turn]
            row[pair.columns[role]] = pair.messages(role, texts)
        columns = {role: column for role, column in pair.columns.items() if role != "prompt"}
        pair = replace(pair, row=row, columns=columns)
    is_tie = use != "prompt" and not lead
    reader = read_columns
    if not cells.has("prompt") and is_transcript(pair.value("chosen")):
        reader = read_transcript
    # no pair is made of a tie, whose two answers may follow two conversations
    prompt, answers = reader(pair, "sft" if is_tie else use)
    return prompt, [] if is_tie else answers


def read_ranked(cells: Cells, use: Use) -> PromptAndAnswers:
    """A list of answers with ranks or scores, in a list of their own or in the answers."""
    prompt = cells.prompt()
    if use == "prompt":
        return prompt, []
    name = cells.called("response")
    values = cells.listed("response", "a list of answers")
    # the scores or ranks are in a column, or else under a key of each answer
    role = next((role for role in ("ranks", "scores") if cells.has(role)), "")
    key = "" if role else _key_of_scores(values)
    if not role and not key:
        raise UserError(
            f"the answers of {name} have no score or rank, and no column {', '.join(SCORES)} is"
            " there"
        )
    if role:
        scores = cells.listed(role, "a list of numbers")
        where = cells.called(role)
    else:
        scores = [value[key] for value in values]
        where = f"'{key}' in {name}"
    if len(scores) != len(values) or not values:
        raise UserError(f"{name} has {len(values)} answers, but {where} {len(scores)} numbers")
    sign = -1 if role == "ranks" or key in RANKS else 1
    answers = []
    for position, (value, score) in enumerate(zip(values, scores, strict=True), start=1):
        text = value
        if isinstance(value, dict):
            text = next((value[key] for key in TEXTS if value.get(key) is not None), value)
        expected = f"text, or an object with {', '.join(TEXTS[:3])}"
        checked(text, str, f"answer {position} of {name}", expected)
        worth = sign * number_of(score, f"an entry of {where}")
        answers.append(JudgedAnswer(text, worth, f"answer {position}"))
    return prompt, answers


def _key_of_scores(values: list[Any]) -> str:
    """The key under which each of the answers, which are objects, has its score or rank, or ""."""
    if not values or not all(isinstance(value, dict) for value in values):
        return ""
    for key in (*RANKS, *_SCORE):
        if all(key in value for value in values):
            return key
    return ""


def read_kto(cells: Cells, use: Use) -> PromptAndAnswers:
    """A prompt and an answer, or a conversation, and whether the answer is good."""
    reader = read_columns
    if cells.has("input"):
        if cells.columns.get("prompt") == "instruction":
            reader = read_alpaca
        elif cells.known("input"):
            way = f"--ignore_columns {cells.columns['input']} leaves it out"
            raise UserError(f"{cells.called('input')} holds content beside the prompt; {way}")
    prompt, answers = reader(cells, "sft" if use == "unpaired" else use)
    if use == "prompt":
        return prompt, []
    label = field_at(cells.row, cells.columns["label"])
    word = str(label).strip().lower()
    if word not in LABELS:
        raise UserError(
            f"{cells.called('label')} is {kind_of(label)}; expected true or false (also good/bad,"
            " yes/no, 1/0, ...)"
        )
    return prompt, [JudgedAnswer(answers[0].value, LABELS[word])]
