"""Data sets to token rows for one training step: read, split, tokenise, apply the length limit, mix, log the counts.

A token row holds `prompt_ids` (list of int), `answers` (list of lists of int, each ending with its final token unless
truncated), `margin` (float), `source` (int, the number of its data set in `TokenRows.sources`) and `digest` (a hash of
its content); in step 1 `prompt_spans` (half-open ranges of `prompt_ids` that are earlier answers of the assistant); in
step 3 `row` (JSON of all columns of the data row and of `data_source`, `answer` and `ground_truth`, for reward
functions).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Value
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.dist import main_rank_of_node_first
from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import DataFlags, parse_data_split
from dschat_ppo.data.bad_rows import report_bad_rows, report_duplicates, report_unreadable
from dschat_ppo.data.cache import regrouped
from dschat_ppo.data.examples import Use
from dschat_ppo.data.forms import FIRST_ROWS, Form, check_flags_used, detect_form
from dschat_ppo.data.lengths import Fitted, describe_counts, describe_lengths
from dschat_ppo.data.mixture import hold_out, repeated, rows_of_step, shares_of, table_of
from dschat_ppo.data.sources import DataSource, parse_sources
from dschat_ppo.data.splits import ORIGIN, Origins, load_all, load_splits
from dschat_ppo.data.stream_sources import OpenedSource, evaluation_of, find_rows, share_of, start
from dschat_ppo.data.streaming import StreamedRows
from dschat_ppo.data.templates import turn_end
from dschat_ppo.data.tokenise import DOING, TokeniseSettings, TokenTable, tokenise_rows
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.stop_requests import subprocesses_may_stop

_MANY_ROWS = 20_000  # from here on tokenising takes long enough for a message before it
PARTS = {"sft": 0, "preference": 1, "prompt": 2}


@dataclass(frozen=True)
class TokenRows:
    """Token rows for training, and for evaluation or None; `sources` are the names of the data sets."""

    train: Dataset | StreamedRows
    eval: Dataset | None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Part:
    """Rows of one data set: `order` are indices of `rows`, which are in the order of the file."""

    source: DataSource
    rows: Dataset
    order: np.ndarray


@dataclass(frozen=True)
class _Preparation:
    """What all data sets of one call of `prepare` share; the parts are added as they are read."""

    use: Use
    tokenizer: PreTrainedTokenizerBase
    flags: DataFlags
    limit: int
    all_turns: bool
    train: list[_Part] = field(default_factory=list)
    eval: list[_Part] = field(default_factory=list)
    streams: list[OpenedSource] = field(default_factory=list)
    forms: list[Form] = field(default_factory=list)

    def add_training(self, source: DataSource, has_eval_paths: bool, eval_fraction: float | None) -> None:
        """Add a data set for training, and its evaluation rows: of its own, or held out."""
        flags, seed = self.flags, self.flags.data_split_seed
        splits = load_splits(source, flags.data_output_path, flags.bad_rows)
        report_unreadable(source.spec, splits)
        raw, evaluation = splits.train, splits.eval
        form = self.form_of(source, *_first_rows(raw))
        raw, evaluation = self.grouped(form, raw), evaluation and self.grouped(form, evaluation)
        numbers = np.arange(len(raw))
        if source.flag == "--data_path":
            numbers = rows_of_step(len(raw), parse_data_split(flags.data_split), PARTS[self.use], seed)
            if len(numbers) == 0:
                raise UserError(f"{source.spec}: --data_split {flags.data_split} leaves no row for this step")
            if len(numbers) < len(raw):
                counts = f"{len(numbers)} of {len(raw)} rows"
                logger().info(f"data: {source.spec}: this step uses {counts} (--data_split {flags.data_split})")
        parts = [(numbers, "", True)]
        if eval_fraction is None or has_eval_paths:
            if evaluation is not None:
                unused = f"data: {source.spec}: its {len(evaluation)} evaluation rows are "
                used_by = (
                    "replaced by those of --eval_data_path"
                    if has_eval_paths
                    else "not used; --eval_data_path FILE uses them"
                )
                logger().info(unused + used_by)
                evaluation = None
        elif evaluation is None:
            numbers, held_out = hold_out(numbers, eval_fraction, seed)
            parts = [(numbers, "", True), (held_out, " (eval)", False)] if len(held_out) else parts
        found = self.parts_of(source, raw, splits.origins, form, parts)
        self.train.append(found[0])
        self.eval.extend(found[1:])
        if evaluation is not None:
            whole = [(np.arange(len(evaluation)), " (eval)", False)]
            self.eval.extend(self.parts_of(source, evaluation, splits.origins, form, whole))

    def add_stream(self, source: DataSource, has_eval_paths: bool, eval_fraction: float | None) -> None:
        """Add a data set whose training rows are streamed, and its own evaluation rows. None are held out of it."""
        found, first = find_rows(source, self.flags)
        form = self.form_of(source, list(dict.fromkeys(name for row in first for name in row)), first)
        if form.regroup is not None:
            raise UserError(
                f"{source.spec}: {form.name} rows are joined by their prompts, which needs all rows; use it without "
                "--streaming"
            )
        share = share_of(source, PARTS[self.use], self.flags)
        opened = OpenedSource(source, found, self.settings_of(source, form), share)
        self.streams.append(opened)
        self._log_rendering(source, form)
        if has_eval_paths:
            return
        if not opened.found.evaluation:
            if eval_fraction:
                logger().info(
                    f"data: {source.spec}: --eval_fraction holds no rows out of a stream; --eval_data_path FILE names "
                    "rows for evaluation"
                )
            return
        names = ", ".join(opened.found.evaluation)
        if eval_fraction is None:
            logger().info(
                f"data: {source.spec}: its rows for evaluation ({names}) are not used; name them with --eval_data_path"
            )
            return
        splits = evaluation_of(opened, self.flags)
        report_unreadable(source.spec, splits)
        whole = [(np.arange(len(splits.train)), f" ({names})", False)]
        self.eval.extend(self.parts_of(source, splits.train, splits.origins, opened.settings.form, whole))

    def add_evaluation(self, source: DataSource) -> None:
        """Add a data set of which all rows are for evaluation."""
        splits = load_all(source, self.flags.data_output_path, self.flags.bad_rows)
        report_unreadable(source.spec, splits)
        raw = splits.train
        form = self.form_of(source, *_first_rows(raw))
        raw = self.grouped(form, raw)
        self.eval.extend(self.parts_of(source, raw, splits.origins, form, [(np.arange(len(raw)), "", False)]))

    def form_of(self, source: DataSource, columns: list[str], first: list[dict[str, Any]]) -> Form:
        """Detect how the rows are read. The first rows of the file decide, so that all steps agree.

        Raises:
            UserError: see `detect_form`; or the form does not serve this step.
        """
        form = detect_form(source.location, columns, first, self.tokenizer.chat_template is not None, self.flags)
        logger().info(f"data: {source.spec}: {form.description}")
        if self.use not in form.uses:
            form.read(first[0], self.use, source.spec)  # raises, and names the columns that are missing
        self.forms.append(form)
        return form

    def settings_of(self, source: DataSource, form: Form) -> TokeniseSettings:
        """How the rows of a data set become token rows."""
        flags = self.flags
        truth_replaces = flags.answer_column is not None or flags.answer_pattern is not None
        return TokeniseSettings(
            form, self.use, self.tokenizer, self.limit, flags.truncation, self.all_turns, source.name, truth_replaces
        )

    def grouped(self, form: Form, raw: Dataset) -> Dataset:
        """The rows that the form reads: some forms join several rows of a file into one."""
        if form.regroup is None:
            return raw
        return regrouped(raw, form.identity, form.regroup, self.flags.data_output_path)

    def parts_of(
        self,
        source: DataSource,
        raw: Dataset,
        origins: Origins,
        form: Form,
        parts: list[tuple[np.ndarray, str, bool]],
    ) -> list[_Part]:
        """Tokenise the rows of one data set, and log what became of them.

        Args:
            source: the data set.
            raw: its rows.
            origins: names them.
            form: how they are read.
            parts: (row numbers in the order of use, suffix of the name in the log, whether they are for training).
        """
        flags, name = self.flags, f"{source.spec}{parts[0][1]}"
        numbers = np.concatenate([numbers for numbers, _, _ in parts])
        if len(numbers) >= _MANY_ROWS:
            logger().info(f"data: {name}: tokenising {len(numbers)} rows (immediate if they are cached)")
        table = tokenise_rows(raw, numbers, origins, self.settings_of(source, form), flags)
        report_bad_rows(name, table, len(numbers))
        repeats = report_duplicates(name, table, raw, origins, flags.bad_rows == "skip")
        usable = ~repeats & (table.fitted != Fitted.DROPPED) & (table.fitted != Fitted.UNUSABLE)
        found = []
        for numbers, suffix, for_training in parts:
            order = table.rows_of(numbers)
            self._log_lengths(f"{source.spec}{suffix}", table, order, for_training)
            order = order[usable[order]]
            if for_training and len(order) == 0:
                raise UserError(
                    f"{source.spec}: no row is within the limit of {self.limit} tokens; raise it, or use"
                    " --truncation left"
                )
            found.append(_Part(source, table.rows, order))
        self._log_rendering(source, form)
        return found

    def _log_lengths(self, name: str, table: TokenTable, order: np.ndarray, for_training: bool) -> None:
        order = order[table.fitted[order] != Fitted.UNUSABLE]
        fitted = table.fitted[order]
        logger().info(f"data: {name}: {len(order)} rows; {describe_counts(fitted)}")
        if len(order):
            logger().info(f"data: {name}: prompt tokens: {describe_lengths(table.prompt_tokens[order])}")
            if self.use != "prompt":
                logger().info(f"data: {name}: answer tokens: {describe_lengths(table.answer_tokens[order])}")
        if for_training and len(order) and (fitted == Fitted.ANSWER_CUT).all():
            raise UserError(f"{name}: every answer is cut by the limit of {self.limit} tokens; raise it")

    def _log_rendering(self, source: DataSource, form: Form) -> None:
        if form.rendering == "chat":
            end = self.tokenizer.convert_ids_to_tokens(turn_end(self.tokenizer).token)
            logger().info(f"data: {source.spec}: answers to chat messages end with {end}")

    def streamed(self) -> TokenRows:
        """As `mixed`, with a stream for training. Collective."""
        names = [opened.source.name for opened in self.streams]
        all_names = tuple(dict.fromkeys([*names, *(part.source.name for part in self.eval)]))
        evaluation = _joined(self.eval, all_names)
        return TokenRows(start(self.streams, self.flags), evaluation if evaluation else None, all_names)

    def mixed(self) -> TokenRows:
        """The rows of all parts: for training as their weights say, for evaluation one part after another."""
        names = tuple(dict.fromkeys(part.source.name for part in [*self.train, *self.eval]))
        shares = shares_of([part.source for part in self.train], [len(part.order) for part in self.train])
        if len(shares) > 1 or shares[0].used != shares[0].available:
            logger().info(table_of(shares))
        train = [
            replace(part, order=repeated(part.order, share.used, self.flags.data_split_seed, number))
            for number, (part, share) in enumerate(zip(self.train, shares, strict=True))
        ]
        evaluation = _joined(self.eval, names)
        return TokenRows(_joined(train, names), evaluation if evaluation else None, names)


def _first_rows(raw: Dataset) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns of a table, and its first rows."""
    columns = [name for name in raw.column_names if name != ORIGIN]
    return columns, raw.select_columns(columns).select(range(min(FIRST_ROWS, len(raw)))).to_list()


