"""Data sets to token rows for one training step: read, find the form, choose the step's share, hold
out, tokenise, mix.

A token row holds `prompt_ids` (list of int), `answers` (list of lists of int, each ending with its
final token unless truncated), `margin` (float), `source` (int, the number of its data set in
`TokenRows.sources`) and `digest` (a hash of its content); in step 1 `prompt_spans` (half-open
ranges of `prompt_ids` that are earlier answers of the assistant); in step 2 `untrained_spans`
(half-open ranges of each answer that the user says); for KTO `label` (float); the columns of a use
that a feature adds (`uses.py`), and columns of ids (`StepData.prompt_columns`); in step 3 `row`
(JSON of all columns of the data row and of `data_source`, `answer` and `ground_truth`, for reward
functions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset, Value
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.dist import main_rank_of_node_first
from dschat_ppo.common.logging import logger
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.common.stop_requests import subprocesses_may_stop
from dschat_ppo.config.data_flags import StepData, parse_data_split
from dschat_ppo.data.examples import SHARE_OF_USE, SPLIT_SEED
from dschat_ppo.data.form_choice import FIRST_ROWS, detect_form
from dschat_ppo.data.forms import Form, check_flags_used
from dschat_ppo.data.lazy_rows import TrainingRows, rows_at_hand
from dschat_ppo.data.rows import RawRows, read_splits
from dschat_ppo.data.shards import KeepBytes, Row, number_of_bytes
from dschat_ppo.data.sources import (
    DataSource,
    OpenSet,
    open_set,
    parse_sources,
    parse_unweighted,
)
from dschat_ppo.data.token_tables import TokenTable, tokenised
from dschat_ppo.data.tokenise import DOING, TokeniseSettings, rows_for_form
from dschat_ppo.errors import UserError

EVAL_FLAG = "--eval_data_path"
# separate the uses of `SPLIT_SEED`
_HOLD_OUT = 1
_MIX = 2


@dataclass(frozen=True)
class TokenRows:
    """Token rows for training, and for evaluation or None. `sources` and `eval_sources` name the
    data sets that their columns `source` number."""

    train: TrainingRows
    eval: Dataset | None
    sources: tuple[str, ...] = ()
    eval_sources: tuple[str, ...] = ()

    @property
    def at_hand(self) -> Dataset:
        """The rows for training that are there before the run trains: all, unless they are lazy."""
        return rows_at_hand(self.train)


@dataclass(frozen=True)
class PreparedSource:
    """What one data set with these `columns` gives a step: tables of token rows for training, or
    what `StepData.lazy` makes them from, and tables for evaluation."""

    form: Form
    columns: Sequence[str]
    train: Sequence[TokenTable] = ()
    evaluation: Sequence[TokenTable] = ()
    lazy: Any = None


def prepare(step: StepData, tokenizer: PreTrainedTokenizerBase) -> TokenRows:
    """Token rows of one step from all its data sets.

    Raises:
        UserError: A data set cannot be used or has no row for this step, or `--bad_rows` refuses
            its bad rows.
        StopRequested: On a stop request.
    """
    flags = step.flags
    if step.whole_flag:
        sources = parse_unweighted(flags.data_path, step.whole_flag)
    else:
        sources = parse_sources(flags.data_path, "--data_path")
    names = [source.name for source in sources]
    sources += parse_sources(step.whole_paths, "--sft_only_data_path", names)
    sources += parse_unweighted(step.eval_paths, EVAL_FLAG)
    is_only = len(sources) == 1
    prepared = list[PreparedSource]()
    with main_rank_of_node_first(), subprocesses_may_stop(DOING):
        for source in sources:
            if step.lazy is None or _only_evaluates(source, step):
                prepared.append(_prepare_table(source, step, tokenizer, is_only))
            else:
                prepared.append(step.lazy.prepare_source(source, step, tokenizer, is_only))

    # outside of the block: ranks make their first lazy rows at the same time
    check_flags_used([source.form for source in prepared], flags)
    if step.content is not None:
        columns_of_sets = {
            source.spec: prepared_source.columns
            for source, prepared_source in zip(sources, prepared, strict=True)
        }
        step.content.check_flags_used(columns_of_sets)
    train = list[TokenTable]()
    evaluation = list[TokenTable]()
    lazy_sources = list[Any]()
    for prepared_source in prepared:
        train += prepared_source.train
        evaluation += prepared_source.evaluation
        if prepared_source.lazy is not None:
            lazy_sources.append(prepared_source.lazy)
    eval_counts = [_eval_count(table, step) for table in evaluation]
    eval_rows, eval_names = joined(evaluation, eval_counts)
    if step.lazy is not None and lazy_sources:
        lazy_rows, lazy_names = step.lazy.start(lazy_sources, step)
        return TokenRows(lazy_rows, eval_rows or None, lazy_names, eval_names)
    rows, train_names = joined(train, epoch_rows(train))
    return TokenRows(rows, eval_rows or None, train_names, eval_names)


def _only_evaluates(source: DataSource, step: StepData) -> bool:
    """Whether all rows of a data set are for evaluation."""
    return source.flag in (EVAL_FLAG, step.whole_flag)


def _prepare_table(
    source: DataSource, step: StepData, tokenizer: PreTrainedTokenizerBase, is_only: bool
) -> PreparedSource:
    """A data set whose rows are all read and tokenised before the run begins. `is_only`: the step
    has no other one."""
    only_evaluates = _only_evaluates(source, step)
    cache = step.flags.data_output_path
    opened = open_set(source, cache)
    groups, eval_splits = opened.chosen(only_evaluates=only_evaluates)
    raw_rows = read_splits(opened, groups, cache, _kept_bytes(step))
    if step.most_rows is not None:
        raw_rows = raw_rows.select(range(min(step.most_rows, len(raw_rows))))
    raw_eval_rows = rows_of_eval_splits(opened, eval_splits, step)
    columns = list(raw_rows.columns)
    first_rows = list[Row]()
    for index in range(len(raw_rows)):
        row = raw_rows[index]
        if isinstance(row, dict):  # else a text says why it cannot be read
            first_rows.append(row)
        if len(first_rows) == FIRST_ROWS:
            break
    settings = settings_by_first_rows(source, columns, first_rows, step, tokenizer, is_only)

    count = len(raw_rows)
    train_rows = np.arange(count)
    held_out = np.arange(0)
    if only_evaluates:
        train_rows = np.arange(0)
        held_out = np.arange(count)
    elif source.flag == "--data_path":
        begin, end = share_of_data_split(source, count, step)
        if (begin, end) != (0, count):
            used = f"{end - begin} of {count} rows (--data_split {step.flags.data_split})"
            logger().info(f"data: {source.spec}: this step uses {used}")
        order = torch.randperm(count, generator=shared_generator(SPLIT_SEED)).numpy()
        train_rows = order[begin:end]
    # rows of `--eval_data_path` and those that the data set has for evaluation take their place
    if step.eval_fraction and not (only_evaluates or step.eval_paths or eval_splits):
        train_rows, held_out = hold_out(train_rows, step.eval_fraction)
    train, evaluation = tokenised(source, raw_rows, settings, train_rows, held_out)
    evaluation += tables_of_eval_splits(source, eval_splits, raw_eval_rows, settings, step)
    return PreparedSource(settings.form, columns, train, evaluation)


def rows_of_eval_splits(opened: OpenSet, eval_splits: list[str], step: StepData) -> RawRows | None:
    """The raw rows of those splits of a training data set that evaluate it, if the step wants
    them."""
    if not eval_splits or step.eval_paths or step.eval_fraction is None:
        return None
    cache = step.flags.data_output_path
    return read_splits(opened, [(eval_splits, "")], cache, _kept_bytes(step))


def _kept_bytes(step: StepData) -> KeepBytes:
    """What stands for bytes in the rows of a step."""
    if step.content is None:
        return number_of_bytes
    keep: KeepBytes = step.content.kept
    return keep


def settings_by_first_rows(
    source: DataSource,
    columns: list[str],
    first_rows: list[dict[str, Any]],
    step: StepData,
    tokenizer: PreTrainedTokenizerBase,
    is_only: bool,
) -> TokeniseSettings:
    """How rows of a data set are tokenised. Its columns and first rows decide the form, so that all
    steps agree; the form is logged."""
    if _only_evaluates(source, step):  # what only training reads is not asked of its rows
        columns_of_eval = step.eval_prompt_columns
        step = replace(step, prompt_columns=columns_of_eval, keeps_answers=False)
    form_columns = columns
    if step.content is not None:
        if is_only:
            step.content.check_flags_used({source.spec: columns})
        content = step.content.of_source(source.location, columns, first_rows)
        step = replace(step, content=content)
        form_columns = content.columns_left(columns)
        first_rows = rows_for_form(first_rows, step)
    has_template = tokenizer.chat_template is not None
    use = step.form_use
    form = detect_form(
        source.location, form_columns, first_rows, has_template, step.flags, is_only, use
    )
    logger().info(f"data: {source.spec}: {form.description}")
    if form.warning:
        logger().warning(f"data: {source.spec}: {form.warning}")
    return TokeniseSettings(form, source.name, columns, tokenizer, step)


def share_of_data_split(source: DataSource, count: int, step: StepData) -> tuple[int, int]:
    """`share_of_step` by `--data_split`. `UserError` if the step gets no row."""
    data_split = step.flags.data_split
    begin, end = share_of_step(count, parse_data_split(data_split), SHARE_OF_USE.get(step.use, 1))
    if begin == end:
        raise UserError(f"{source.spec}: --data_split {data_split} leaves no row for this step")
    return begin, end


def tables_of_eval_splits(
    source: DataSource,
    eval_splits: list[str],
    raw_eval_rows: RawRows | None,
    settings: TokeniseSettings,
    step: StepData,
) -> list[TokenTable]:
    """The token rows of `rows_of_eval_splits`. Splits that are not read are named in the log."""
    if raw_eval_rows is not None:
        settings = replace(settings, columns=raw_eval_rows.columns)
        every_row = np.arange(len(raw_eval_rows))
        _, evaluation = tokenised(source, raw_eval_rows, settings, np.arange(0), every_row)
        return evaluation
    if eval_splits:
        how = "not used; name them with"
        if step.eval_paths:
            how = "replaced by those of"
        logger().info(f"data: {source.spec}: its rows for evaluation are {how} {EVAL_FLAG}")
    return []


def _eval_count(table: TokenTable, step: StepData) -> int:
    """How many rows of a table evaluate the model. `@ROWS` of a data set that trains is about
    training, not about the rows held out of it."""
    if _only_evaluates(table.source, step) and table.source.samples is not None:
        return min(len(table.order), table.source.samples)
    return len(table.order)


# Which rows of each data set a step uses, and in which order: they depend on counts and one seed
# alone, so they are equal on every rank and after a resume.


def share_of_step(count: int, shares: tuple[float, float, float], share: int) -> tuple[int, int]:
    """The half-open range in an order of `count` rows that one step uses: `share` 0 is that of SFT,
    1 of the reward model, 2 of PPO. The three ranges are disjoint and complete."""
    total = sum(shares)
    begin = round(count * sum(shares[:share]) / total)
    end = round(count * sum(shares[: share + 1]) / total)
    return begin, end


def hold_out(indices: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split row indices at random into (for training, held out). At least one row is held out and
    one is kept. Nothing is held out if `fraction` is 0 or there is only one row."""
    if fraction == 0 or len(indices) < 2:
        return indices, indices[:0]
    count = min(len(indices) - 1, max(1, round(len(indices) * fraction)))
    order = torch.randperm(len(indices), generator=shared_generator(SPLIT_SEED, _HOLD_OUT)).numpy()
    return indices[order[count:]], indices[order[:count]]


