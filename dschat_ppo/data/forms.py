"""A form: how the rows of one data set become examples, in all three steps. `form_choice.py` finds
it.

The reader of the form finds the prompt and the answers of a row. All else is here, and alike for
every form: which answers a use takes, the last checks, the system message, tools, margin and
correct answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from dschat_ppo.common.own_functions import own_function, running_own
from dschat_ppo.config.data_flags import DataFlags, Use
from dschat_ppo.data.advice import FOR_STEP_3, Advice, Choice, words_of
from dschat_ppo.data.cells import Cells, JudgedAnswer, Prompt
from dschat_ppo.data.content import NO_COPIES, all_in, is_content, is_of_rewards, lines_of
from dschat_ppo.data.examples import (
    CONTEXT,
    ROLES,
    Example,
    Row,
    checked,
    field_at,
    from_json,
    has_value,
    json_value,
    margin_of,
    read_tools,
    tools_beside,
    truth_of,
    without_context,
)
from dschat_ppo.data.form_kinds import Kind
from dschat_ppo.data.verdicts import TURNING, TWO_ANSWERS, Scale, side_named
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
        super().__init__(f"{what}; {words_of(choices) or way}")
        self.what = what
        self.way = way
        self.lost = tuple(lost)
        self.is_sure = is_sure
        self.choices = tuple(choices)


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
    truth_is_optional: bool = False  # where the name of its column alone tells of it
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
    # lists of answers without scores or ranks, of which no step but the third can learn
    is_unscored: bool = field(default=False, repr=False)

    @property
    def name(self) -> str:
        return self.kind.name

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """What the form serves."""
        return self.kind.uses(self.columns)

    @property
    def used_columns(self) -> set[str]:
        """The columns of the data set that the form reads; not a correct answer that no form knows,
        which the first step would lose."""
        paths = [*self.columns.values(), self.system, self.tools, self.variables]
        if not self.truth_is_optional:
            paths.append(self.truth)
        used = {path.split(".")[0] for path in paths if path}
        if "rejected" in self.columns:
            return used | {"margin"}
        return used

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
        choices = self.advice.choices_for(use)
        way = self.advice.for_use(use)
        if self.is_unscored and use != "prompt":
            what = f"{self.about}; its answers have no scores or ranks"
            raise UnreadError(what, way, choices=self.advice.pairs)
        if use in self.uses:
            return
        what = f"{self.about}; this step needs {_NEEDED[use]}"
        if self.kind.labelled and use == "preference":
            way = "answers with labels are for --objective kto"
            choices = ()
        elif self.uses == ("prompt",) and not self.advice.sets and not self.advice.has_steps:
            what = f"{what}, and no response is there to train on"
            way = FOR_STEP_3
        raise UnreadError(what, way, is_sure=bool(self.advice.sets), choices=choices)

    def require_answers(self, rows: Sequence[Row]) -> None:
        """Refuse conversations for step 1 that all end with a question: prompts without a response,
        as for GRPO."""
        path = self.columns.get("messages")
        if path is None or {"response", "chosen"} & set(self.columns) or not rows:
            return
        for row in rows:
            turns = json_value(field_at(row, path)) if has_value(row, path) else None
            last = turns[-1] if isinstance(turns, list) and turns else None
            if not isinstance(last, dict):
                return
            name = str(last.get("role", last.get("from"))).strip().lower()
            if (ROLES | self.role_names).get(name) != "user":
                return
        what = f"{self.about}; no conversation of the first rows ends with a response to train on"
        raise UnreadError(what, FOR_STEP_3)

    def read(self, row: Row, use: Use) -> list[Example]:
        """The examples of one row, none or more, all with the same prompt. `UserError`, without the
        name of the row, if it is bad, and for a use that the form does not serve."""
        self.require(use)
        rows = [row]
        if self.function is not None:
            rows = rows_made(self.function, row)
        examples = list[Example]()
        for each in rows:
            bare_examples = self.examples_of(each, use)
            if bare_examples:
                examples += self._with_columns(bare_examples, each, use)
            self.check_unused([each], use)
        return examples

    def _with_columns(self, examples: list[Example], row: Row, use: Use) -> list[Example]:
        """The examples of a row, which share a prompt, with all that the form takes from its other
        columns: the system message, margin, correct answer, tools and variables."""
        prompt = self._rendered(examples[0].prompt, row)
        context = list[int]()
        if isinstance(prompt, list):
            context = [index for index, message in enumerate(prompt) if CONTEXT in message]
            prompt = without_context(prompt)
        margin = 0.0
        if "rejected" in self.columns:
            margin = margin_of(row)
        truth = None
        is_asked = use == "prompt" and not self.truth_is_optional
        if self.truth and (is_asked or has_value(row, self.truth)):
            truth = truth_of(row, self.truth, self.truth_pattern)
        tools = self._tools_of(row)
        return [
            replace(
                example,
                prompt=prompt,
                margin=margin,
                truth=truth,
                tools=tools,
                suffix=example.suffix if len(examples) > 1 else "",
                context=tuple(context),
                variables=self._variables_of(row),
            )
            for example in examples
        ]

    def examples_of(self, row: Row, use: Use) -> list[Example]:
        """What the reader finds in a row for a use, before the prompt is rendered."""
        is_chat = self.rendering == "chat"
        cells = Cells(row, self.columns, self.role_names, is_chat, self.input_template, self.scale)
        is_split_pair = use == "unpaired" and not self.kind.labelled
        prompt, answers = self.kind.read(cells, "preference" if is_split_pair else use)
        if not prompt and self.name != "text":
            raise UserError("the prompt is empty")
        if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            roles = ("prompt", "messages", "chosen", "first", "response")
            column = next(self.columns[role] for role in roles if cells.has(role))
            raise UserError(
                f"the prompt in '{column}' ends with the assistant's message: nothing is left to"
                " answer"
            )
        if use == "prompt":
            return [Example(prompt)]
        if use == "steps":
            return [
                Example(prompt, answer.value, suffix=f", {answer.name}", labels=answer.worth)
                for answer in answers
            ]
        if self.kind.labelled and use == "unpaired":
            return [_example_of_answers(prompt, [answer], (answer.worth,)) for answer in answers]
        if self.kind.labelled:
            return [_example_of_answers(prompt, [answer]) for answer in answers if answer.worth]
        if not answers:  # a tie
            return []
        return self._examples_of_ranked(prompt, answers, use)

    def _examples_of_ranked(
        self, prompt: Prompt, answers: Sequence[JudgedAnswer], use: Use
    ) -> list[Example]:
        """The examples of answers of which some are better than others."""
        # stable: of equal ones the first comes first
        order = sorted(answers, key=lambda answer: -answer.worth)
        best = order[0]
        if use == "sft":
            return [_example_of_answers(prompt, [best])]
        pairs = list[Example]()
        for index, better in enumerate(order):
            for worse in order[index + 1 :]:
                if better.worth > worse.worth:
                    pairs.append(_example_of_answers(prompt, [better, worse]))
        if use != "unpaired" or not pairs:
            return pairs
        bad = order[1:]  # each is a rejected answer
        if self.name == "ranked":
            bad = [min(order, key=lambda answer: answer.worth)]
        examples = [_example_of_answers(prompt, [best], (1.0,))]
        examples += [_example_of_answers(prompt, [answer], (0.0,)) for answer in bad]
        return examples

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
            content = (self.input_template or "{}").replace("{}", prompt)
            prompt = [{"role": "user", "content": content}]
        system_of_row = None
        if self.system:
            system_of_row = field_at(row, self.system)
        system = self.system_message
        if system_of_row not in (None, ""):
            system = checked(system_of_row, str, f"'{self.system}'", "text")
        if prompt[0]["role"] not in ("system", "developer"):
            if system:
                return [{"role": "system", "content": system}, *prompt]
            return prompt
        if system_of_row not in (None, "") and prompt[0]["content"] != system_of_row:
            raise UserError(
                f"'{self.system}' and the first message are two different system messages"
            )
        return prompt

    def _tools_of(self, row: Row) -> list[Any] | None:
        """The tools of a row: of their column, or those in one object with the messages. All must
        be equal."""
        values = dict[str, Any]()  # of columns
        if self.tools and self.rendering == "chat":
            values[self.tools] = field_at(row, self.tools)
        for path in self.columns.values():
            # messages named by a dot (`input.messages`) have the tools beside them (`input.tools`)
            holder = path.removesuffix(".messages")
            if has_value(row, holder):
                values[holder] = tools_beside(field_at(row, holder))
        tools_of_row: list[Any] | None = None
        for column, value in values.items():
            if value is None:  # as in most rows
                continue
            tools = read_tools(value, column)
            if tools and tools_of_row and tools != tools_of_row:
                raise UserError(f"'{column}' describes other tools than the rest of the row")
            tools_of_row = tools_of_row or tools
        return tools_of_row

    def _variables_of(self, row: Row) -> dict[str, Any] | None:
        """The variables that a row has for the chat template; null is none, as in Arrow."""
        if self.variables is None or not has_value(row, self.variables):
            return None
        value = json_value(field_at(row, self.variables))
        known = checked(value, dict, f"'{self.variables}'", "an object of variables or its JSON")
        return {name: inner for name, inner in known.items() if inner is not None}

    def check_unused(self, rows: list[Row], use: Use | None = None) -> None:
        """Refuse rows with content in columns that the form does not use for a use (None: for
        any)."""
        lost = dict[str, Any]()
        for row in rows:
            for column, value in self.lost_in(row).items():
                if use != "prompt" or not is_of_rewards(column):
                    lost.setdefault(column, value)
        if not lost:
            return
        of_pairs = [column for column in lost if column in _OF_PAIRS or self._turns(column)]
        choices = list[Choice]()
        column = next(iter(lost))
        if of_pairs:  # other flags may train pairs upside down
            column = of_pairs[0]
            choices += self.advice.pairs
        if choices and column not in _OF_PAIRS and "chosen" in self.columns:
            condition = f"if '{self.columns['chosen']}' is always the better answer"
            choices.append(Choice(condition, {"ignore_columns": " ".join(lost)}))
        value = lost[column]
        way = f"--ignore_columns {' '.join(lost)} leaves out the column"
        further_columns = [repr(name) for name in lost if name != column]
        further = f" (nor {', '.join(further_columns)})" if further_columns else ""
        raise UnreadError(
            f"'{column}' holds content, {str(value)[:60]!r}, that the form {self.name} does not"
            f" use{further}",
            way,
            list(lost),
            is_sure=bool(choices),
            choices=choices,
        )

    def _turns(self, column: str) -> bool:
        """Whether a column may turn around the pairs of two others."""
        if column in TURNING or not {"chosen", "rejected"} <= set(self.columns):
            return column in TURNING
        return side_named(column, (self.columns["chosen"], self.columns["rejected"])) != 0

    def lost_in(self, row: Row) -> dict[str, Any]:
        """The columns whose content the form does not use, with it. It is no loss if its lines are
        in the columns that are used (a conversation next to its prompt and answer), or if it holds
        all of these but the rejected answer (the same as one text)."""
        if self._watched_columns.isdisjoint(row):
            return {}
        contents = dict[str, Any]()  # of columns that the form does not use
        for name in self.watched:
            if (name in row or "." in name) and has_value(row, name):
                value = from_json(field_at(row, name))
                if is_content(name, value):
                    contents[name] = value
        if not contents:
            return {}
        used_lines = list[str]()
        needed_lines = list[str]()
        for role, path in self.columns.items():
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
            if column in NO_COPIES or self._turns(column) or not is_copy:
                lost[column] = value
        return lost


def check_flags_used(forms: Sequence[Form], flags: DataFlags) -> None:
    """Refuse flags that name a column of no data set."""
    named = [(flags.name_of(role), column) for role, column in flags.columns.items() if column]
    named += [("--ignore_columns", column) for column in flags.ignore_columns]
    for flag, column in named:
        if forms and not any({column, column.split(".")[0]} & set(form.names) for form in forms):
            raise UserError(
                f"{flag} {printable_line(column)}: no data set has such a column; {forms[0].about}"
            )


def rows_made(function: str, row: Row) -> list[Row]:
    """The rows that a function of one's own makes of a row."""
    with running_own(f"{function} raised", function):
        # rewards get the row as it is
        returned = own_function("--data_format", function)(deepcopy(row))
    rows = [returned]
    if returned is None:
        rows = []
    elif isinstance(returned, list):
        rows = returned
    if not all(isinstance(each, dict) for each in rows):
        raise UserError(
            f"{function} must return a dict, a list of dicts or None, not {type(returned).__name__}"
        )
    return rows


# Parts of a row


def _example_of_answers(
    prompt: Prompt, answers: list[JudgedAnswer], labels: tuple[float, ...] = ()
) -> Example:
    """The example of an answer, or of a better and a worse one. `UserError` if one is empty, or
    both are equal."""
    for answer in answers:
        said = answer.value
        if isinstance(said, str):
            said = {"role": "assistant", "content": said}
        for message in said if isinstance(said, list) else [said]:
            is_empty = not message["content"].strip() and "tool_calls" not in message
            if is_empty and message["role"] == "assistant":
                name = answer.name if len(answers) == 2 else "the answer"
                raise UserError(f"{name} is empty")
    if len(answers) == 2 and answers[0].value == answers[1].value:
        raise UserError(f"{answers[0].name} and {answers[1].name} are equal")
    names = " and ".join(answer.name for answer in answers if answer.name)
    suffix = f", {names}" if names else ""
    return Example(prompt, [answer.value for answer in answers], suffix=suffix, labels=labels)
