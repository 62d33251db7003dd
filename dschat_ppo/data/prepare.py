"""Data sets to token rows for one training step: read, find the form, choose the step's part, hold rows out, tokenise,
drop rows, mix.

A token row holds `prompt_ids` (list of int), `answers` (list of lists of int, each ending with its final token unless
truncated), `margin` (float), `source` (int, the number of its data set in `TokenRows.sources`) and `digest` (a hash of
its content); in step 1 `prompt_spans` (half-open ranges of `prompt_ids` that are earlier answers of the assistant); for
KTO `label` (float); for process reward models `step_ends` (places in the answer) and `step_labels` (floats); in step 3
`row` (JSON of all columns of the data row and of `data_source`, `answer` and `ground_truth`, for reward functions).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset, Value
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.dist import main_rank_of_node_first
from dschat_ppo.common.logging import logger
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.config.data_flags import DataFlags, parse_data_split
from dschat_ppo.data.bad_lines import too_many, way_out
from dschat_ppo.data.examples import PARTS, SPLIT_SEED, Use, limit_flag
from dschat_ppo.data.form_choice import FIRST_ROWS, detect_form
from dschat_ppo.data.forms import Form, check_flags_used, mixed_renderings
from dschat_ppo.data.rows import Origins, Rows, Splits, load_splits, regrouped, splits_named
from dschat_ppo.data.sources import DataSource, parse_sources
from dschat_ppo.data.streaming import StreamedRows, StreamSource, find_rows, start, stream_of
from dschat_ppo.data.tokenise import DOING, FITTED_NAMES, Fitted, TokeniseSettings, TokenTable, tokenise_rows
from dschat_ppo.errors import UserError, counted
from dschat_ppo.runtime.stop_requests import subprocesses_may_stop

_MANY_ROWS = 20_000  # from here on tokenising takes long enough for a message before it
_SHOWN, _REASONS = 3, 5  # bad rows, and kinds of them, in the log
_HOLD_OUT, _MIX = 1, 2  # separate the uses of `SPLIT_SEED`
EVAL_FLAG = "--eval_data_path"
Numbers = tuple[np.ndarray, str, bool]  # of rows in the order of use, suffix of their name in the log, for training?


@dataclass(frozen=True)
class TokenRows:
    """Token rows for training, and for evaluation or None. `sources` and `eval_sources` name the data sets that their
    columns `source` number."""

    train: Dataset | StreamedRows
    eval: Dataset | None
    sources: tuple[str, ...] = ()
    eval_sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """Token rows of one data set that a step uses: `order` are indices of `rows`, which are in the order of the
    file."""

    source: DataSource
    rows: Dataset
    order: np.ndarray


@dataclass(frozen=True)
class Preparation:
    """What `prepare` knows while it reads one data set after another. With `most_rows` it uses only the first rows of
    each, as if there were no others."""

    use: Use
    tokenizer: PreTrainedTokenizerBase
    flags: DataFlags
    limit: int
    whole_paths: list[str] | None = None
    eval_paths: list[str] | None = None
    eval_fraction: float | None = None
    all_turns: bool = False
    step_separator: str = "\n"
    most_rows: int | None = None
    train: list[Part] = field(default_factory=list)
    eval: list[Part] = field(default_factory=list)
    streams: list[StreamSource] = field(default_factory=list)
    forms: dict[str, Form] = field(default_factory=dict)

    def sources(self) -> list[DataSource]:
        """All data sets, those for evaluation last."""
        flags = self.flags
        sources = parse_sources(flags.data_path, "--data_path")
        names = [source.name for source in sources]
        sources += parse_sources(self.whole_paths or [], "--sft_only_data_path", names)
        return sources + parse_sources(self.eval_paths or [], EVAL_FLAG)

    def add(self, source: DataSource, for_evaluation: bool = False) -> None:
        """Read, split and tokenise a data set. All rows are for evaluation if it is given for that."""
        if self.flags.streaming and source.flag != EVAL_FLAG:
            self.add_stream(source)
            return
        flags, is_eval = self.flags, for_evaluation or source.flag == EVAL_FLAG
        splits = load_splits(source, flags.data_output_path, flags.bad_rows, whole=is_eval)
        report_unreadable(source.spec, splits, flags.bad_rows)
        raw = splits.train
        if self.most_rows is not None:
            raw = raw.select(range(min(self.most_rows, len(raw))))
        first = [raw[number] for number in range(min(FIRST_ROWS, len(raw)))]
        settings = self.settings_of(source, list(raw.columns), first)
        raw = self.grouped(settings.form, raw)
        numbers = np.arange(len(raw))
        if is_eval:
            self.tokenise(source, raw, splits.origins, settings, [(numbers, "", False)])
            return
        if source.flag == "--data_path":
            numbers = rows_of_step(len(raw), parse_data_split(flags.data_split), PARTS[self.use])
            if len(numbers) == 0:
                raise UserError(f"{source.spec}: --data_split {flags.data_split} leaves no row for this step")
            if len(numbers) < len(raw):
                used = f"{len(numbers)} of {len(raw)} rows (--data_split {flags.data_split})"
                logger().info(f"data: {source.spec}: this step uses {used}")
        evaluates, held_out = self.eval_fraction is not None and not self.eval_paths, numbers[:0]
        if evaluates and splits.eval is None:
            numbers, held_out = hold_out(numbers, self.eval_fraction or 0)
        self.tokenise(source, raw, splits.origins, settings, [(numbers, "", True), (held_out, " (eval)", False)])
        if splits.eval is None:
            return
        if evaluates:
            raw = self.grouped(settings.form, splits.eval)
            self.tokenise(source, raw, splits.origins, settings, [(np.arange(len(raw)), " (eval)", False)])
        else:
            how = f"replaced by those of {EVAL_FLAG}" if self.eval_paths else f"not used; {EVAL_FLAG} FILE uses them"
            logger().info(f"data: {source.spec}: its {len(splits.eval)} evaluation rows are {how}")

    def settings_of(self, source: DataSource, columns: list[str], first: list[dict[str, Any]]) -> TokeniseSettings:
        """Detect how the rows are read. The first rows of the file decide, so that all steps agree."""
        is_only = len([*self.flags.data_path, *(self.whole_paths or []), *(self.eval_paths or [])]) == 1
        has_template = self.tokenizer.chat_template is not None
        form = detect_form(source.location, columns, first, has_template, self.flags, is_only)
        logger().info(f"data: {source.spec}: {form.description}")
        if form.warning:
            logger().warning(f"data: {source.spec}: {form.warning}")
        form.require(self.use)
        self.forms[source.spec] = form
        return TokeniseSettings(
            form, source.name, self.use, self.tokenizer, self.flags, self.limit, self.all_turns, self.step_separator
        )

    def grouped(self, form: Form, raw: Rows) -> Rows:
        """The rows that the form reads: some forms join several rows of a file into one."""
        if form.regroup is None:
            return raw
        return regrouped(raw, form.identity, form.regroup, self.flags.data_output_path)

    def tokenise(
        self, source: DataSource, raw: Rows, origins: Origins, settings: TokeniseSettings, parts: list[Numbers]
    ) -> None:
        """Tokenise rows of one data set, and add those of its parts that are within the length limit, can be used and
        are no repetitions. Log what is dropped, and why. `UserError` if `--bad_rows` does not accept it, or if the
        limit leaves training no row or no whole answer."""
        name, policy = f"{source.spec}{parts[0][1]}", self.flags.bad_rows
        used = np.concatenate([numbers for numbers, _, _ in parts])
        if len(used) >= _MANY_ROWS:
            logger().info(f"data: {name}: tokenising {len(used)} rows (immediate if they are cached)")
        table = tokenise_rows(raw, used, origins, settings)
        report_bad_rows(name, table, len(used), policy)
        repeats = repetitions(name, table, policy == "skip")
        usable = table.usable & ~repeats if policy == "skip" else table.usable
        limit = f"{limit_flag(self.use)} {self.limit}"
        for numbers, suffix, for_training in parts:
            if len(numbers) == 0:
                continue
            order = table.rows_of(numbers)
            order = order[table.fitted[order] != Fitted.UNUSABLE]
            fitted = table.fitted[order]
            counts = ((int((fitted == code).sum()), what) for code, what in FITTED_NAMES.items())
            shown = [f"{counted(len(order), 'row')} of {len(numbers)}", *(f"{n} {what}" for n, what in counts if n)]
            if len(order):
                quantiles = np.percentile(table.tokens[order], [50, 99, 100], method="inverted_cdf").astype(int)
                shown.append("tokens before the cut: median {}, 99% {}, most {}".format(*quantiles))
            logger().info(f"data: {source.spec}{suffix}: {', '.join(shown)}")
            if for_training and len(order) == 0:
                raise UserError(f"{source.spec}: none of its rows for training serves this step")
            if for_training and (fitted == Fitted.ANSWER_CUT).all():
                raise UserError(f"{source.spec}{suffix}: every answer is cut by {limit}; raise it")
            order = order[usable[order]]
            if for_training and len(order) == 0:
                raise UserError(f"{source.spec}: no row is within {limit}; raise it, or use --truncation left")
            (self.train if for_training else self.eval).append(Part(source, table.rows, order))

    def add_stream(self, source: DataSource) -> None:
        """Add a data set whose training rows are streamed, and its own evaluation rows. None are held out of it."""
        found, flags = find_rows(source, self.flags), self.flags
        settings = self.settings_of(source, found.columns, found.first)
        if settings.form.regroup is not None:
            raise UserError(
                f"{source.spec}: {settings.form.name} rows are joined by their prompts, which needs all rows; use it "
                "without --streaming"
            )
        self.streams.append(stream_of(found, settings))
        names = ", ".join(found.evaluation)
        if self.eval_paths:
            return
        if names and self.eval_fraction is not None:
            splits = splits_named(found.opened, found.evaluation, flags.data_output_path, flags.bad_rows)
            report_unreadable(source.spec, splits, flags.bad_rows)
            whole = [(np.arange(len(splits.train)), f" ({names})", False)]
            self.tokenise(source, splits.train, splits.origins, settings, whole)
        elif names:
            note = f"its rows for evaluation ({names}) are not used; name them with --eval_data_path"
            logger().info(f"data: {source.spec}: {note}")
        elif self.eval_fraction:
            note = "--eval_fraction holds no rows out of a stream; --eval_data_path FILE names rows for evaluation"
            logger().info(f"data: {source.spec}: {note}")

    def mixed(self) -> TokenRows:
        """The rows of all parts: for training as their weights say, for evaluation one part after another."""
        check_flags_used(list(self.forms.values()), self.flags)
        note = mixed_renderings(self.forms)
        if note and self.flags.apply_chat_template is None:
            logger().info(f"data: {note}")
        evaluation, eval_names = joined(self.eval)
        if self.streams:
            names = tuple(dict.fromkeys(source.name for source in self.streams))
            stream = start(self.streams, self.use, self.limit, self.flags)
            return TokenRows(stream, evaluation or None, names, eval_names)
        train, names = joined(mix(self.train))
        return TokenRows(train, evaluation or None, names, eval_names)


# Which rows of each data set a step uses, and in which order: they depend on counts and one seed alone, so they are
# equal on every rank and after a resume.


def rows_of_step(count: int, shares: tuple[float, float, float], part: int) -> np.ndarray:
    """(N,) int64, numbers of the rows of one step: `part` 0 is SFT, 1 reward model, 2 PPO. The parts are random,
    disjoint and complete. All three steps see the same split of `count` rows, which `shares` decide."""
    order = torch.randperm(count, generator=shared_generator(SPLIT_SEED)).numpy()
    bounds = [round(count * sum(shares[:i]) / sum(shares)) for i in range(4)]
    return order[bounds[part] : bounds[part + 1]]


def hold_out(numbers: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split row numbers at random into (for training, held out). At least one row is held out and one is kept. Nothing
    is held out if `fraction` is 0 or there is only one row."""
    if fraction == 0 or len(numbers) < 2:
        return numbers, numbers[:0]
    count = min(len(numbers) - 1, max(1, round(len(numbers) * fraction)))
    order = torch.randperm(len(numbers), generator=shared_generator(SPLIT_SEED, _HOLD_OUT)).numpy()
    return numbers[order[count:]], numbers[order[:count]]


