"""One row of a data set, in any of the supported column layouts, to a prompt and its answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dschat_ppo.data.templates import Message, Messages, is_messages
from dschat_ppo.errors import UserError

LAYOUTS = {
    "sft": (("prompt", "response"), ("messages",), ("prompt", "chosen")),
    "preference": (("prompt", "chosen", "rejected"),),
    "prompt": (("prompt",), ("messages",)),
}


@dataclass(frozen=True)
class Example:
    """What one row asks and answers.

    Attributes:
        prompt: text that is used as it is, or chat messages up to the answer, for the chat template.
        answers: [response] (SFT), [chosen, rejected] (preference) or [] (PPO prompt). An answer to chat messages may be
            a message, such as one with tool calls.
        margin: by which the chosen answer is better.
        truth: the correct answer, for reward functions; None if the row names none.
        tools: tool descriptions for the chat template, or None.
        suffix: of the row's name if a row gives several examples, such as ", answers 1 and 3".
    """

    prompt: str | Messages
    answers: Sequence[str | Message]
    margin: float = 0.0
    truth: Any = None
    tools: list[Any] | None = None
    suffix: str = ""


def layout_of(columns: list[str], use: str, name: str) -> tuple[str, ...]:
    """The first layout of `use` ("sft", "preference", "prompt") whose columns all exist.

    Raises:
        UserError: no layout fits; the message lists the columns that exist and those that are accepted.
    """
    for layout in LAYOUTS[use]:
        if set(layout) <= set(columns):
            return layout
    wanted = " or ".join("/".join(layout) for layout in LAYOUTS[use])
    raise UserError(f"{name}: has the columns {', '.join(map(repr, columns))}; this step needs {wanted}")


def read_example(row: dict[str, Any], layout: tuple[str, ...], use: str, where: str) -> Example:
    """Check and normalise one row.

    Args:
        row: column -> value.
        layout: as given by `layout_of`.
        use: "sft", "preference" or "prompt".
        where: data set and row number, for messages.

    Raises:
        UserError: a field is neither text nor chat messages, or a margin is not a number. An empty answer is valid: its
            only token is the one that ends it.
    """
    if layout == ("messages",):
        return _from_messages(row["messages"], use, where)
    prompt = row["prompt"]
    if not isinstance(prompt, str) and not is_messages(prompt):
        raise UserError(f"{where}: 'prompt' is {_kind(prompt)}; expected text or a list of role/content messages")
    answers = []
    for column in layout[1:]:
        value = row[column]
        if is_messages(value) and value[-1]["role"] == "assistant":
            value = value[-1]["content"]
        if not isinstance(value, str):
            expected = "text (or messages that end with the assistant's)"
            raise UserError(f"{where}: '{column}' is {_kind(value)}; expected {expected}")
        answers.append(value)
    margin = row.get("margin")
    try:
        number = float(margin or 0)  # a missing or empty margin is 0; CSV files hold numbers as text
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where}: 'margin' is {_kind(margin)}; expected a number")
    return Example(prompt if isinstance(prompt, str) else _turns(prompt), answers, number)


def _from_messages(messages: Any, use: str, where: str) -> Example:
    """Split a conversation before its last answer."""
    if not is_messages(messages):
        raise UserError(f"{where}: 'messages' is {_kind(messages)}; expected a list of role/content messages")
    prompt, answer = _turns(messages), ""
    if prompt[-1]["role"] == "assistant":
        answer = prompt.pop()["content"]
    elif use == "sft":
        raise UserError(f"{where}: 'messages' does not end with the assistant's answer")
    if not prompt:
        raise UserError(f"{where}: 'messages' has nothing before the assistant's answer")
    return Example(prompt, [answer] if use == "sft" else [], 0.0)


def _turns(messages: Messages) -> Messages:
    """Messages with role and content only (a table adds empty columns to turns that lack them)."""
    return [{"role": turn["role"], "content": turn["content"]} for turn in messages]


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} ({str(value)[:40]!r})"
