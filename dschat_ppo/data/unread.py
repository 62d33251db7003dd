"""What a data set has that its form does not read: the error that says so, and the columns whose
content would be lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dschat_ppo.config.data_flags import Use
from dschat_ppo.data.advice import Advice, Choice, choices_in_words
from dschat_ppo.data.content import (
    NO_COPIES,
    PICTURES,
    all_in,
    is_content,
    is_of_rewards,
    lines_of,
)
from dschat_ppo.data.examples import Row, field_at, has_value
from dschat_ppo.data.messages import from_json
from dschat_ppo.data.verdicts import TURNING, TWO_ANSWERS, lead_by_names, side_named
from dschat_ppo.errors import UserError

_OF_PAIRS = {column for pair in TWO_ANSWERS for column in pair}


class UnreadError(UserError):
    """A data set that is not read as it is. `what` is wrong; `choices` may lead out, which are to
    be tried (`readings.py`), and `way` where no flags do, or in their place if it `is_sure`.
    `lost`: the columns whose content would be lost."""

    def __init__(
        self,
        what: str,
        way: str,
        lost: Sequence[str] = (),
        is_sure: bool = False,
        choices: Sequence[Choice] = (),
    ):
        super().__init__(f"{what}; {choices_in_words(choices) or way}")
        self.what = what
        self.way = way
        self.lost = tuple(lost)
        self.is_sure = is_sure
        self.choices = tuple(choices)


@dataclass(frozen=True)
class WatchedColumns:
    """Columns of a data set whose content would be lost.

    Attributes:
        names: The columns, or fields inside them.
        by_role: Role -> column of those that the form reads.
        form_name: The form, for messages, as the next one.
        advice: Ways out.
    """

    names: tuple[str, ...] = ()
    by_role: dict[str, str] = field(default_factory=dict, repr=False)
    form_name: str = field(default="", repr=False)
    advice: Advice = field(default=Advice(), repr=False)

    @cached_property
    def roots(self) -> frozenset[str]:
        """The columns of rows that hold these, which may be fields inside them."""
        return frozenset(self.names) | {name.split(".")[0] for name in self.names}

    def check(self, rows: list[Row], use: Use | None = None) -> None:
        """Refuse rows with content in columns that the form does not use for a use (None: for
        any)."""
        lost = dict[str, Any]()
        for row in rows:
            for column, value in self.lost_in(row).items():
                is_of_answers = is_of_rewards(column) or self._is_verdict(column, value)
                if use != "prompt" or not is_of_answers:
                    lost.setdefault(column, value)
        if not lost:
            return
        of_pairs = list[str]()
        answers = _OF_PAIRS
        if use in ("preference", "unpaired"):
            answers = answers | self.advice.columns_of_answers
        for column, value in lost.items():
            if column in answers or self._is_verdict(column, value):
                of_pairs.append(column)
        choices = list[Choice]()
        column = next(iter(lost))
        if of_pairs:  # other flags may train pairs upside down
            column = of_pairs[0]
            choices += self.advice.pairs
        is_known = any(choice.flags.get("better_column") == column for choice in choices)
        if not is_known and self._lead_said(column, lost[column]) is not None:
            flags = {f"{role}_column": self.by_role[role] for role in ("chosen", "rejected")}
            condition = f"if '{column}' says which answer is better"
            choices.append(Choice(condition, {**flags, "better_column": column}))
        if choices and column not in answers and "chosen" in self.by_role:
            condition = f"if '{self.by_role['chosen']}' is always the better answer"
            choices.append(Choice(condition, {"ignore_columns": " ".join(of_pairs)}))
        value = lost[column]
        way = f"--ignore_columns {' '.join(lost)} leaves out the column"
        further_columns = [repr(name) for name in lost if name != column]
        further = f" (nor {', '.join(further_columns)})" if further_columns else ""
        what = f"holds content, {str(value)[:60]!r}, that the form {self.form_name} does not use"
        if column in PICTURES:
            what += ", because the model does not see it"
        if self._lead_said(column, value) == -1:
            what = f"is {value!r}, by which '{self.by_role['rejected']}' is the better answer"
        raise UnreadError(
            f"'{column}' {what}{further}",
            way,
            list(lost),
            is_sure=bool(choices),
            choices=choices,
        )

    def _lead_said(self, column: str, value: Any) -> int | None:
        """1 if a value says that the chosen answer is better, by the names of the columns, -1 if it
        says so of the rejected one, 0 if of none, and None if it says nothing of them."""
        if not {"chosen", "rejected"} <= set(self.by_role):
            return None
        return lead_by_names(column, value, (self.by_role["chosen"], self.by_role["rejected"]))

    def _is_verdict(self, column: str, value: Any) -> bool:
        """Whether a column may turn around the pairs of two others, by its name or this value."""
        if column in TURNING or not {"chosen", "rejected"} <= set(self.by_role):
            return column in TURNING
        has_side = side_named(column, (self.by_role["chosen"], self.by_role["rejected"])) != 0
        return has_side or self._lead_said(column, value) is not None

    def lost_in(self, row: Row) -> dict[str, Any]:
        """The columns whose content the form does not use, with it. It is no loss if its lines are
        in the columns that are used (a conversation next to its prompt and answer), or if it holds
        all of these but the rejected answer (the same as one text)."""
        if self.roots.isdisjoint(row):
            return {}
        contents = dict[str, Any]()  # of columns that the form does not use
        for name in self.names:
            if (name in row or "." in name) and has_value(row, name):
                value = from_json(field_at(row, name))
                # a verdict that agrees with the names of the answers changes nothing
                if is_content(name, value) and self._lead_said(name, value) != 1:
                    contents[name] = value
        if not contents:
            return {}
        used_lines = list[str]()
        needed_lines = list[str]()
        for role, path in self.by_role.items():
            if has_value(row, path):
                lines = lines_of(from_json(field_at(row, path)))
                used_lines += lines
                if role != "rejected":
                    needed_lines += lines
        if not needed_lines:
            return {}
        lost = dict[str, Any]()
        for column, value in contents.items():
            lines = lines_of(value)
            is_copy = (bool(lines) and all_in(lines, used_lines)) or all_in(needed_lines, lines)
            if column in NO_COPIES or self._is_verdict(column, value) or not is_copy:
                lost[column] = value
        return lost
