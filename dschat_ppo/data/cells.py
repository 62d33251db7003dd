"""What a reader of a form gets of a row, and what it returns: the values of a row by the roles that
the form gives to columns; answers with what they are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dschat_ppo.config.data_flags import Use
from dschat_ppo.data.examples import (
    Messages,
    Row,
    checked,
    field_at,
    from_json,
    has_value,
    json_value,
    kind_of,
    looks_like_messages,
    read_messages,
    scalar_as_text,
    text_at,
    turns_in,
)
from dschat_ppo.data.verdicts import Scale, lead_by_numbers, lead_of_first
from dschat_ppo.errors import UserError

_GOOD = (
    "true 1 1.0 good yes chosen desirable positive accepted accept correct safe helpful"
    " up thumbs_up thumbsup like liked upvote 👍"
)
_BAD = (
    "false 0 0.0 -1 -1.0 bad no rejected undesirable negative reject incorrect wrong unsafe"
    " unhelpful down thumbs_down thumbsdown dislike disliked downvote 👎"
)
LABELS = dict.fromkeys(_GOOD.split(), 1.0) | dict.fromkeys(_BAD.split(), 0.0)  # of single answers


class JudgedAnswer(NamedTuple):
    """One answer of a row: text, one or several messages, or the texts of its steps. `worth`: of
    two answers to a prompt the one of more is better; a label 1 (good) or 0 (bad), or the label of
    each step. `name`: in messages and names of rows."""

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
