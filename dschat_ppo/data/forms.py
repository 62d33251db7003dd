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
from dschat_ppo.data.advice import FOR_STEP_3, Advice
from dschat_ppo.data.cells import Cells, JudgedAnswer, Prompt
from dschat_ppo.data.examples import (
    Example,
    Row,
    checked,
    field_at,
    has_value,
    json_value,
    margin_of,
    truth_of,
)
from dschat_ppo.data.form_kind import Kind
from dschat_ppo.data.messages import CONTEXT, ROLES, read_tools, tools_beside, without_context
from dschat_ppo.data.unread import UnreadError, WatchedColumns
from dschat_ppo.data.uses import further_uses
from dschat_ppo.data.verdicts import Scale
from dschat_ppo.errors import UserError, printable_line

Rendering = Literal["chat", "text"]
_NEEDED = {
    "sft": "a prompt and an answer",
    "preference": "a prompt and two answers",
    "unpaired": "answers with labels (prompt/completion/label), or pairs of answers",
    "prompt": "a prompt",
}


@dataclass(frozen=True)
class RowReader:
    """How the prompt and the answers of rows are read: by the reader of a kind of form, from these
    columns."""

    kind: Kind = field(repr=False)
    columns: dict[str, str]  # role -> column, such as "prompt": "question"
    # further names of roles in messages -> roles
    role_names: dict[str, str] = field(default_factory=dict)
    scale: Scale = "words"  # what the numbers of a verdict on two answers are

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """What the columns serve."""
        return self.kind.uses(self.columns)

    @property
    def used_columns(self) -> set[str]:
        """The columns of the data set that are read, which may be fields inside them."""
        used = {path.split(".")[0] for path in self.columns.values()}
        if "rejected" in self.columns:
            used.add("margin")
        return used

    def examples_of(
        self, row: Row, use: Use, as_chat: bool, input_template: str | None = None
    ) -> list[Example]:
        """What a row asks and answers for a use, with the prompt as the row has it.

        Args:
            row: The row.
            use: The use, which `uses` has.
            as_chat: Whether messages are asked for where a form can give both.
            input_template: Text around a prompt that is text.

        Raises:
            UserError: The row is bad; the message does not name it.
        """
        cells = Cells(row, self.columns, self.role_names, as_chat, input_template, self.scale)
        is_split_pair = use == "unpaired" and not self.kind.labelled
        prompt, answers = self.kind.read(cells, "preference" if is_split_pair else use)
        if not prompt and self.kind.name != "text":
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
        if use in further_uses():
            return further_uses()[use].examples(prompt, answers)
        if self.kind.labelled and use == "unpaired":
            return [_example_of_answers(prompt, [answer], (answer.worth,)) for answer in answers]
        if self.kind.labelled:
            return [_example_of_answers(prompt, [answer]) for answer in answers if answer.worth]
        if not answers:  # a tie
            return []
        if use == "sft":
            best = max(answers, key=lambda answer: answer.worth)  # of equal ones the first
            return [_example_of_answers(prompt, [best])]
        return _examples_of_ranked(prompt, answers, use, only_worst=self.kind.name == "ranked")


def _examples_of_ranked(
    prompt: Prompt, answers: Sequence[JudgedAnswer], use: Use, only_worst: bool
) -> list[Example]:
    """The pairs of answers of which one is better; for "unpaired" the best answer and the others,
    with `only_worst` the worst one alone, each with its label."""
    # stable: of equal ones the first comes first
    order = sorted(answers, key=lambda answer: -answer.worth)
    pairs = list[Example]()
    for index, better in enumerate(order):
        for worse in order[index + 1 :]:
            if better.worth > worse.worth:
                pairs.append(_example_of_answers(prompt, [better, worse]))
    if use != "unpaired" or not pairs:
        return pairs
    bad = order[1:]
    if only_worst:
        bad = [min(order, key=lambda answer: answer.worth)]
    examples = [_example_of_answers(prompt, [order[0]], (1.0,))]
    examples += [_example_of_answers(prompt, [answer], (0.0,)) for answer in bad]
    return examples


def _example_of_answers(
    prompt: Prompt, answers: list[JudgedAnswer], labels: tuple[float, ...] = ()
) -> Example:
    """The example of an answer, or of a better and a worse one. `UserError` if one is empty, or
    both are equal."""
    for answer in answers:
        messages = answer.value
        if isinstance(messages, str):
            messages = {"role": "assistant", "content": messages}
        if isinstance(messages, dict):
            messages = [messages]
        for message in messages:
            is_empty = not message["content"].strip() and "tool_calls" not in message
            if is_empty and message["role"] == "assistant":
                name = answer.name if len(answers) == 2 else "the answer"
                raise UserError(f"{name} is empty")
    if len(answers) == 2 and answers[0].value == answers[1].value:
        raise UserError(f"{answers[0].name} and {answers[1].name} are equal")
    names = " and ".join(answer.name for answer in answers if answer.name)
    suffix = f", {names}" if names else ""
    return Example(prompt, [answer.value for answer in answers], suffix=suffix, labels=labels)


@dataclass(frozen=True)
class SideColumns:
    """The columns that a form reads besides those of the prompt and the answers; None without one.

    Attributes:
        system: The system message.
        tools: Descriptions of tools.
        variables: Variables of the chat template.
        truth: The correct answer, for reward functions.
        truth_pattern: Finds the correct answer in its column; None takes the whole value.
        truth_is_optional: Whether rows may lack it, as where the name of its column alone tells of
            it.
    """

    system: str | None = None
    tools: str | None = None
    variables: str | None = None
    truth: str | None = None
    truth_pattern: str | None = None
    truth_is_optional: bool = False

    @property
    def used_columns(self) -> set[str]:
        """The columns of the data set; not that of a correct answer that no form knows, which the
        first step would lose."""
        paths = [self.system, self.tools, self.variables]
        if not self.truth_is_optional:
            paths.append(self.truth)
        return {path.split(".")[0] for path in paths if path}


