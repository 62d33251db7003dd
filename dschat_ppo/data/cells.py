"""What a reader of a form gets of a row, and what it returns: the values of a row by the roles that
the form gives to columns; answers with what they are worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dschat_ppo.config.data_flags import Use
from dschat_ppo.data.examples import (
    Messages,
    Row,
    checked,
    field_at,
    has_value,
    json_value,
    kind_of,
    scalar_as_text,
    text_at,
)
from dschat_ppo.data.messages import (
    from_json,
    looks_like_messages,
    read_messages,
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
    """One answer of a row: text, one or several messages, or what a use of a feature reads.
    `worth`: of two answers to a prompt the one of more is better; a label 1 (good) or 0 (bad), or
    several labels. `name`: in messages and names of rows."""

    value: Any
    worth: Any = 1.0
    name: str = ""


Prompt = str | Messages
PromptAndAnswers = tuple[Prompt, Sequence[JudgedAnswer]]


@dataclass(frozen=True)
class Cells:
    """The values of one row by the roles that its form gives to columns, each read once, when it is
    needed. Errors name the column and not the row. `as_chat`: whether messages are asked for where
    a form can give both."""

    row: Row
    columns: dict[str, str]
    role_names: dict[str, str]
    as_chat: bool
    input_template: str | None
    scale: Scale = "words"  # what the numbers of a verdict are
    _values: dict[str, Any] = field(default_factory=dict, init=False)  # role -> value

    def has(self, role: str) -> bool:
        """Whether the form has a column of this role."""
        return role in self.columns

    def called(self, role: str) -> str:
        """The column in a message."""
        return f"'{self.columns[role]}'"

    def value(self, role: str) -> Any:
        """The value; messages that are stored as JSON text are parsed."""
        if role not in self._values:
            self._values[role] = from_json(field_at(self.row, self.columns[role]))
        return self._values[role]

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
        if role == "rejected" and isinstance(value, list):
            return self._texts_of_entries(role, value)
        return [self.text(role)]

    def _texts_of_entries(self, role: str, entries: list[Any]) -> list[str]:
        """The text of each entry of a list."""
        texts = list[str]()
        for position, text in enumerate(entries, start=1):
            texts.append(scalar_as_text(text, f"entry {position} of {self.called(role)}"))
        return texts

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

    def said(self, roles: Iterable[str]) -> dict[str, Any]:
        """What the columns of some roles say: the prompt, which is text or messages, and answers,
        which are a list of texts or messages."""
        said = dict[str, Any]()
        for role in roles:
            said[role] = self.prompt() if role == "prompt" else self.texts_or_messages(role)
        return said

    def texts_or_messages(self, role: str) -> list[str] | Messages:
        """The messages that a column holds, or else its texts."""
        if role == "messages" or looks_like_messages(self.value(role)):
            return self.messages(role, self.value(role))
        return self.texts(role)

    def prompt(self) -> Prompt:
        """The prompt as text or messages, after its earlier messages if there are any."""
        value = self.value("prompt")
        if isinstance(value, str):
            return self._after_history(value)
        return [*self.history(), *self._prompt_messages(value)]

    def _after_history(self, text: str) -> Prompt:
        """A prompt that is text, as a message if a history precedes it."""
        if not self.has("history"):
            return text
        return [*self.history(), {"role": "user", "content": text}]

    def _prompt_messages(self, value: Any) -> Messages:
        """The messages of a prompt that is no text."""
        if value == [] or looks_like_messages(value):
            return self.messages("prompt", value)
        expected = "text or a list of role/content messages"
        raise UserError(f"{self.called('prompt')} is {kind_of(value)}; expected {expected}")

    def history(self) -> Messages:
        """The earlier messages, which may be pairs of question and answer; [] without any."""
        if self.has("history") and self.value("history"):
            return self._earlier_messages()
        return []

    def _earlier_messages(self) -> Messages:
        """The earlier messages of a row that has some."""
        expected = "pairs of question and answer"
        pairs = self.listed("history", expected)
        if not pairs:
            return []
        if not turns_in(pairs) and not looks_like_messages(pairs):
            raise UserError(f"'history' holds {kind_of(pairs[0])}; expected {expected}")
        return self.messages("history", pairs)


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
