"""One row of a data set -> prompt and answers, whatever the layout of its columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dschat_ppo.data.templates import Messages, is_messages
from dschat_ppo.errors import UserError

LAYOUTS = {
    "sft": (("prompt", "response"), ("messages",), ("prompt", "chosen")),
    "preference": (("prompt", "chosen", "rejected"),),
    "prompt": (("prompt",), ("messages",)),
}


@dataclass(frozen=True)
class Row:
    """A row in the form that all steps use: `answers` is [response], [chosen, rejected] or []."""

    prompt: str | Messages
    answers: list[str]
    margin: float


def layout_of(columns: list[str], use: str, name: str) -> tuple[str, ...]:
    """The first layout of `use` ("sft", "preference", "prompt") whose columns are all there.

    Raises:
        UserError: none is; says which columns the data set has and which would do.
    """
    for layout in LAYOUTS[use]:
        if set(layout) <= set(columns):
            return layout
    wanted = " or ".join("/".join(layout) for layout in LAYOUTS[use])
    raise UserError(f"{name}: has the columns {', '.join(map(repr, columns))}; this step needs {wanted}")


def read_example(row: dict[str, Any], layout: tuple[str, ...], use: str, where: str) -> Row:
    """Check and normalise one row.

    Args:
        row: column -> value.
        layout: as given by `layout_of`.
        use: "sft", "preference" or "prompt".
        where: data set and row number, for messages.

    Raises:
        UserError: a field that is neither text nor chat messages, or a margin that is not a number. An empty answer
            is a legitimate one: it becomes the token that ends it, alone.
    """
    if layout == ("messages",):
        return _from_messages(row["messages"], use, where)
    prompt = row["prompt"]
    if not isinstance(prompt, str) and not is_messages(prompt):
        raise UserError(f"{where}: 'prompt' is {_kind(prompt)}; expected text or a list of role/content messages")
    answers = [_answer_text(row[name], name, where) for name in layout[1:]]
    return Row(_plain(prompt), answers, _margin(row.get("margin"), where))


def _margin(value: Any, where: str) -> float:
    """The `margin` column as a number: absent or empty is 0; text of a number (from CSV) is read."""
    try:
        margin = float(value or 0)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise UserError(f"{where}: 'margin' is {_kind(value)}; expected a number")
    return margin


def _from_messages(messages: Any, use: str, where: str) -> Row:
    if not is_messages(messages):
        raise UserError(f"{where}: 'messages' is {_kind(messages)}; expected a list of role/content messages")
    turns = _plain(messages)
    assert isinstance(turns, list)
    if turns[-1]["role"] == "assistant":
        prompt, answer = turns[:-1], turns[-1]["content"]
    elif use == "sft":
        raise UserError(f"{where}: 'messages' does not end with the assistant's answer")
    else:
        prompt, answer = turns, ""
    if not prompt:
        raise UserError(f"{where}: 'messages' has nothing before the assistant's answer")
    return Row(prompt, [answer] if use == "sft" else [], 0.0)


def _answer_text(value: Any, column: str, where: str) -> str:
    """An answer as text: a string, or messages whose last one is the assistant's."""
    if isinstance(value, str):
        return value
    if is_messages(value) and value[-1]["role"] == "assistant":
        return str(value[-1]["content"])
    raise UserError(f"{where}: '{column}' is {_kind(value)}; expected text (or messages that end with the assistant's)")


def _plain(prompt: Any) -> str | Messages:
    """Messages with role and content alone (a table adds empty columns to turns that lack them)."""
    if isinstance(prompt, str):
        return prompt
    return [{"role": turn["role"], "content": turn["content"]} for turn in prompt]


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} ({str(value)[:40]!r})"
