"""Readers of the forms: from the columns of a row to its prompt and its answers.

A reader takes `(cells, use)` and returns the prompt, which does not depend on `use`, and the
answers that the use may take; for "prompt" it reads nothing that only answers need. What holds for
every form (nothing empty, nothing equal, which answers a use takes) is checked in `forms.py`.
Errors do not name the row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any, NamedTuple

from dschat_ppo.config.data_flags import Use
from dschat_ppo.data.examples import (
    CONTEXT,
    Message,
    Messages,
    Row,
    checked,
    field_at,
    from_json,
    has_value,
    json_value,
    kind_of,
    looks_like_messages,
    number_of,
    read_messages,
    scalar_as_text,
    text_at,
    turns_in,
    without_context,
)
from dschat_ppo.data.verdicts import Scale, lead_by_numbers, lead_of_first
from dschat_ppo.errors import UserError

# columns with a number for each answer: more is better
SCORES = ("scores", "ratings", "rewards", "rating")
RANKS = ("ranks", "rankings", "ranking", "rank")  # less is better
_GOOD = (
    "true 1 1.0 good yes chosen desirable positive accepted accept correct safe helpful"
    " up thumbs_up thumbsup like liked upvote 👍"
)
_BAD = (
    "false 0 0.0 -1 -1.0 bad no rejected undesirable negative reject incorrect wrong unsafe"
    " unhelpful down thumbs_down thumbsdown dislike disliked downvote 👎"
)
LABELS = dict.fromkeys(_GOOD.split(), 1.0) | dict.fromkeys(_BAD.split(), 0.0)  # of single answers
_HUMAN = "\n\nHuman:"
_ASSISTANT = "\n\nAssistant:"
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes"
    " the request.\n\n"
)
_ALPACA_INPUT = ", paired with an input that provides further context"
# keys of a ranked answer that is an object
TEXTS = "text", "answer", "response", "completion", "content"
_SCORE = ("score", "overall_score", "rating", "reward")


class JudgedAnswer(NamedTuple):
    """One answer of a row: text, a message, or the texts of its steps. `worth`: of two answers to a
    prompt the one of more is better; a label 1 (good) or 0 (bad), or the label of each step.
    `name`: in messages and names of rows."""

    value: Any
    worth: Any = 1.0
    name: str = ""


def pair_of(answers: list[Any]) -> list[JudgedAnswer]:
    """The better answer, and the worse one or several of them, if any."""
    pair = [JudgedAnswer(answer, 1.0, "chosen") for answer in answers[:1]]
    for position, answer in enumerate(answers[1:], start=1):
        name = "rejected"
        if len(answers) > 2:
            name = f"rejected answer {position}"
        pair.append(JudgedAnswer(answer, 0.0, name))
    return pair


Prompt = str | Messages
PromptAndAnswers = tuple[Prompt, Sequence[JudgedAnswer]]


@dataclass(frozen=True)
class Cells:
    """The values of one row by the roles that its form gives to columns. Errors name the column and
    not the row. `as_chat`: whether messages are asked for where a form can give both."""

    row: Row
    columns: dict[str, str]
    role_names: dict[str, str]
    as_chat: bool
    input_template: str | None
    scale: Scale = "words"  # what the numbers of a verdict are

    def has(self, role: str) -> bool:
        """Whether the form has a column of this role."""
        return role in self.columns

    def called(self, role: str) -> str:
        """The column in a message."""
        return f"'{self.columns[role]}'"

    def value(self, role: str) -> Any:
        """The value; messages that are stored as JSON text are parsed."""
        return from_json(field_at(self.row, self.columns[role]))

    def known(self, role: str) -> Any:
        """The value; None if the row lacks it."""
        if has_value(self.row, self.columns[role]):
            return self.value(role)
        return None

    def text(self, role: str) -> str:
        return text_at(self.row, self.columns[role])

    def texts(self, role: str) -> list[str]:
        """The text; of several rejected answers, the text of each."""
        value = field_at(self.row, self.columns[role])
        if role != "rejected" or not isinstance(value, list):
            return [self.text(role)]
        name = self.called(role)
        return [
            scalar_as_text(text, f"entry {n} of {name}") for n, text in enumerate(value, start=1)
        ]

    def listed(self, role: str, expected: str) -> list[Any]:
        """A list, perhaps stored as JSON text, as in CSV files."""
        return list(
            checked(
                json_value(field_at(self.row, self.columns[role])),
                list,
                self.called(role),
                expected,
            )
        )

    def messages(self, role: str, value: Any) -> Messages:
        """The normalised messages that a value in the column of a role holds."""
        return read_messages(value, self.columns[role], self.role_names)

    def prompt(self) -> Prompt:
        """The prompt as text or messages, after its earlier turns if there are any."""
        value = self.value("prompt")
        if isinstance(value, str):
            if self.has("history"):
                return [*self.history(), {"role": "user", "content": value}]
            return value
        if value != [] and not looks_like_messages(value):
            expected = "text or a list of role/content messages"
            raise UserError(f"{self.called('prompt')} is {kind_of(value)}; expected {expected}")
        return [*self.history(), *self.messages("prompt", value)]

    def history(self) -> Messages:
        """The earlier turns: pairs of question and answer, or messages; [] without any."""
        if not self.has("history") or not self.value("history"):
            return []
        expected = "pairs of question and answer"
        pairs = self.listed("history", expected)
        if pairs and not turns_in(pairs) and not looks_like_messages(pairs):
            raise UserError(f"'history' holds {kind_of(pairs[0])}; expected {expected}")
        if pairs:
            return self.messages("history", pairs)
        return []


# Prompts and answers that are text or messages


def read_columns(cells: Cells, use: Use) -> PromptAndAnswers:
    """A prompt, or a conversation that holds it, with an answer, or a better and a worse one; each
    is text or messages. SFT learns the response if there is one. Answers may repeat the prompt, and
    as messages also continue it."""
    better = next((role for role in ("chosen", "response", "messages") if cells.has(role)), "")
    prompt: Prompt | None = None
    if cells.has("prompt"):
        prompt = cells.prompt()
    elif cells.has("messages") and better == "chosen":
        prompt = cells.messages("messages", cells.value("messages"))
    full_prompt = prompt
    answers = list[Any]()
    for role in _roles_to_read(cells, use, better):
        value = cells.value(role)
        if role != "messages" and not looks_like_messages(value):
            answers += cells.texts(role)
            continue
        *before, answer = cells.messages(role, value)
        if role == "messages" and use == "prompt" and answer["role"] != "assistant":
            return [*before, answer], []
        _check_answer(answer, cells.called(role), use)
        begins_itself = before and before[0]["role"] != "assistant"
        if answers and begins_itself and not _same(before, full_prompt):
            raise UserError("chosen and rejected answer different prompts")
        prompt_of_answer = _with_prompt(prompt, before, cells.called(role))
        if answers and not _same(prompt_of_answer, full_prompt):
            raise UserError("chosen and rejected answer different prompts")
        if not answers:
            full_prompt = prompt_of_answer
        if prompt is None:
            prompt = prompt_of_answer
        is_plain = set(answer) == {"role", "content"}
        answers.append(answer["content"] if is_plain else answer)
    if isinstance(prompt, str) and _answers_repeat(prompt, cells, better):
        answers = [
            answer.removeprefix(prompt) if isinstance(answer, str) else answer for answer in answers
        ]
    if use == "sft":
        answers = answers[-1:]
    return full_prompt or "", pair_of(answers)


def _roles_to_read(cells: Cells, use: Use, better: str) -> list[str]:
    """The roles of the columns whose answers a use takes. `better`: the role of the better answer,
    or "". If that is a conversation, its messages are the prompt of all uses, so it is read
    first."""
    roles = list[str]()
    if use == "sft":
        roles = ["response" if cells.has("response") else better]
    elif use == "preference":
        roles = [better, "rejected"]
    if better == "messages" or (better and looks_like_messages(cells.known(better))):
        return list(dict.fromkeys([better, *roles]))
    return roles


def _check_answer(answer: Message, column: str, use: Use) -> None:
    """Refuse a last message that is not the assistant's, or that a use may not train."""
    if answer["role"] != "assistant":
        raise UserError(
            f"{column} ends with a message of role '{answer['role']}', not the assistant's"
        )
    if CONTEXT in answer and use != "prompt":
        raise UserError(f"the answer of {column} is excluded from training (weight 0)")


