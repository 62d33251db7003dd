"""Forms of data sets: which columns a row has, and how it becomes examples.

A data set has one form and one rendering in all three steps. `detect_form` finds them from columns and first rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.examples import Example, layout_of, read_example

Use = Literal["sft", "preference", "prompt"]


@dataclass(frozen=True)
class Form:
    """How the rows of one data set are read.

    Attributes:
        name: as `--data_format` names it, or the hub name of a data set with a form of its own.
        rendering: "chat" if the chat template renders prompts, "text" if they are used as they are.
        read: `(row, use, where)` -> the examples of one row, none or more; raises `UserError` for a bad row.
        description: what was understood, one line for the log.
    """

    name: str
    rendering: Literal["chat", "text"]
    read: Callable[[dict[str, Any], Use, str], list[Example]]
    description: str


def detect_form(
    name: str, columns: list[str], rows: list[dict[str, Any]], has_template: bool, flags: DataFlags
) -> Form:
    """The form of a data set.

    Args:
        name: of the data set, for messages and for data sets with a form of their own.
        columns: names of all columns.
        rows: the first rows.
        has_template: whether the tokenizer has a chat template.
        flags: `--data_format`, column names and the other flags that say how rows are read.

    Raises:
        UserError: no form fits; or several fit and read the rows differently, and the message shows the readings.
    """

    def read(row: dict[str, Any], use: Use, where: str) -> list[Example]:
        return [read_example(row, layout_of(list(row), use, name), use, where)]

    is_chat = bool(rows) and isinstance(rows[0].get("prompt", rows[0].get("messages")), list)
    return Form("auto", "chat" if is_chat else "text", read, "")
