"""The text of a sample for the log, with its answers marked, and of a prompt for a person."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.data.examples import (
    ADDED,
    ROLES,
)
from dschat_ppo.data.streaming import StreamedRows, rows_at_hand
from dschat_ppo.data.templates import added_tokens

MOST_CHARACTERS, _COLUMN_CHARACTERS = 2000, 200  # of a sample, and of each of its other columns, in the log


def log_samples(
    tokenizer: PreTrainedTokenizerBase, rows: Dataset | StreamedRows, names: Sequence[str], count: int = 1
) -> None:
    """Log the first `count` rows of each data set that are at hand."""
    rows = rows_at_hand(rows)
    numbers = np.concatenate(
        [part["source"] for part in rows.select_columns(["source"]).with_format("numpy").iter(10**6)]
    )
    for index in np.concatenate([np.flatnonzero(numbers == number)[:count] for number in np.unique(numbers)]):
        row = rows[int(index)]
        name = f"data: {names[row['source']]}: " if len(names) > 1 else "data: "
        marks = ", answers in ⟦ ⟧" if row["answers"] else ""
        logger().info(f"{name}a sample{marks}:\n{row_sample(tokenizer, row)}{_columns(row)}")


def _columns(row: dict[str, Any]) -> str:
    """Lines with what else the step uses of a token row: margin, labels, in step 3 the columns that rewards receive."""
    columns = {"margin": row.get("margin") or None, "label": row.get("label"), "labels": row.get("step_labels")}
    columns |= {name: value for name, value in json.loads(row.get("row") or "{}").items() if name not in ADDED}
    texts = {name: json.dumps(value, ensure_ascii=False) for name, value in columns.items() if value is not None}
    return "".join(
        f"\n  {name}: {text[:_COLUMN_CHARACTERS]}{' [...]' * (len(text) > _COLUMN_CHARACTERS)}"
        for name, text in texts.items()
    )


def row_sample(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> str:
    """The text of a token row, special tokens included, with the trained parts in ⟦ ⟧; of a long text its start and
    end. A second answer follows on a line that starts with `or`. A prompt without answers (step 3) has no marks."""
    prompt, (first, *others) = row["prompt_ids"], row["answers"] or [[]]
    ids, spans = [*prompt, *first], [place for span in row.get("prompt_spans") or () for place in span]
    bounds = [0, *spans, len(prompt), len(ids)] if first else [0, len(ids)]  # every second part is trained
    parts = [text_between(tokenizer, ids, start, stop) for start, stop in pairwise(bounds)]
    text = "".join(f"⟦{part}⟧" if number % 2 else part for number, part in enumerate(parts)).replace("⟧⟦", "")
    for answer in others:
        whole = [*prompt, *answer]
        text += f"\nor ⟦{text_between(tokenizer, whole, len(prompt), len(whole))}⟧"
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} [...] {text[-half:]}"


def readable_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of a prompt for a person, without special tokens.

    Special tokens divide a chat prompt into messages; each one begins on its own line with its role, such as `user: `,
    if the template names it in a special token, or in the first line after one. Other text stays as it is.
    """
    parts: list[str] = []
    label, start = "", 0
    # also those of the chat template alone; without the one for unknown text, which is text
    special = {number for number, token in added_tokens(tokenizer, len(tokenizer)).items() if token.special}
    special = (special | set(tokenizer.all_special_ids)) - {tokenizer.unk_token_id}
    ids = ids[1:] if ids and ids[0] == tokenizer.bos_token_id else ids
    places = [place for place, number in enumerate(ids) if number in special]
    for place in [*places, len(ids)]:
        text = str(tokenizer.decode(list(ids[start:place]), clean_up_tokenization_spaces=False))
        first, _, rest = text.strip().partition("\n")
        if not label and (start > 0 or first.startswith("<|")) and (named := _role_in(first)):
            label, text = named, rest
        if text.strip():
            parts.append(f"{label}: {text.strip()}" if label else text)
            label = ""
        if place < len(ids):
            label = _role_in(str(tokenizer.convert_ids_to_tokens(ids[place]))) or label
        start = place + 1
    return "\n".join(parts)


def _role_in(text: str) -> str:
    """The role that a special token or a line names, without its brackets; "" if it names none."""
    word = text.strip(" <|>[]/:\n").lower()
    return ROLES.get(word, "")


def text_between(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: int, stop: int) -> str:
    """The text of `ids[start:stop]` where they are: tokenizers decode the first token of a text differently."""

    def text_of(part: Sequence[int]) -> str:
        return str(tokenizer.decode(list(part), clean_up_tokenization_spaces=False))

    before, whole = text_of(ids[:start]), text_of(ids[:stop])
    return whole[len(before) :] if whole.startswith(before) else text_of(ids[start:stop])
