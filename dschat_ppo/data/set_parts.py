"""Parts of data sets: which rows of a set a step uses, and several parts joined to one table of token rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Value

from dschat_ppo.data.forms import FIRST_ROWS, Form
from dschat_ppo.data.sources import DataSource
from dschat_ppo.data.splits import ORIGIN, Origins
from dschat_ppo.data.token_table import TokenTable


@dataclass(frozen=True)
class Part:
    """Rows of one data set: `order` are indices of `rows`, which are in the order of the file."""

    source: DataSource
    rows: Dataset
    order: np.ndarray


@dataclass(frozen=True)
class TokenisedSet:
    """Rows of one data set before bad rows and duplicates are judged, for `tools/data_preview.py`.

    Attributes:
        raw: its rows; `origins` names them.
        form: how they are read.
        table: their token rows.
        parts: (row numbers in the order of use, suffix of the name in the log, whether they are for training).
    """

    raw: Dataset
    origins: Origins
    form: Form
    table: TokenTable
    parts: list[tuple[np.ndarray, str, bool]]


def first_rows(raw: Dataset) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns of a table, and its first rows, by which the form is detected."""
    columns = [name for name in raw.column_names if name != ORIGIN]
    rows = raw.select(range(min(FIRST_ROWS, len(raw))))
    return columns, [{name: row[name] for name in columns} for row in rows]


def joined(parts: list[Part], names: tuple[str, ...]) -> Dataset:
    """The rows of the parts in their order, with the column `source`; memory-mapped apart from that and the order."""
    if not parts:
        return Dataset.from_dict({})
    tables, orders, before = [], [], 0
    for part in parts:
        source = np.full(len(part.rows), names.index(part.source.name), dtype=np.int32)
        tables.append(part.rows.add_column("source", source, feature=Value("int32")))
        orders.append(part.order + before)
        before += len(part.rows)
    order = np.concatenate(orders)
    rows = datasets.concatenate_datasets(tables)
    return rows if np.array_equal(order, np.arange(len(rows))) else rows.select(order)