def _joined(parts: list[_Part], names: tuple[str, ...]) -> Dataset:
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


def prepare(
    use: Use,
    tokenizer: PreTrainedTokenizerBase,
    flags: DataFlags,
    limit: int,
    whole_paths: list[str] | None = None,
    eval_paths: list[str] | None = None,
    eval_fraction: float | None = None,
    all_turns: bool = False,
) -> TokenRows:
    """Token rows of one step from all its data sets.

    Args:
        use: "sft", "preference" or "prompt".
        tokenizer: of the model to train.
        flags: data sets, their form and split over the three steps, truncation policy, bad rows, cache folder and
            number of processes.
        limit: most tokens of a row.
        whole_paths: further data sets of which this step uses every row (`--sft_only_data_path`).
        eval_paths: data sets for evaluation.
        eval_fraction: fraction of the training rows held out for evaluation if a data set has no evaluation split
            and `eval_paths` is empty; None leaves evaluation to `eval_paths` alone.
        all_turns: see `encode_examples`.

    Raises:
        UserError: a data set cannot be used, or `--data_split` leaves this step no row of it; or `--bad_rows` does not
            accept its bad rows.
        StopRequested: the run receives a stop request.
    """
    with main_rank_of_node_first(), subprocesses_may_stop(DOING):
        preparation = _Preparation(use, tokenizer, flags, limit, all_turns)
        sources = parse_sources(flags.data_path, "--data_path", flags)
        sources += parse_sources(whole_paths or [], "--sft_only_data_path", flags, [source.name for source in sources])
        for source in sources:
            add = preparation.add_stream if flags.streaming else preparation.add_training
            add(source, bool(eval_paths), eval_fraction)
        for source in parse_sources(eval_paths or [], "--eval_data_path", flags):
            preparation.add_evaluation(source)
        check_flags_used(preparation.forms, flags)
        if not flags.streaming:
            return preparation.mixed()
    return preparation.streamed()