def _answers_repeat(prompt: str, cells: Cells, better: str) -> bool:
    """Whether the better answer and the rejected one both start with the prompt."""
    if not better or not cells.has("rejected"):
        return False
    return all(str(cells.known(role)).startswith(prompt) for role in (better, "rejected"))


def _with_prompt(prompt: Prompt | None, before: Messages, column: str) -> Messages:
    """The whole prompt of an answer: a prompt and the messages before the answer, which may repeat
    it."""
    continues = not before or before[0]["role"] == "assistant"
    if prompt is None:
        if not before:
            raise UserError(f"{column} has nothing before the assistant's answer")
        return before
    if isinstance(prompt, str):
        if continues:
            return [{"role": "user", "content": prompt}, *before]
        questions = [turn["content"].strip() for turn in before if turn["role"] == "user"]
        if prompt.strip() not in questions:
            raise UserError(f"the prompt is not among the messages of {column}")
        return before
    if prompt and continues:
        return prompt + before
    is_start = _same(before[: len(prompt)], prompt)
    is_end = _same(before[-len(prompt) :], prompt)
    if prompt and not is_start and not is_end:
        raise UserError(f"the messages of {column} do not start with those of the prompt")
    return before


def _same(first: Prompt | None, second: Prompt | None) -> bool:
    """Whether prompts are equal, whatever turns of messages are excluded from training."""
    if isinstance(first, list):
        first = without_context(first)
    if isinstance(second, list):
        second = without_context(second)
    return first == second