def epoch_rows(tables: Sequence[TokenTable]) -> list[int]:
    """How many rows an epoch has of each table. Data sets with a weight share the sum of their
    sizes in proportion to their weights, rounded so that the total is exact; `@ROWS` sets a number;
    of all others each row is used once."""
    used = list[int]()
    weighted = list[int]()  # indices of `tables`
    for index, table in enumerate(tables):
        samples = table.source.samples
        used.append(len(table.order) if samples is None else samples)
        if table.source.weight is not None:
            weighted.append(index)
    weights = [float(tables[index].source.weight or 0) for index in weighted]
    total = sum(len(tables[index].order) for index in weighted)
    before = 0
    for position, index in enumerate(weighted, start=1):
        bound = round(total * sum(weights[:position]) / sum(weights))
        used[index] = bound - before
        before = bound
    for table, count in zip(tables, used, strict=True):
        if len(tables) > 1 or count != len(table.order):
            share = f"{count} rows of an epoch ({100 * count / sum(used):.1f} %)"
            times = f"{count / len(table.order):.2f} times its {len(table.order)}"
            logger().info(f"data: {table.source.spec}: {share}, {times}")
    return used


def joined(
    token_tables: Sequence[TokenTable], counts: Sequence[int]
) -> tuple[Dataset, tuple[str, ...]]:
    """Rows of several data sets, one after another.

    Args:
        token_tables: The token rows of each.
        counts: How many rows to take of each: all of them as often as they fit, then a random
            remainder in the order of the file.

    Returns:
        The rows, memory-mapped apart from their order and their column `source`, and the names of
        the data sets that this column numbers.
    """
    names = tuple(dict.fromkeys(table.source.name for table in token_tables))
    if not token_tables:
        return Dataset.from_dict({}), names
    tables_with_source = list[Dataset]()
    orders = list[np.ndarray]()
    rows_before = 0  # in the tables before this one
    for index, (table, count) in enumerate(zip(token_tables, counts, strict=True)):
        times, rest = divmod(count, max(1, len(table.order)))
        orders += [rows_before + table.order] * times
        generator = shared_generator(SPLIT_SEED, _MIX, index)
        shuffled = torch.randperm(len(table.order), generator=generator)
        orders.append(rows_before + table.order[shuffled[:rest].sort().values.numpy()])
        source = np.full(len(table.rows), names.index(table.source.name), dtype=np.int32)
        tables_with_source.append(table.rows.add_column("source", source, feature=Value("int32")))
        rows_before += len(table.rows)
    order = np.concatenate(orders)
    rows = datasets.concatenate_datasets(tables_with_source)
    if not np.array_equal(order, np.arange(len(rows))):
        rows = rows.select(order)
    return rows, names
