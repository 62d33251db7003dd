"""Data sets to token rows for one training step: read, split, tokenise, apply the length limit, mix, log the counts.

A token row holds `prompt_ids` (list of int), `answers` (list of lists of int, each ending with its final token unless
truncated), `margin` (float), `source` (int, the number of its data set in `TokenRows.sources`) and `digest` (a hash of
its content); in step 1 `prompt_spans` (half-open ranges of `prompt_ids` that are earlier answers of the assistant); for
KTO `label` (float); for process reward models `step_ends` (places in the answer) and `step_labels` (floats); in step 3
`row` (JSON of all columns of the data row and of `data_source`, `answer` and `ground_truth`, for reward functions).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.dist import main_rank_of_node_first
from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import DataFlags, parse_data_split
from dschat_ppo.data.bad_rows import report_unreadable
from dschat_ppo.data.cache import regrouped
from dschat_ppo.data.examples import PARTS, Use, limit_flag
from dschat_ppo.data.forms import Form, check_flags_used, detect_form, mixed_renderings
from dschat_ppo.data.mixture import SPLIT_SEED, hold_out, repeated, rows_of_step, shares_of, table_of
from dschat_ppo.data.set_parts import Part, TokenisedSet, first_rows, joined, usable_parts
from dschat_ppo.data.sources import DataSource, labelled, parse_sources
from dschat_ppo.data.splits import Origins, load_all, load_splits
from dschat_ppo.data.stream_sources import OpenedSource, evaluation_of, find_rows, share_of, start
from dschat_ppo.data.streaming import StreamedRows
from dschat_ppo.data.templates import turn_end
from dschat_ppo.data.token_table import tokenise_rows
from dschat_ppo.data.tokenise import DOING, TokeniseSettings
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.stop_requests import subprocesses_may_stop

_MANY_ROWS = 20_000  # from here on tokenising takes long enough for a message before it
EVAL_FLAG = "--eval_data_path"


@dataclass(frozen=True)
class TokenRows:
    """Token rows for training, and for evaluation or None. `sources` and `eval_sources` name the data sets that their
    columns `source` number."""

    train: Dataset | StreamedRows
    eval: Dataset | None
    sources: tuple[str, ...] = ()
    eval_sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preparation:
    """What `prepare` knows while it reads one data set after another. With `most_rows` it uses only the first rows of
    each, as if there were no others. `seen` holds each data set that was tokenised, also one that was refused
    afterwards."""

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
    seen: list[TokenisedSet] = field(default_factory=list)
    train: list[Part] = field(default_factory=list)
    eval: list[Part] = field(default_factory=list)
    streams: list[OpenedSource] = field(default_factory=list)
    forms: dict[str, Form] = field(default_factory=dict)

    def sources(self) -> list[DataSource]:
        """All data sets, those for evaluation last."""
        flags = self.flags
        sources = parse_sources(flags.data_path, "--data_path")
        names = [source.name for source in sources]
        sources += parse_sources(self.whole_paths or [], "--sft_only_data_path", names)
        return labelled(sources + parse_sources(self.eval_paths or [], EVAL_FLAG))

    def add(self, source: DataSource) -> None:
        """Read, split and tokenise a data set."""
        if source.flag == EVAL_FLAG:
            self.add_evaluation(source)
        elif self.flags.streaming:
            self.add_stream(source)
        else:
            self.add_training(source)

    def add_training(self, source: DataSource) -> None:
        """Add a data set for training, and its evaluation rows: from files given for it, or held out."""
        flags = self.flags
        splits = load_splits(source, flags.data_output_path, flags.bad_rows)
        report_unreadable(source.label, splits, self.flags.bad_rows)
        raw, evaluation = self.first(splits.train), splits.eval
        form = self.form_of(source, *first_rows(raw))
        raw, evaluation = self.grouped(form, raw), evaluation and self.grouped(form, evaluation)
        numbers = np.arange(len(raw))
        if source.flag == "--data_path":
            numbers = rows_of_step(len(raw), parse_data_split(flags.data_split), PARTS[self.use], SPLIT_SEED)
            if len(numbers) == 0:
                raise UserError(f"{source.spec}: --data_split {flags.data_split} leaves no row for this step")
            if len(numbers) < len(raw):
                counts = f"{len(numbers)} of {len(raw)} rows"
                logger().info(f"data: {source.label}: this step uses {counts} (--data_split {flags.data_split})")
        parts = [(numbers, "", True)]
        if self.eval_fraction is None or self.eval_paths:
            if evaluation is not None:
                how = "replaced by those of {}" if self.eval_paths else "not used; {} FILE uses them"
                logger().info(
                    f"data: {source.label}: its {len(evaluation)} evaluation rows are {how.format(EVAL_FLAG)}"
                )
                evaluation = None
        elif evaluation is None:
            numbers, held_out = hold_out(numbers, self.eval_fraction, SPLIT_SEED)
            parts = [(numbers, "", True), (held_out, " (eval)", False)] if len(held_out) else parts
        found = self.parts_of(source, raw, splits.origins, form, parts)
        self.train.append(found[0])
        self.eval.extend(found[1:])
        if evaluation is not None:
            whole = [(np.arange(len(evaluation)), " (eval)", False)]
            self.eval.extend(self.parts_of(source, evaluation, splits.origins, form, whole))

    def add_stream(self, source: DataSource) -> None:
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
        if self.eval_paths:
            return
        if not opened.found.evaluation:
            if self.eval_fraction:
                logger().info(
                    f"data: {source.label}: --eval_fraction holds no rows out of a stream; --eval_data_path FILE names "
                    "rows for evaluation"
                )
            return
        names = ", ".join(opened.found.evaluation)
        if self.eval_fraction is None:
            logger().info(
                f"data: {source.label}: its rows for evaluation ({names}) are not used; name them with --eval_data_path"
            )
            return
        splits = evaluation_of(opened, self.flags)
        report_unreadable(source.label, splits, self.flags.bad_rows)
        whole = [(np.arange(len(splits.train)), f" ({names})", False)]
        self.eval.extend(self.parts_of(source, splits.train, splits.origins, opened.settings.form, whole))

    def add_evaluation(self, source: DataSource) -> None:
        """Add a data set of which all rows are for evaluation."""
        splits = load_all(source, self.flags.data_output_path, self.flags.bad_rows)
        report_unreadable(source.label, splits, self.flags.bad_rows)
        raw = self.first(splits.train)
        form = self.form_of(source, *first_rows(raw))
        raw = self.grouped(form, raw)
        self.eval.extend(self.parts_of(source, raw, splits.origins, form, [(np.arange(len(raw)), "", False)]))

    def form_of(self, source: DataSource, columns: list[str], first: list[dict[str, Any]]) -> Form:
        """Detect how the rows are read. The first rows of the file decide, so that all steps agree."""
        is_only = len([*self.flags.data_path, *(self.whole_paths or []), *(self.eval_paths or [])]) == 1
        has_template = self.tokenizer.chat_template is not None
        form = detect_form(source.location, columns, first, has_template, self.flags, is_only)
        logger().info(f"data: {source.label}: {form.description}")
        if form.warning:
            logger().warning(f"data: {source.label}: {form.warning}")
        form.require(self.use)
        self.forms[source.label] = form
        return form

    def first(self, raw: Dataset) -> Dataset:
        """The rows that `most_rows` allows."""
        return raw if self.most_rows is None else raw.select(range(min(self.most_rows, len(raw))))

    def settings_of(self, source: DataSource, form: Form) -> TokeniseSettings:
        """How the rows of a data set become token rows."""
        truth_replaces = self.flags.answer_column is not None or self.flags.answer_pattern is not None
        return TokeniseSettings(
            form, self.use, self.tokenizer, self.limit, self.flags.truncation, self.all_turns, source.name,
            truth_replaces, self.step_separator,
        )  # fmt: skip

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
    ) -> list[Part]:
        """Tokenise the rows of one data set, and log what became of them. `parts` are (row numbers in the order of use,
        suffix of the name in the log, whether they are for training)."""
        flags, name = self.flags, f"{source.label}{parts[0][1]}"
        numbers = np.concatenate([numbers for numbers, _, _ in parts])
        if len(numbers) >= _MANY_ROWS:
            logger().info(f"data: {name}: tokenising {len(numbers)} rows (immediate if they are cached)")
        settings = self.settings_of(source, form)
        table = tokenise_rows(raw, numbers, origins, settings, flags)
        self.seen.append(TokenisedSet(raw, origins, form, table, parts))
        found = usable_parts(source, self.seen[-1], settings, flags)
        self._log_rendering(source, form)
        return found

    def _log_rendering(self, source: DataSource, form: Form) -> None:
        if form.rendering == "chat":
            end = self.tokenizer.convert_ids_to_tokens(turn_end(self.tokenizer).token)
            logger().info(f"data: {source.label}: answers to chat messages end with {end}")

    def _check_forms(self) -> None:
        check_flags_used(list(self.forms.values()), self.flags)
        note = mixed_renderings(self.forms)
        if note and self.flags.apply_chat_template is None:
            logger().info(f"data: {note}")

    def streamed(self) -> TokenRows:
        """As `mixed`, with a stream for training. Collective."""
        self._check_forms()
        names = dict.fromkeys(opened.source.name for opened in self.streams)
        return TokenRows(start(self.streams, self.flags), *self._evaluation(tuple(names)))

    def mixed_evaluation(self) -> TokenRows:
        """As `mixed`, of data sets for evaluation alone; `train` is empty."""
        self._check_forms()
        return TokenRows(Dataset.from_dict({}), *self._evaluation(()))

    def _evaluation(self, sources: tuple[str, ...]) -> tuple[Dataset | None, tuple[str, ...], tuple[str, ...]]:
        """The fields of `TokenRows` after `train`."""
        names = tuple(dict.fromkeys(part.source.name for part in self.eval))
        return joined(self.eval, names) or None, sources, names

    def mixed(self) -> TokenRows:
        """The rows of all parts: for training as their weights say, for evaluation one part after another."""
        self._check_forms()
        names = tuple(dict.fromkeys(part.source.name for part in self.train))
        shares = shares_of([part.source for part in self.train], [len(part.order) for part in self.train])
        if len(shares) > 1 or shares[0].used != shares[0].available:
            logger().info(table_of(shares))
        train = [
            replace(part, order=repeated(part.order, share.used, SPLIT_SEED, number))
            for number, (part, share) in enumerate(zip(self.train, shares, strict=True))
        ]
        return TokenRows(joined(train, names), *self._evaluation(names))


def prepare(
    use: Use,
    tokenizer: PreTrainedTokenizerBase,
    flags: DataFlags,
    limit: int,
    whole_paths: list[str] | None = None,
    eval_paths: list[str] | None = None,
    eval_fraction: float | None = None,
    all_turns: bool = False,
    step_separator: str = "\n",
) -> TokenRows:
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
        if not flags.streaming:
            return preparation.mixed()
    return preparation.streamed()


def prepare_whole(
    use: Use, tokenizer: PreTrainedTokenizerBase, flags: DataFlags, limit: int, flag: str
) -> tuple[Dataset, tuple[str, ...]]:
    """(token rows of all rows of `flags.data_path` in the order of the files, names of the data sets that their column
    `source` numbers), for an evaluation outside of training. `flag` names the data sets in messages."""
    preparation = Preparation(use, tokenizer, flags, limit)
    for source in parse_sources(flags.data_path, flag):
        preparation.add_evaluation(source)
    rows = preparation.mixed_evaluation()
    if rows.eval is None:
        raise UserError(f"{flag}: no row is within {limit_flag(use)} {limit}; raise it, or use --truncation left")
    return rows.eval, rows.eval_sources
