"""The text of a token row for the log, with its answers marked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.data.encode import decoded
from dschat_ppo.data.examples import ADDED
from dschat_ppo.data.streaming import StreamedRows, rows_at_hand

MOST_CHARACTERS, _COLUMN_CHARACTERS = 2000, 200  # of a sample, and of each of its other columns, in the log


def log_samples(
    tokenizer: PreTrainedTokenizerBase, rows: Dataset | StreamedRows, names: Sequence[str], count: int = 1
) -> None:
    """Log the first `count` rows of each data set that are at hand, with what else the step uses of them: margin,
    labels, in step 3 the columns that rewards receive."""
    rows = rows_at_hand(rows)
    sources = np.asarray(rows.with_format("numpy")["source"][:])
    for index in np.concatenate([np.flatnonzero(sources == number)[:count] for number in np.unique(sources)]):
        row = rows[int(index)]
        columns = {"margin": row.get("margin") or None, "label": row.get("label"), "labels": row.get("step_labels")}
        columns |= {name: value for name, value in json.loads(row.get("row") or "{}").items() if name not in ADDED}
        shown = [f"{names[row['source']]}: "] if len(names) > 1 else []
        shown += ["a sample", ", answers in ⟦ ⟧" if row["answers"] else "", f":\n{row_sample(tokenizer, row)}"]
        for name, value in columns.items():
            if value is not None:
                shown.append(f"\n  {name}: {_shortened(json.dumps(value, ensure_ascii=False), _COLUMN_CHARACTERS)}")
        logger().info(f"data: {''.join(shown)}")


def row_sample(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> str:
    """The text of a token row, special tokens included, with the trained parts in ⟦ ⟧; of a long text its start and
    end. A second answer follows on a line that starts with `or`. A prompt without answers (step 3) has no marks."""
    prompt, (first, *others) = row["prompt_ids"], row["answers"] or [[]]
    ids, spans = [*prompt, *first], [place for span in row.get("prompt_spans") or () for place in span]
    bounds = [0, *spans, len(prompt), len(ids)] if first else [0, len(ids)]  # every second part is trained
    parts = [text_between(tokenizer, ids, start, stop) for start, stop in pairwise(bounds)]
    text = "".join(f"⟦{part}⟧" if number % 2 else part for number, part in enumerate(parts)).replace("⟧⟦", "")
    for answer in others:
        text += f"\nor ⟦{text_between(tokenizer, [*prompt, *answer], len(prompt))}⟧"
    return _shortened(text, MOST_CHARACTERS)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"


def text_between(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: int, stop: int | None = None) -> str:
    """The text of `ids[start:stop]` where they are: tokenizers decode the first token of a text differently."""
    before, whole = decoded(tokenizer, ids[:start]), decoded(tokenizer, ids[:stop])
    return whole[len(before) :] if whole.startswith(before) else decoded(tokenizer, ids[start:stop])
