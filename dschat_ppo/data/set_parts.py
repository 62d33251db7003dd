"""Parts of data sets: which token rows of a set a step uses, and several parts joined to one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Value

from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.bad_rows import report_bad_rows, report_duplicates, report_left_out
from dschat_ppo.data.examples import limit_flag
from dschat_ppo.data.forms import FIRST_ROWS, Form
from dschat_ppo.data.lengths import Fitted, describe_counts, describe_lengths
from dschat_ppo.data.sources import DataSource
from dschat_ppo.data.splits import ORIGIN, Origins
from dschat_ppo.data.token_table import TokenTable
from dschat_ppo.data.tokenise import TokeniseSettings
from dschat_ppo.errors import UserError, counted


@dataclass(frozen=True)
class Part:
    """Rows of one data set: `order` are indices of `rows`, which are in the order of the file."""

    source: DataSource
    rows: Dataset
    order: np.ndarray


@dataclass(frozen=True)
class TokenisedSet:
    """Rows of one data set before bad rows and duplicates are judged, for `tools/data.py`. `parts` are (row numbers in
    the order of use, suffix of the name in the log, whether they are for training)."""

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


def usable_parts(
    source: DataSource, tokenised: TokenisedSet, settings: TokeniseSettings, flags: DataFlags
) -> list[Part]:
    """The parts of a set without bad rows, duplicates and rows beyond the length limit. Log what is dropped, and why.
    `UserError` if `--bad_rows` does not accept it, or if the limit leaves training no row or no whole answer."""
    table, limit = tokenised.table, f"{limit_flag(settings.use)} {settings.limit}"
    first = f"{source.label}{tokenised.parts[0][1]}"
    used = np.concatenate([numbers for numbers, _, _ in tokenised.parts])
    report_bad_rows(first, table, len(used), flags.bad_rows)
    report_left_out(first, table, tokenised.raw, used, tokenised.form.name, settings.use)
    repeats = report_duplicates(first, table, tokenised.raw, tokenised.origins, flags.bad_rows == "skip")
    usable = ~repeats & (table.fitted != Fitted.DROPPED) & (table.fitted != Fitted.UNUSABLE)
    found = []
    for numbers, suffix, for_training in tokenised.parts:
        name, order = f"{source.label}{suffix}", table.rows_of(numbers)
        readable = order[table.fitted[order] != Fitted.UNUSABLE]
        fitted = table.fitted[readable]
        logger().info(f"data: {name}: {counted(len(readable), 'row')}; {describe_counts(fitted)}")
        if len(readable):
            logger().info(f"data: {name}: prompt tokens: {describe_lengths(table.prompt_tokens[readable])}")
            if settings.use != "prompt":
                logger().info(f"data: {name}: answer tokens: {describe_lengths(table.answer_tokens[readable])}")
        if for_training and len(readable) and (fitted == Fitted.ANSWER_CUT).all():
            raise UserError(f"{source.spec}{suffix}: every answer is cut by {limit}; raise it")
        order = order[usable[order]]
        if for_training and len(order) == 0:
            reason = f"no row is within {limit}; raise it, or use --truncation left"
            raise UserError(
                f"{source.spec}: {reason if len(readable) else 'none of its rows for training serves this step'}"
            )
        found.append(Part(source, table.rows, order))
    return found


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
