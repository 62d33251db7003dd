"""What judges wrote, as a column of the rows and in their samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dschat_ppo.features.judges.columns import JUDGE_TEXTS
from dschat_ppo.types import Rollout

BYTES = 600  # of the end of a text


def written_column(texts: Sequence[str]) -> Tensor:
    """The ends of B texts in UTF-8, (B, `BYTES`) uint8, filled up with zeros."""
    column = torch.zeros(len(texts), BYTES, dtype=torch.uint8)
    for row, text in enumerate(texts):
        end = text.encode("utf-8", "replace").replace(b"\0", b"")[-BYTES:]
        column[row, : len(end)] = torch.tensor(list(end), dtype=torch.uint8)
    return column


def remarks_of(rows: Rollout) -> list[dict[str, str]]:
    """For each row the end of what each judge wrote, as `judge`, `judge 2`, ..."""
    column = rows.extra.get(JUDGE_TEXTS)
    if column is None:
        return [{} for _ in rows.response_ids]
    remarks = []
    for row in column.tolist():
        remarks_of_row = {}
        for ordinal, start in enumerate(range(0, len(row), BYTES), start=1):
            text = bytes(row[start : start + BYTES]).rstrip(b"\0").decode("utf-8", "ignore")
            name = "judge" if ordinal == 1 else f"judge {ordinal}"
            if text:
                remarks_of_row[name] = text
        remarks.append(remarks_of_row)
    return remarks