@dataclass(frozen=True)
class Form:
    """How the rows of one data set are read. It can be pickled."""

    reader: RowReader
    side: SideColumns = SideColumns()
    rendering: Rendering = "text"
    # text around a prompt that is text; `{}` stands for the prompt
    input_template: str | None = None
    system_message: str | None = None  # of rows without one of their own
    watched: WatchedColumns = WatchedColumns()
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
        return self.reader.kind.name

    @property
    def columns(self) -> dict[str, str]:
        """Role -> column of the prompt and the answers."""
        return self.reader.columns

    @property
    def uses(self) -> tuple[Use, ...]:
        """What the form serves."""
        return self.reader.uses

    @property
    def used_columns(self) -> set[str]:
        """The columns of the data set that the form reads."""
        return self.reader.used_columns | self.side.used_columns

    @property
    def identity(self) -> str:
        """Text that differs between forms that read rows differently, for keys of caches."""
        return f"{self.name} {self!r}"

    def require(self, use: Use) -> None:
        """Refuse a use that the form does not serve. The message lists the columns and what the
        step needs."""
        if self.is_unscored and use != "prompt":
            what = f"{self.about}; its answers have no scores or ranks"
            raise UnreadError(what, self.advice.for_use(use), choices=self.advice.pairs)
        if use in self.uses:
            return
        choices = self.advice.choices_for(use)
        way = self.advice.for_use(use)
        further = further_uses().get(use)
        if further is None:
            needs = _NEEDED[use]
        else:
            needs = further.needs
        what = f"{self.about}; this step needs {needs}"
        if self.reader.kind.labelled and use == "preference":
            way = "answers with labels are for --objective kto"
            choices = ()
        elif self.uses == ("prompt",) and further is None and not self.advice.sets:
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
            messages = json_value(field_at(row, path)) if has_value(row, path) else None
            last = messages[-1] if isinstance(messages, list) and messages else None
            if not isinstance(last, dict):
                return
            name = str(last.get("role", last.get("from"))).strip().lower()
            if (ROLES | self.reader.role_names).get(name) != "user":
                return
        what = f"{self.about}; no conversation of the first rows ends with a response to train on"
        raise UnreadError(what, FOR_STEP_3)

    def read(self, row: Row, use: Use) -> list[Example]:
        """The examples of one row, none or more, all with the same prompt. `UserError`, without the
        name of the row, if it is bad, and for a use that the form does not serve."""
        if self.is_unscored or use not in self.uses:
            self.require(use)
        rows = [row]
        if self.function is not None:
            rows = rows_made(self.function, row)
        examples = list[Example]()
        for form_row in rows:
            as_chat = self.rendering == "chat"
            bare_examples = self.reader.examples_of(form_row, use, as_chat, self.input_template)
            if bare_examples:
                examples += self._with_side_columns(bare_examples, form_row, use)
            if not self.watched.roots.isdisjoint(form_row):
                self.watched.check([form_row], use)
        return examples

    def _with_side_columns(self, examples: list[Example], row: Row, use: Use) -> list[Example]:
        """The examples of a row, which share a prompt, with all that the form takes from its other
        columns: the system message, margin, correct answer, tools and variables."""
        prompt = self._rendered(examples[0].prompt, row)
        context = list[int]()
        if isinstance(prompt, list):
            context = [index for index, message in enumerate(prompt) if CONTEXT in message]
            prompt = without_context(prompt)
        margin = 0.0
        if "rejected" in self.columns and "margin" in row:
            margin = margin_of(row)
        side = self.side
        truth = None
        is_asked = use == "prompt" and not side.truth_is_optional
        if side.truth and (is_asked or has_value(row, side.truth)):
            truth = truth_of(row, side.truth, side.truth_pattern)
        tools = self._tools_of(row)
        variables = None
        if side.variables and has_value(row, side.variables):
            variables = self._variables_of(row, side.variables)
        return [
            replace(
                example,
                prompt=prompt,
                margin=margin,
                truth=truth,
                tools=tools,
                suffix=example.suffix if len(examples) > 1 else "",
                context=tuple(context),
                variables=variables,
            )
            for example in examples
        ]

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
        if self.side.system:
            system_of_row = field_at(row, self.side.system)
        system = self.system_message
        if system_of_row not in (None, ""):
            system = checked(system_of_row, str, f"'{self.side.system}'", "text")
        if prompt[0]["role"] not in ("system", "developer"):
            if system:
                return [{"role": "system", "content": system}, *prompt]
            return prompt
        if system_of_row not in (None, "") and prompt[0]["content"] != system_of_row:
            raise UserError(
                f"'{self.side.system}' and the first message are two different system messages"
            )
        return prompt

    def _tools_of(self, row: Row) -> list[Any] | None:
        """The tools of a row: of their column, or those in one object with the messages. All must
        be equal."""
        values = dict[str, Any]()  # of columns
        if self.side.tools and self.rendering == "chat":
            values[self.side.tools] = field_at(row, self.side.tools)
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

    def _variables_of(self, row: Row, path: str) -> dict[str, Any]:
        """The variables that a row has for the chat template; null is none, as in Arrow."""
        value = json_value(field_at(row, path))
        known = checked(value, dict, f"'{path}'", "an object of variables or its JSON")
        return {name: inner for name, inner in known.items() if inner is not None}


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