def mix(parts: list[Part]) -> list[Part]:
    """The parts with the rows that an epoch has of each: all of them as often as they fit, then a random remainder in
    the order of the file. Data sets with a weight share the sum of their sizes in proportion to their weights, rounded
    so that the total is exact; `@ROWS` sets a number; all others are used once."""
    used = [len(part.order) if part.source.samples is None else part.source.samples for part in parts]
    weighted = [place for place, part in enumerate(parts) if part.source.weight is not None]
    weights = [float(parts[place].source.weight or 0) for place in weighted]
    total, before = sum(len(parts[place].order) for place in weighted), 0
    for number, place in enumerate(weighted, start=1):
        bound = round(total * sum(weights[:number]) / sum(weights))
        used[place], before = bound - before, bound
    mixed = []
    for number, (part, count) in enumerate(zip(parts, used, strict=True)):
        there = len(part.order)
        whole, rest = divmod(count, there)
        chosen = torch.randperm(there, generator=shared_generator(SPLIT_SEED, _MIX, number))[:rest].sort().values
        mixed.append(replace(part, order=np.concatenate([*[part.order] * whole, part.order[chosen.numpy()]])))
        if len(parts) > 1 or count != there:
            share = f"{count} rows of an epoch ({100 * count / sum(used):.1f} %)"
            logger().info(f"data: {part.source.spec}: {share}, {count / there:.2f} times its {there}")
    return mixed


