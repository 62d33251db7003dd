"""What one row of a data set asks and answers, and the values of its fields (`messages.py`: the
chat messages in them)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dschat_ppo.errors import UserError

Message = dict[str, Any]
Messages = list[Message]
Row = dict[str, Any]
# use -> index of its share of --data_split; 1 of those that features add
SHARE_OF_USE = {"sft": 0, "preference": 1, "unpaired": 1, "prompt": 2}
# of `--data_split`, the held-out rows and the mixture: the same in all steps and runs
SPLIT_SEED = 1234
# What data preparation adds to the JSON of a row besides its columns: the chat messages of the
# prompt, their tools, the variables of their template, and the correct answer, which built-in rules
# read as `answer`.
MESSAGES = "_messages"
TOOLS = "_tools"
VARIABLES = "_variables"
TRUTH = "_truth"
ADDED = (MESSAGES, TOOLS, VARIABLES, TRUTH)
VARIABLES_COLUMN = "chat_template_kwargs"  # of rows, as in SmolTalk2


@dataclass(frozen=True)
class Example:
    """What one row asks and answers. The prompt is text that is used as it is, or chat messages up
    to the answer, for the chat template; that of plain text is "", and all of it is the answer. An
    answer to chat messages may be one, or in step 2 several, after which two conversations part."""

    prompt: str | Messages
    # [response] (SFT, unpaired), [chosen, rejected] (preference), [] (PPO prompt), or what a
    # use of a feature reads
    answers: Sequence[str | Message | Messages] = field(default_factory=list)
    margin: float = 0.0  # by which the chosen answer is better
    truth: Any = None  # the correct answer, for reward functions
    tools: list[Any] | None = None  # descriptions for the chat template
    # of the row's name if a row gives several examples, such as ", answers 1 and 3"
    suffix: str = ""
    # of each of `answers` if the use has labels: 1 is good, 0 bad; NaN without a label
    labels: tuple[float, ...] = ()
    # numbers of the prompt's messages of the assistant that are no targets of SFT
    context: tuple[int, ...] = ()
    variables: dict[str, Any] | None = None  # for the chat template


# Values of fields


def field_at(row: Row, path: str) -> Any:
    """The value of a column, or of a field inside it: `reward_model.ground_truth`,
    `passages.0.text`, `output.1:` for the entries of a list from the second one on. `UserError` if
    there is none. A column of whole numbers that lacks one is often stored as floats: NaN is None,
    and 3.0 is 3."""
    value = row[path] if path in row else _inner_field(row, path)
    if isinstance(value, float) and (math.isnan(value) or value.is_integer()):
        return None if math.isnan(value) else int(value)
    return value


def _inner_field(row: Row, path: str) -> Any:
    """The value of a field inside a column. `UserError` if there is none."""
    value: Any = row
    done = list[str]()
    for key in path.split("."):
        value = json_value(value)
        entry = key.removesuffix(":")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and entry.isdigit() and int(entry) < len(value):
            value = value[int(entry)] if entry == key else value[int(entry) :]
        else:
            where = ""
            if done:
                where = f": '{'.'.join(done)}' is {kind_of(value)}"
            raise UserError(f"has no '{path}'{where}")
        done.append(key)
    return value


def has_value(row: Row, path: str) -> bool:
    """Whether the row has this field, and it is not null."""
    try:
        return field_at(row, path) is not None
    except UserError:
        return False


def text_at(row: Row, path: str) -> str:
    """The text of a column or of a field inside it."""
    value = field_at(row, path)
    if isinstance(value, str):
        return value
    return _text_of_value(value, path)


def _text_of_value(value: Any, path: str) -> str:
    """The text of a value that is none. A list is refused with a way out."""
    if isinstance(value, list):
        way = f"a column flag can name one of its entries, such as {path}.0"
        raise UserError(f"'{path}' is {kind_of(value)}; expected text; {way}")
    return scalar_as_text(value, f"'{path}'")


def scalar_as_text(value: Any, name: str) -> str:
    """A text; a number or a boolean as JSON writes it. `name` is for the message."""
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        value = json.dumps(value)
    if not isinstance(value, str):
        raise UserError(f"{name} is {kind_of(value)}; expected text")
    return value


def number_of(value: Any, name: str) -> float:
    """A finite number, which CSV files hold as text. `name` is for the message."""
    try:
        as_float = float(value)
    except (TypeError, ValueError):
        as_float = math.nan
    if not math.isfinite(as_float):
        raise UserError(f"{name} is {kind_of(value)}; expected a number")
    return as_float


def margin_of(row: Row) -> float:
    """The finite number in the column `margin`; 0 if it is missing or empty."""
    margin = None
    if "margin" in row:
        margin = field_at(row, "margin")
    return number_of(margin or 0, "'margin'")


def truth_of(row: Row, column: str, pattern: str | None) -> Any:
    """The correct answer of a row: the value of `column`, or what the first group of `pattern`
    finds in its text."""
    value = field_at(row, column)
    if value is None:
        raise UserError(f"'{column}' is null; expected the correct answer")
    if pattern is None:
        return value
    match = re.search(pattern, str(value))
    if match is None or match.group(1) is None:
        raise UserError(
            f"'{column}' does not match '{pattern}' (--answer_pattern): {str(value)[:60]!r}"
        )
    return match.group(1)


def kind_of(value: Any) -> str:
    """A value in a message: its type and its first characters."""
    if value is None:
        return "null"
    if isinstance(value, dict) and list(value) == ["bytes"]:  # of a Parquet or Arrow file
        return f"{value['bytes']} bytes"
    kind = {"dict": "an object", "list": "a list"}.get(type(value).__name__, type(value).__name__)
    return f"{kind} ({str(value)[:40]!r})"


def checked(value: Any, kind: type, name: str, expected: str) -> Any:
    """The value, if it is of this type. `name` says where it stands."""
    if not isinstance(value, kind):
        raise UserError(f"{name} is {kind_of(value)}; expected {expected}")
    return value


def json_value(value: Any) -> Any:
    """The list or object that a JSON text holds; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value
