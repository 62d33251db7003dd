"""Content of rows besides text, such as images, which a feature reads. Forms and chat templates see
a mark in its place (`content_marks.py`); token rows get the tokens that stand for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from datasets import Dataset

from dschat_ppo.data.encode import EncodedExample
from dschat_ppo.data.examples import Example, Row


class FurtherContent(Protocol):
    """How the rows of a data set are read that have more than text. An item is one piece of that
    content of a row. Errors of a row are `UserError` without its name."""

    @property
    def columns(self) -> dict[str, Any]:
        """Further columns of token rows, with their types."""
        ...

    @property
    def identity(self) -> str:
        """What token rows depend on."""
        ...

    def kept(self, content: bytes) -> Any:
        """What stands for bytes of a table in its rows."""
        ...

    def of_source(
        self, location: str, columns: Sequence[str], first_rows: Sequence[Row]
    ) -> FurtherContent:
        """That of a data set, by the file or folder that it is in, its columns and its first rows.
        A flag that names none of the columns does not apply to it."""
        ...

    def columns_left(self, columns: Sequence[str]) -> list[str]:
        """The columns of a data set that its form sees."""
        ...

    def check_flags_used(self, columns_of_sets: Mapping[str, Sequence[str]]) -> None:
        """Refuse flags that name a column of no data set, from the columns of each by its name."""
        ...

    def taken_out(self, row: Row) -> tuple[Row, list[Any]]:
        """The row as its form sees it, with marks, and what it says of the items, by the numbers of
        these. Nothing is read but the row."""
        ...

    def placed(self, example: Example, items: list[Any]) -> tuple[Example, list[Any]]:
        """The example with a mark for each item in its prompt, and the items in that order."""
        ...

    def expanded(self, ids: EncodedExample, items: list[Any]) -> EncodedExample:
        """The ids with all tokens of each item, which are its `fixed_spans`."""
        ...

    def values(self, ids: EncodedExample, items: list[Any]) -> dict[str, Any]:
        """The values of `columns` of a row whose ids, within the length limit, are these."""
        ...

    def facts(self, rows: Dataset) -> list[str]:
        """What the log says of the token rows of a data set."""
        ...

    def hashed(self, items: list[Any]) -> list[str]:
        """What the digest of a row covers of its items."""
        ...