def read_implicit_preference(cells: Cells, use: Use) -> PromptAndAnswers:
    """Two conversations or texts that start with the same prompt; that of texts ends where they
    begin to differ."""
    if all(looks_like_messages(cells.value(role)) for role in ("chosen", "rejected")):
        return read_columns(cells, use)
    chosen = cells.text("chosen")
    rejected = cells.text("rejected")
    cut = len(commonprefix([chosen, rejected]))
    if chosen[cut - 1 : cut] == " " or cut == min(len(chosen), len(rejected)):
        # of a text with which the other starts, the last character is the answer, as in TRL
        cut -= 1
    if cut <= 0:
        raise UserError("chosen and rejected do not start with the same prompt")
    return chosen[:cut], pair_of([chosen[cut:], rejected[cut:]])


def read_transcript(cells: Cells, use: Use) -> PromptAndAnswers:
    """Text with turns that start with two line breaks and `Human:` or `Assistant:`; the last turn
    is the answer."""
    if use == "preference":
        roles = ["chosen", "rejected"]
    elif cells.has("messages"):
        roles = ["messages"]
    else:
        roles = ["chosen"]
    prompts = list[str]()
    answers = list[str]()
    for role in roles:
        before, marker, answer = cells.text(role).rpartition(_ASSISTANT)
        if not marker or _HUMAN in answer:
            raise UserError(
                f"{cells.called(role)} does not end with a turn that starts with {_ASSISTANT!r}"
            )
        prompts.append(before)
        answers.append(answer.strip() if cells.as_chat else answer)
    if prompts[-1] != prompts[0]:
        raise UserError(
            "chosen and rejected answer different prompts: they differ before the last turn"
        )
    if not cells.as_chat:
        return prompts[0] + _ASSISTANT, pair_of(answers)
    # the text before the first turn, then the name and the text of each turn
    first, *names_and_texts = re.split(r"\n\n(Human|Assistant):", prompts[0])
    turns = Messages()
    if first.strip():
        turns.append({"role": "system", "content": first.strip()})
    for name, text in zip(names_and_texts[::2], names_and_texts[1::2], strict=True):
        role = "user" if name == "Human" else "assistant"
        turns.append({"role": role, "content": text.strip()})
    return turns, pair_of(answers)


