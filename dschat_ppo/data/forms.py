"""A form: how the rows of one data set become examples, in all three steps. `form_choice.py` finds
it.

The reader of the form finds the prompt and the answers of a row. All else is here, and alike for
every form: which answers a use takes, the last checks, the system message, tools, margin and
correct answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from dschat_ppo.common.own_functions import own_function, running_own
from dschat_ppo.config.data_flags import DataFlags, Use
from dschat_ppo.data.advice import Advice
from dschat_ppo.data.content import NO_COPIES, all_in, is_content, is_of_rewards, lines_of
from dschat_ppo.data.examples import (
    CONTEXT,
    Example,
    Row,
    checked,
    from_json,
    has_value,
    json_value,
    margin_of,
    read_tools,
    tools_beside,
    truth_of,
    value_at,
    without_context,
)
from dschat_ppo.data.form_kinds import Kind
from dschat_ppo.data.form_readers import Answer, Cells, Prompt
from dschat_ppo.data.verdicts import TURNING, TWO_ANSWERS, Scale
from dschat_ppo.errors import UserError, printable_line

_OF_PAIRS = {column for pair in TWO_ANSWERS for column in pair}
_NEEDED = {
    "sft": "a prompt and an answer",
    "preference": "a prompt and two answers",
    "unpaired": "answers with labels (prompt/completion/label), or pairs of answers",
    "steps": (
        "the steps of answers with a label for each (prompt/completions/labels, PRM800K,"
        " Math-Shepherd)"
    ),
    "prompt": "a prompt",
}


class UnreadError(UserError):
    """A data set that is not read as it is. `what` is wrong; `way` leads out, where no flags do
    that have been tried (`readings.py`), or in their place if it `is_sure`. `lost`: the columns
    whose content would be lost."""

    def __init__(self, what: str, way: str, lost: Sequence[str] = (), is_sure: bool = False):
        super().__init__(f"{what}; {way}")
        self.what = what
        self.way = way
        self.lost = tuple(lost)
        self.is_sure = is_sure


@dataclass(frozen=True)
class Form:
    """How the rows of one data set are read. It can be pickled."""

    kind: Kind = field(repr=False)
    columns: dict[str, str]  # role -> column, such as "prompt": "question"
    rendering: Literal["chat", "text"] = "text"
    # text around a prompt that is text; `{}` stands for the prompt
    input_template: str | None = None
    scale: Scale = "words"  # what the numbers of a verdict on two answers are
    system: str | None = None  # a column, as the next two
    tools: str | None = None
    variables: str | None = None  # of the chat template
    truth: str | None = None
    # finds the correct answer in that column; None takes the whole value
    truth_pattern: str | None = None
    system_message: str | None = None
    # further names of roles in messages -> roles
    role_names: dict[str, str] = field(default_factory=dict)
    watched: tuple[str, ...] = ()  # columns whose content would be lost
    function: str | None = None  # the `FILE.py:FUNCTION` that makes rows of this form
    file_sha: str = ""  # a hash of its file
    # the data set, its columns and the form, for messages
    about: str = field(default="", repr=False)
    description: str = field(default="", repr=False)  # what was understood, one line for the log
    warning: str = field(default="", repr=False)  # what may be wrong with it
    names: tuple[str, ...] = field(default=(), repr=False)  # all columns of the data set
    advice: Advice = field(default=Advice(), repr=False)  # for messages
    row_way: str = field(default="", repr=False)  # for messages about rows

    @property
    def name(self) -> str:
        return self.kind.name

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """What the form serves."""
        return self.kind.uses(self.columns)

    @cached_property
    def _watched_columns(self) -> frozenset[str]:
        """The columns of rows that hold `watched`, which may be fields inside them."""
        return frozenset(self.watched) | {name.split(".")[0] for name in self.watched}

    @property
    def identity(self) -> str:
        """Text that differs between forms that read rows differently, for keys of caches."""
        return f"{self.name} {self!r}"

    def require(self, use: Use) -> None:
        """Refuse a use that the form does not serve. The message lists the columns and what the
        step needs."""
        if use not in self.uses:
            way = self.advice.for_use(use)
            if self.kind.labelled and use == "preference":
                way = "answers with labels are for --objective kto"
            what = f"{self.about}; this step needs {_NEEDED[use]}"
            raise UnreadError(what, way, is_sure=bool(self.advice.sets))

    def read(self, row: Row, use: Use) -> list[Example]:
        """The examples of one row, none or more, all with the same prompt. `UserError`, without the
        name of the row, if it is bad, and for a use that the form does not serve."""
        self.require(use)
        found = list[Example]()
        for made in [row] if self.function is None else rows_made(self.function, row):
            try:
                examples = self.examples_of(made, use)
            except UserError as problem:
                way = f"; {self.row_way}" if self.row_way else ""
                raise UserError(f"{problem}{way}") from None
            if examples:
                prompt = self._rendered(examples[0].prompt, made)
                context = tuple[int, ...]()
                if isinstance(prompt, list):
                    context = tuple(
                        number for number, message in enumerate(prompt) if CONTEXT in message
                    )
                    prompt = without_context(prompt)
                margin = margin_of(made) if "rejected" in self.columns else 0.0
                truth = None
                if self.truth and (use == "prompt" or has_value(made, self.truth)):
                    truth = truth_of(made, self.truth, self.truth_pattern)
                tools = self._tools_of(made)
                several = len(examples) > 1
                found += [
                    Example(
                        prompt,
                        one.answers,
                        margin,
                        truth,
                        tools,
                        one.suffix * several,
                        one.labels,
                        context,
                        self._variables_of(made),
                    )
                    for one in examples
                ]
            self.check_unused([made], use)
        return found

    def examples_of(self, row: Row, use: Use) -> list[Example]:
        """What the reader finds in a row for a use, before the prompt is rendered."""
        is_chat = self.rendering == "chat"
        template = self.input_template
        cells = Cells(row, self.columns, self.role_names, is_chat, template, self.scale)
        is_pair = use == "unpaired" and not self.kind.labelled  # which is split below
        prompt, answers = self.kind.read(cells, "preference" if is_pair else use)
        if not prompt and self.name != "text":
            raise UserError("the prompt is empty")
        if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            asked = next(
                self.columns[r]
                for r in ("prompt", "messages", "chosen", "first", "response")
                if cells.has(r)
            )
            raise UserError(
                f"the prompt in '{asked}' ends with the assistant's message: nothing is left to"
                " answer"
            )
        if use == "prompt":
            return [Example(prompt)]
        if use == "steps":
            found = [
                Example(prompt, one.value, suffix=f", {one.name}", labels=one.worth)
                for one in answers
            ]
        elif self.kind.labelled:
            good = [one for one in answers if use == "unpaired" or one.worth]
            found = [
                _example(prompt, [one], (one.worth,) if use == "unpaired" else ()) for one in good
            ]
        elif not answers:  # a tie
            found = []
        else:
            # stable: of equal ones the first comes first
            order = sorted(answers, key=lambda one: -one.worth)
            best = order[0]
            worst = min(order, key=lambda one: one.worth)
            if use == "sft":
                return [_example(prompt, [best])]
            pairs = [
                [a, b] for at, a in enumerate(order) for b in order[at + 1 :] if a.worth > b.worth
            ]
            found = [_example(prompt, pair) for pair in pairs]
            if use == "unpaired" and found:
                bad = [worst] if self.name == "ranked" else order[1:]  # each is a rejected answer
                found = [_example(prompt, [best], (1.0,))]
                found += [_example(prompt, [one], (0.0,)) for one in bad]
        return found

    def _rendered(self, prompt: Prompt, row: Row) -> Prompt:
        """The prompt as text or messages, as the rendering says, with the system message before
        it."""
        if self.rendering == "text":
            if isinstance(prompt, list):
                raise UserError(
                    "the prompt is a list of chat messages, but those of the first rows are text"
                )
            if self.input_template is None:
                return prompt
            return self.input_template.replace("{}", prompt)
        if isinstance(prompt, str):
            prompt = [
                {"role": "user", "content": (self.input_template or "{}").replace("{}", prompt)}
            ]
        given = value_at(row, self.system) if self.system else None
        if given in (None, ""):
            system = self.system_message
        else:
            system = checked(given, str, f"'{self.system}'", "text")
        if prompt[0]["role"] not in ("system", "developer"):
            if system:
                return [{"role": "system", "content": system}, *prompt]
            return prompt
        if given not in (None, "") and prompt[0]["content"] != given:
            raise UserError(
                f"'{self.system}' and the first message are two different system messages"
            )
        return prompt

    def _tools_of(self, row: Row) -> list[Any] | None:
        """The tools of a row: of their column, or those in one object with the messages. All must
        be equal."""
        if self.tools and self.rendering == "chat":
            given = [(self.tools, value_at(row, self.tools))]
        else:
            given = []
        for path in self.columns.values():
            # messages named by a dot (`input.messages`) have the tools beside them (`input.tools`)
            holder = path.removesuffix(".messages")
            if has_value(row, holder):
                given.append((holder, tools_beside(value_at(row, holder))))
        # most rows have none
        given = [(column, value) for column, value in given if value is not None]
        found = [(column, tools) for column, value in given if (tools := read_tools(value, column))]
        for column, tools in found:
            if tools != found[0][1]:
                raise UserError(f"'{column}' describes other tools than the rest of the row")
        return found[0][1] if found else None

    def _variables_of(self, row: Row) -> dict[str, Any] | None:
        """The variables that a row has for the chat template; null is none, as in Arrow."""
        if self.variables is None or not has_value(row, self.variables):
            return None
        value = json_value(value_at(row, self.variables))
        known = checked(value, dict, f"'{self.variables}'", "an object of variables or its JSON")
        return {name: inner for name, inner in known.items() if inner is not None}

    def check_unused(self, rows: list[Row], use: Use | None = None) -> None:
        """Refuse rows with content in columns that the form does not use for a use (None: for
        any)."""
        lost = dict[str, Any]()
        for row in rows:
            for column, value in self._lost_in(row).items():
                if use != "prompt" or not is_of_rewards(column):
                    lost.setdefault(column, value)
        if not lost:
            return
        told = [column for column in lost if column in _OF_PAIRS or column in TURNING]
        is_sure = bool(told and self.advice.pairs)  # other flags may train pairs upside down
        column = told[0] if is_sure else next(iter(lost))
        value = lost[column]
        flag = f"--ignore_columns {' '.join(lost)}"
        if column in _OF_PAIRS and self.advice.pairs:
            way = self.advice.pairs
        elif column in TURNING and self.advice.pairs:
            way = f"{self.advice.pairs}; {flag} leaves out the column"
        else:
            way = f"{flag} leaves out the column"
        rest = [repr(other) for other in lost if other != column]
        others = f" (nor {', '.join(rest)})" if rest else ""
        raise UnreadError(
            f"'{column}' holds content, {str(value)[:60]!r}, that the form {self.name} does not"
            f" use{others}",
            way,
            list(lost),
            is_sure,
        )

    def _lost_in(self, row: Row) -> dict[str, Any]:
        """The columns whose content the form does not use, with it. It is no loss if its lines are
        in the columns that are used (a conversation next to its prompt and answer), or if it holds
        all of these but the rejected answer (the same as one text)."""
        if self._watched_columns.isdisjoint(row):
            return {}
        there = [
            name for name in self.watched if (name in row or "." in name) and has_value(row, name)
        ]
        held = {name: from_json(value_at(row, name)) for name in there}
        held = {name: value for name, value in held.items() if is_content(name, value)}
        filled = {
            role: path for role, path in self.columns.items() if held and has_value(row, path)
        }
        used = {role: lines_of(from_json(value_at(row, path))) for role, path in filled.items()}
        needed = [line for role, lines in used.items() if role != "rejected" for line in lines]
        lost = dict[str, Any]()
        for column, value in held.items() if needed else ():
            lines = lines_of(value)
            is_copy = bool(lines) and all_in(lines, sum(used.values(), []))
            if column in NO_COPIES or not (is_copy or all_in(needed, lines)):
                lost[column] = value
        return lost


def check_flags_used(forms: Sequence[Form], flags: DataFlags) -> None:
    """Refuse flags that name a column of no data set."""
    named = [(flags.name_of(role), column) for role, column in flags.columns.items() if column]
    for flag, column in [
        *named,
        *(("--ignore_columns", column) for column in flags.ignore_columns),
    ]:
        if forms and not any({column, column.split(".")[0]} & set(form.names) for form in forms):
            raise UserError(
                f"{flag} {printable_line(column)}: no data set has such a column; {forms[0].about}"
            )


def rows_made(function: str, row: Row) -> list[Row]:
    """The rows that a function of one's own makes of a row."""
    with running_own(f"{function} raised", function):
        # rewards get the row as it is
        made = own_function("--data_format", function)(deepcopy(row))
    if made is None:
        rows = []
    elif isinstance(made, list):
        rows = made
    else:
        rows = [made]
    if not all(isinstance(one, dict) for one in rows):
        raise UserError(
            f"{function} must return a dict, a list of dicts or None, not {type(made).__name__}"
        )
    return rows


# Parts of a row


def _example(prompt: Prompt, taken: list[Answer], labels: tuple[float, ...] = ()) -> Example:
    """The example of an answer, or of a better and a worse one. `UserError` if one is empty, or
    both are equal."""
    for one in taken:
        if isinstance(one.value, str):
            message = {"content": one.value}
        else:
            message = one.value
        if not message["content"].strip() and "tool_calls" not in message:
            raise UserError(f"{one.name if len(taken) == 2 else 'the answer'} is empty")
    if len(taken) == 2 and taken[0].value == taken[1].value:
        raise UserError(f"{taken[0].name} and {taken[1].name} are equal")
    suffix = " and ".join(one.name for one in taken if one.name)
    return Example(
        prompt, [one.value for one in taken], suffix=suffix and f", {suffix}", labels=labels
    )
