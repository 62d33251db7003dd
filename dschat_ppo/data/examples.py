"""What one row of a data set asks and answers, and the values of its fields."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dschat_ppo.data.messages import Message, Messages, kind_of
from dschat_ppo.errors import UserError

Row = dict[str, Any]
# What a step reads: an answer, [chosen, rejected], a labelled answer (KTO), an answer with labelled steps, no answer
Use = Literal["sft", "preference", "unpaired", "steps", "prompt"]
PARTS = {"sft": 0, "preference": 1, "unpaired": 1, "steps": 1, "prompt": 2}  # the share of --data_split
SPLIT_SEED = 1234  # of `--data_split`, the held-out rows and the mixture: the same in all steps and runs
# What data preparation adds to the JSON of a row besides its columns: the chat messages of the prompt, their tools, and
# the correct answer, which built-in rules read as `answer`.
MESSAGES, TOOLS, TRUTH = ADDED = "_messages", "_tools", "_truth"


@dataclass(frozen=True)
class Example:
    """What one row asks and answers.

    Attributes:
        prompt: text that is used as it is, or chat messages up to the answer, for the chat template. The prompt of
            plain text is "": all of it is the answer.
        answers: [response] (SFT, unpaired), [chosen, rejected] (preference), the steps of one response (steps) or []
            (PPO prompt). An answer to chat messages may be a message, such as one with tool calls.
        margin: by which the chosen answer is better.
        truth: the correct answer, for reward functions; None if the row names none.
        tools: tool descriptions for the chat template, or None.
        suffix: of the row's name if a row gives several examples, such as ", answers 1 and 3".
        labels: of each answer (unpaired) or step (steps): 1 is good, 0 bad; NaN for a step without a label.
        context: numbers of the prompt's messages that are turns of the assistant and no targets of SFT.
    """

    prompt: str | Messages
    answers: Sequence[str | Message] = field(default_factory=list)
    margin: float = 0.0
    truth: Any = None
    tools: list[Any] | None = None
    suffix: str = ""
    labels: tuple[float, ...] = ()
    context: tuple[int, ...] = ()


def limit_flag(use: Use) -> str:
    """The flag that limits the tokens of a row."""
    return "--max_prompt_seq_len" if use == "prompt" else "--max_seq_len"


def value_at(row: Row, path: str) -> Any:
    """The value of a column, or of a field inside it: `reward_model.ground_truth`, `passages.0.text`. `UserError` if
    there is none. A column of whole numbers that lacks one is often stored as floats: NaN is None, and 3.0 is 3."""
    value: Any = row
    done: list[str] = []
    for part in [path] if path in row else path.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif value is None:
            raise UserError(f"'{'.'.join(done)}' is null; expected '{path}'")
        else:
            raise UserError(f"has no '{path}'" + (f": '{'.'.join(done)}' is {kind_of(value)}" if done else ""))
        done.append(part)
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() else value
    return value


def has_value(row: Row, path: str) -> bool:
    """Whether the row has this field, and it is not null."""
    try:
        return value_at(row, path) is not None
    except UserError:
        return False


def text_at(row: Row, path: str) -> str:
    """The text of a column or of a field inside it."""
    return as_text(value_at(row, path), f"'{path}'")


def as_text(value: Any, name: str) -> str:
    """A text; a number or a boolean as JSON writes it. `name` stands in the message."""
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        value = json.dumps(value)
    if not isinstance(value, str):
        raise UserError(f"{name} is {kind_of(value)}; expected text")
    return value


def number_of(value: Any, name: str) -> float:
    """A finite number, which CSV files hold as text. `name` stands in the message."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{name} is {kind_of(value)}; expected a number")
    return number


def margin_of(row: Row) -> float:
    """The finite number in the column `margin`; 0 if it is missing or empty."""
    return number_of((value_at(row, "margin") if "margin" in row else None) or 0, "'margin'")


def truth_of(row: Row, column: str, pattern: str | None) -> Any:
    """The correct answer of a row: the value of `column`, or what the first group of `pattern` finds in its text."""
    value = value_at(row, column)
    if value is None:
        raise UserError(f"'{column}' is null; expected the correct answer")
    if pattern is None:
        return value
    found = re.search(pattern, str(value))
    if found is None or found.group(1) is None:
        raise UserError(f"'{column}' does not match '{pattern}' (--answer_pattern): {str(value)[:60]!r}")
    return found.group(1)