def read_alpaca(cells: Cells, use: Use) -> PromptAndAnswers:
    """An instruction with an optional input and earlier turns, and its answer, or a better and a
    worse one."""
    lead = 1
    if cells.has("first"):
        cells, lead = judged(cells, use)
    question = cells.text("prompt")
    template = cells.input_template
    history = cells.history()
    extra = ""
    if cells.has("input"):
        extra = cells.value("input") or ""
    checked(extra, str, f"'{cells.columns.get('input')}'", "text")
    if not question:
        question = extra
        extra = ""
    if not question:
        raise UserError("the instruction is empty")
    prompt: Prompt = question
    if extra:
        prompt = f"{question}\n\n{extra}"
    if cells.as_chat:
        content = (template or "{}").replace("{}", str(prompt))
        prompt = [*history, {"role": "user", "content": content}]
    elif history:
        raise UserError(
            "'history' holds earlier turns, which need the chat template; --apply_chat_template"
            " True"
        )
    elif template is None:
        prompt = _alpaca_prompt(question, extra)
    roles = list[str]()
    if use == "sft":
        roles = ["response" if cells.has("response") else "chosen"]
    elif use == "preference":
        roles = ["chosen", "rejected"]
    answers = pair_of([text for role in roles for text in cells.texts(role)])
    return prompt, answers if lead else []


def _alpaca_prompt(question: str, extra: str) -> str:
    """The text of Alpaca around an instruction and its input, which may be ""."""
    if not extra:
        return f"{_ALPACA.format('')}### Instruction:\n{question}\n\n### Response:\n"
    return (
        f"{_ALPACA.format(_ALPACA_INPUT)}### Instruction:\n{question}\n\n"
        f"### Input:\n{extra}\n\n### Response:\n"
    )


def read_better(cells: Cells, use: Use) -> PromptAndAnswers:
    """Two answers to a prompt, or two conversations that begin with it, and which one is better. In
    lists of texts (Chatbot Arena's 55k) the prompt has the turns of the user, each answer those of
    the assistant."""
    pair, lead = judged(cells, use)
    asked = None
    if cells.has("prompt"):
        asked = json_value(field_at(cells.row, cells.columns["prompt"]))
    if isinstance(asked, list) and asked and all(isinstance(text, str) for text in asked):
        row = dict(cells.row)
        for role in ("chosen", "rejected"):
            said = pair.listed(role, f"a list of turns, as {cells.called('prompt')}")
            if len(said) != len(asked):
                raise UserError(
                    f"{pair.called(role)} has {len(said)} turns, but {cells.called('prompt')}"
                    f" {len(asked)}"
                )
            turns = [text for turn in zip(asked, said, strict=True) for text in turn]
            row[pair.columns[role]] = pair.messages(role, turns)
        columns = {role: column for role, column in pair.columns.items() if role != "prompt"}
        pair = replace(pair, row=row, columns=columns)
    is_tie = use != "prompt" and not lead
    # no pair is made of a tie, whose two answers may follow two conversations
    prompt, answers = read_columns(pair, "sft" if is_tie else use)
    return prompt, [] if is_tie else answers


def judged(cells: Cells, use: Use) -> tuple[Cells, int]:
    """The cells with the better of two answers as `chosen` and the other one as `rejected`, by a
    verdict or a number of each, and the lead of the first answer: 1, -1, or 0 for a tie. Prompts
    need no verdict."""
    first = cells.columns["first"]
    second = cells.columns["second"]
    lead = 0
    if use != "prompt" and cells.has("better"):
        column = cells.columns["better"]
        verdict = field_at(cells.row, column)
        lead = lead_of_first(verdict, column, cells.scale, (first, second), cells.row)
    elif use != "prompt":
        number_columns = (cells.columns["first_number"], cells.columns["second_number"])
        lead = lead_by_numbers(cells.row, number_columns)
    roles = {"prompt", "input", "history"} & set(cells.columns)
    columns = {role: cells.columns[role] for role in roles}
    if lead >= 0:
        columns |= {"chosen": first, "rejected": second}
    else:
        columns |= {"chosen": second, "rejected": first}
    return replace(cells, columns=columns), lead


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
