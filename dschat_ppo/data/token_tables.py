"""The token rows of one data set, as a table: made in parallel or taken from the cache, with its
bad rows judged and what the length limit did logged."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features

from dschat_ppo.common.dataset_workers import in_processes, worker_count
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.common.stop_requests import raise_if_stop_requested
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data.cache import cached, token_key
from dschat_ppo.data.fitting import Fitted
from dschat_ppo.data.rows import ORIGIN, ROW, RawRows
from dschat_ppo.data.sources import DataSource
from dschat_ppo.data.tokenise import (
    DOING,
    NOTES,
    TokeniseSettings,
    features_of,
    refuse_bad,
    tokenise_batch,
)
from dschat_ppo.errors import UserError, counted

BATCH_ROWS = 512  # enough for the tokenizer; rows of 10k tokens then take some 100 MB in a worker
_SHOWN = 5  # bad rows in the log


@dataclass(frozen=True)
class TokenTable:
    """Token rows of one data set, in the order of the file, and the indices of those that a step
    uses, in the order of the step."""

    source: DataSource
    rows: Dataset
    order: np.ndarray  # indices of `rows`


def tokenised(
    source: DataSource,
    raw: RawRows,
    settings: TokeniseSettings,
    train: np.ndarray,
    held_out: np.ndarray,
) -> tuple[list[TokenTable], list[TokenTable]]:
    """Token rows of raw rows that can be used and are within the length limit; what is dropped, and
    why, is logged. They are made in parallel or taken from the cache.

    Args:
        source: The data set.
        raw: Its raw rows.
        settings: How they are tokenised.
        train: Indices of those raw rows that are for training, in their order.
        held_out: Indices of those that are for evaluation.

    Returns:
        The tables for training and for evaluation: one of each, or none if no row is asked for.

    Raises:
        UserError: `--bad_rows` does not accept the bad rows, or training is left no row or no
            whole answer.
    """
    step = settings.step
    # in the order of the file, because every read in the order of the step would be a random access
    file_order = np.sort(np.concatenate([train, held_out]))
    raw_table = raw.table.select(file_order)

    def token_rows(start: int, stop: int) -> list[dict[str, Any]]:
        batch = raw_table[start:stop]
        raw_rows = [json.loads(text) for text in batch[ROW]]
        origins = [shown_path(origin) for origin in batch[ORIGIN]]
        rows = tokenise_batch(raw_rows, origins, settings)
        return [row | {"row_index": int(file_order[start + row["row_index"]])} for row in rows]

    used_rows = hashlib.sha256(file_order.tobytes()).hexdigest()
    key = token_key(raw.table._fingerprint, settings.tokenizer, used_rows, *settings.identity())
    workers = worker_count(step.flags.preprocessing_num_workers, len(file_order))
    features = Features({**features_of(step), **NOTES})
    cache = step.flags.data_output_path
    rows = made_rows(cache, key, token_rows, len(raw_table), workers, features)
    if not len(rows):
        why = ""
        if settings.form.name == "kto" and step.use == "sft":
            why = "; all answers are labelled bad: --ignore_columns label trains them"
        raise UserError(
            f"{settings.source}: no row of this data set serves this step"
            f" ({settings.form.description}){why}"
        )
    _judge_bad_rows(source, rows, len(file_order), step)
    train_tables = list[TokenTable]()
    eval_tables = list[TokenTable]()
    if len(train):
        train_tables.append(_table_within_limit(source, rows, train, step))
    if len(held_out):
        eval_tables.append(_table_within_limit(source, rows, held_out, step, is_eval=True))
    return train_tables, eval_tables


def _column_of_notes(rows: Dataset, name: str) -> np.ndarray:
    """A column of `NOTES`, without a Python object for each row."""
    return np.concatenate([chunk.to_numpy() for chunk in rows.data.column(name).chunks])


def _indices_of(rows: Dataset, raw_indices: np.ndarray) -> np.ndarray:
    """The indices in `rows` of the token rows of some raw rows, in the order of these."""
    row_index = _column_of_notes(rows, "row_index")
    # The token rows of raw row `n` begin at `begins[n]`; a search would be slower
    counts = np.bincount(row_index, minlength=int(raw_indices.max(initial=-1)) + 1)
    begins = np.cumsum(counts) - counts
    count = counts[raw_indices]
    shifts = begins[raw_indices] - np.cumsum(count) + count
    return np.repeat(shifts, count) + np.arange(count.sum())


def _judge_bad_rows(source: DataSource, rows: Dataset, raw_count: int, step: StepData) -> None:
    """Log the bad rows among `raw_count` raw rows, and the remarks on others. `UserError` if
    `--bad_rows` does not accept so many."""
    name = source.spec
    bad = np.flatnonzero(_column_of_notes(rows, "fitted") == Fitted.UNUSABLE)
    problems = rows.data.column("problem")
    first = [str(problems[int(index)]) for index in bad[:_SHOWN]]
    refuse_bad(name, len(bad), raw_count, step.flags.bad_rows, first)
    if first:
        logger().warning(f"data: skipped: {name}: {len(bad)} of {raw_count} rows cannot be used")
    for problem in first:
        logger().warning(f"data: skipped: {problem}")
    remarks = Counter[str]()
    for lines in rows.data.column("remark").drop_null().to_pylist():
        remarks.update(lines.split("\n"))
    for remark, count in remarks.items():
        logger().warning(f"data: {name}: {counted(count, 'row')}: {remark}")


def _table_within_limit(
    source: DataSource,
    rows: Dataset,
    raw_indices: np.ndarray,
    step: StepData,
    is_eval: bool = False,
) -> TokenTable:
    """Those token rows of a data set that a step trains or evaluates.

    Args:
        source: The data set.
        rows: All its token rows, with the columns `NOTES`.
        raw_indices: The raw rows that the step trains or evaluates, in their order.
        step: The step, with its length limit.
        is_eval: Whether they are for evaluation, which may be left without a row.

    Raises:
        UserError: Training is left no row or no whole answer.
    """
    name = source.spec
    fitted = _column_of_notes(rows, "fitted")
    indices = _indices_of(rows, raw_indices)
    usable = indices[fitted[indices] != Fitted.UNUSABLE]
    facts = [f"{counted(len(usable), 'row')} of {len(raw_indices)}"]
    for outcome in Fitted:
        count = int((fitted[usable] == outcome).sum())
        if count:
            facts.append(f"{count} {outcome.words}")
    if len(usable):
        tokens = _column_of_notes(rows, "tokens")[usable]
        quantiles = np.percentile(tokens, [50, 99, 100], method="inverted_cdf").astype(int)
        facts.append("tokens before the cut: median {}, 99% {}, most {}".format(*quantiles))
    if step.content is not None:
        facts += step.content.facts(rows.select(usable))
    purpose = " (eval)" if is_eval else ""
    logger().info(f"data: {name}{purpose}: {', '.join(facts)}")

    within_limit = usable[fitted[usable] != Fitted.DROPPED]
    if not is_eval:
        flag = "--max_prompt_seq_len" if step.use == "prompt" else "--max_seq_len"
        limit = f"{flag} {step.limit}"
        if len(usable) == 0:
            raise UserError(f"{name}: none of its rows for training serves this step")
        if len(within_limit) == 0:
            raise UserError(f"{name}: no row is within {limit}; raise it, or use --truncation left")
        if (fitted[usable] == Fitted.ANSWER_CUT).all():
            raise UserError(f"{name}: every answer is cut by {limit}; raise it")
    return TokenTable(source, rows.select_columns(list(features_of(step))), within_limit)


def made_rows(
    cache: str | None,
    key: str,
    token_rows: Callable[[int, int], list[dict[str, Any]]],
    count: int,
    workers: int,
    features: Features,
) -> Dataset:
    """The token rows `token_rows(start, stop)` of `count` raw rows, which `workers` processes make
    in batches of `BATCH_ROWS`, or from the cache."""

    def write(folder: Path, worker: int) -> None:
        path = str(folder / f"rows_{worker:05d}.arrow")
        begin = count * worker // workers
        end = count * (worker + 1) // workers
        schema = features.arrow_schema
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for start in range(begin, end, BATCH_ROWS):
                raise_if_stop_requested(DOING)  # tokenising may take hours
                rows = token_rows(start, min(end, start + BATCH_ROWS))
                writer.write_table(pa.Table.from_pylist(rows, schema))

    return cached(cache, key, lambda folder: in_processes(workers, partial(write, folder), DOING))