def joined(parts: list[Part]) -> tuple[Dataset, tuple[str, ...]]:
    """The rows of the parts in their order, with the column `source`; memory-mapped apart from that and the order. And
    the names of the data sets that this column numbers."""
    names = tuple(dict.fromkeys(part.source.name for part in parts))
    if not parts:
        return Dataset.from_dict({}), names
    tables, orders, before = [], [], 0
    for part in parts:
        source = np.full(len(part.rows), names.index(part.source.name), dtype=np.int32)
        tables.append(part.rows.add_column("source", source, feature=Value("int32")))
        orders.append(part.order + before)
        before += len(part.rows)
    order = np.concatenate(orders)
    rows = datasets.concatenate_datasets(tables)
    return (rows if np.array_equal(order, np.arange(len(rows))) else rows.select(order)), names


# Bad rows and repeated ones


def report_unreadable(name: str, splits: Splits, policy: str) -> None:
    """Log the unreadable lines of files that `--bad_rows` left out; `UserError` if they are too many."""
    lines = splits.skipped.count + len(splits.train) + (0 if splits.eval is None else len(splits.eval))
    _report(name, "lines cannot be read", splits.skipped.count, lines, policy, [splits.skipped.first])


def report_bad_rows(name: str, table: TokenTable, rows: int, policy: str) -> None:
    """Log the rows that `--bad_rows` drops: how many of `rows` raw rows for each reason, and the first ones.
    `UserError` if they are too many, or if `--truncation error` refuses the length of one."""
    if (too_long := np.flatnonzero(table.fitted == Fitted.TOO_LONG)).size:
        more = f" ({len(too_long)} rows are too long)" if len(too_long) > 1 else ""
        raise UserError(f"{table.problem(int(too_long[0]))[0]}{more}")
    found = [table.problem(int(index)) for index in np.flatnonzero(table.fitted == Fitted.UNUSABLE)]
    # reasons without the values that they quote, so that equal faults are counted together
    plain = (re.sub(r"\d+", "N", re.sub(r" ?\(.*?\)", "", reason)) for _, reason in found)
    kinds = Counter(" ".join(reason.split())[:120] for reason in plain).most_common(_REASONS)
    what = f"rows cannot be used: {'; '.join(f'{count} {kind}' for kind, count in kinds)}"
    _report(name, what, len(found), rows, policy, [message for message, _ in found[:_SHOWN]])


