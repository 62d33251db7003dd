"""Uses of the data that features add to those of `config.data_flags`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.config.data_flags import Use
from dschat_ppo.data.cells import JudgedAnswer, Prompt
from dschat_ppo.data.encode import EncodedExample
from dschat_ppo.data.examples import Example, Row
from dschat_ppo.features import hooks


@dataclass(frozen=True)
class FurtherUse:
    """What step 2 reads from rows besides pairs and labelled answers. Its forms are those whose
    `Kind` names it. `settings` below are `StepData.use_settings`.

    Attributes:
        needs: What the rows must have, for messages.
        way: How rows get it, where no flags have been tried that read them.
        column: A column whose name tells of such rows.
        roles: Roles of columns that the use reads besides those of prompt and response.
        changes: (columns, first rows, columns that may be a prompt) -> flags to be tried where no
            form reads the rows.
        examples: (prompt, answers of a reader) -> examples.
        to_encode: (example, settings) -> the example with a single answer.
        columns: Further columns of token rows, with their types.
        values: (tokenizer, example, its token ids, what the length limit leaves of them, settings)
            -> values of `columns`, lists; if all are empty, the row is dropped.
        shown: Name in samples of the log -> a column of token rows.
    """

    needs: str
    way: str
    column: str
    roles: tuple[str, ...]
    changes: Callable[[list[str], list[Row], list[str]], Iterator[dict[str, Any]]]
    examples: Callable[[Prompt, Sequence[JudgedAnswer]], list[Example]]
    to_encode: Callable[[Example, Any], Example]
    columns: dict[str, Any]
    values: Callable[
        [PreTrainedTokenizerBase, Example, EncodedExample, EncodedExample, Any], dict[str, Any]
    ]
    shown: dict[str, str] = field(default_factory=dict)


@cache
def further_uses() -> dict[Use, FurtherUse]:
    """The uses by name, which features offer as `data_uses.USES`."""
    uses = dict[Use, FurtherUse]()
    for of_feature in hooks("data_uses.USES"):
        uses |= of_feature
    return uses