def _report(name: str, what: str, bad: int, rows: int, policy: str, first: list[str]) -> None:
    """Log that `bad` of `rows` are left out, and the first ones; `UserError` if they are too many."""
    if not bad:
        return
    if too_many(bad, rows, policy):
        raise UserError(f"{name}: {bad} of {rows} {what}{way_out(bad, rows, policy)}. The first: {' | '.join(first)}")
    for line in (f"{name}: skipped: {bad} of {rows} {what}", *(f"skipped: {message}" for message in first)):
        logger().warning(f"data: {line}")


def repetitions(name: str, table: TokenTable, skips: bool) -> np.ndarray:
    """(N,) bool, True on the token rows whose digest is that of an earlier one; blocks of long texts are never. Logs
    them, and whether `skips` drops them."""
    usable = np.flatnonzero(table.usable & (table.fitted != Fitted.BLOCK))
    digests = np.array(table.rows.data.column("digest"))[usable]
    _, first = np.unique(digests, return_index=True)
    repeats = np.zeros(len(table.number), dtype=bool)
    repeats[np.delete(usable, first)] = True
    if count := int(repeats.sum()):
        later = int(repeats.argmax())
        earlier = int(usable[(digests == digests[np.searchsorted(usable, later)]).argmax()])
        done = "are dropped" if skips else "are kept (--bad_rows skip drops them)"
        pair = f"{table.place(later)} repeats {table.place(earlier)}"
        logger().warning(f"data: {name}: {count} rows repeat an earlier row and {done}: {pair}")
    return repeats


# The whole


def prepare(
    use: Use, tokenizer: PreTrainedTokenizerBase, flags: DataFlags, limit: int, whole_paths: list[str] | None = None,
    eval_paths: list[str] | None = None, eval_fraction: float | None = None, all_turns: bool = False,
    step_separator: str = "\n",
) -> TokenRows:  # fmt: skip
    """Token rows of one step from all its data sets, of at most `limit` tokens.

    Args:
        whole_paths: further data sets of which this step uses every row (`--sft_only_data_path`).
        eval_paths: data sets for evaluation.
        eval_fraction: fraction of the training rows held out for evaluation if a data set has no evaluation split
            and `eval_paths` is empty; None leaves evaluation to `eval_paths` alone.
        all_turns, step_separator: see `encode_examples` and `TokeniseSettings`.

    Raises:
        UserError: a data set cannot be used or has no row for this step, or `--bad_rows` refuses its bad rows.
        StopRequested: the run receives a stop request.
    """
    with main_rank_of_node_first(), subprocesses_may_stop(DOING):
        preparation = Preparation(
            use, tokenizer, flags, limit, whole_paths, eval_paths, eval_fraction, all_turns, step_separator
        )
        for source in preparation.sources():
            preparation.add(source)
    return preparation.mixed()  # outside of the block: ranks read their first rows of a stream at the same time


def prepare_whole(
    use: Use, tokenizer: PreTrainedTokenizerBase, flags: DataFlags, limit: int, flag: str
) -> tuple[Dataset, tuple[str, ...]]:
    """(token rows of all rows of `flags.data_path` in the order of the files, names of the data sets that their column
    `source` numbers), for an evaluation outside of training. `flag` names the data sets in messages."""
    preparation = Preparation(use, tokenizer, flags, limit)
    for source in parse_sources(flags.data_path, flag):
        preparation.add(source, for_evaluation=True)
    rows = preparation.mixed()
    if rows.eval is None:
        raise UserError(f"{flag}: no row is within {limit_flag(use)} {limit}; raise it, or use --truncation left")
    return rows.eval, rows.eval_sources
