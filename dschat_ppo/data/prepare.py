"""Data sets to token rows for one training step: read, find the form, choose the step's part, hold out, tokenise, mix.

A token row holds `prompt_ids` (list of int), `answers` (list of lists of int, each ending with its final token unless
truncated), `margin` (float), `source` (int, the number of its data set in `TokenRows.sources`) and `digest` (a hash of
its content); in step 1 `prompt_spans` (half-open ranges of `prompt_ids` that are earlier answers of the assistant); for
KTO `label` (float); for process reward models `step_ends` (places in the answer) and `step_labels` (floats); in step 3
`row` (JSON of all columns of the data row and of `data_source`, `answer` and `ground_truth`, for reward functions).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
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
from dschat_ppo.config.data_flags import DataFlags, parse_data_split
from dschat_ppo.config.steps import PPOConfig, PreferenceConfig, SFTConfig, StepConfig
from dschat_ppo.data.examples import PARTS, SPLIT_SEED, Use, limit_flag
from dschat_ppo.data.form_choice import FIRST_ROWS, detect_form
from dschat_ppo.data.forms import Form, check_flags_used
from dschat_ppo.data.parts import BadRow
from dschat_ppo.data.rows import Rows, load_splits, rows_of_splits
from dschat_ppo.data.sources import DataSource, parse_sources
from dschat_ppo.data.streaming import SPLIT_ROWS, StreamedRows, StreamSource, find_rows, rows_at_hand, start
from dschat_ppo.data.tokenise import DOING, Fitted, TokeniseSettings, refuse_bad, tokenise_rows
from dschat_ppo.errors import UserError, counted

_SHOWN = 5  # bad rows in the log
EVAL_FLAG = "--eval_data_path"
_HOLD_OUT, _MIX = 1, 2  # separate the uses of `SPLIT_SEED`


@dataclass(frozen=True)
class TokenRows:
    """Token rows for training, and for evaluation or None. `sources` and `eval_sources` name the data sets that their
    columns `source` number."""

    train: Dataset | StreamedRows
    eval: Dataset | None
    sources: tuple[str, ...] = ()
    eval_sources: tuple[str, ...] = ()

    @property
    def at_hand(self) -> Dataset:
        """The rows for training, or of a stream those of its first chunk."""
        return rows_at_hand(self.train)


@dataclass(frozen=True)
class Part:
    """Token rows of one data set that a step uses: `order` are indices of `rows`, which are in the order of the
    file."""

    source: DataSource
    rows: Dataset
    order: np.ndarray


def rows_of_step(config: StepConfig, tokenizer: PreTrainedTokenizerBase, most_rows: int | None = None) -> TokenRows:
    """The token rows of a step by its flags; see `prepare`."""
    if isinstance(config, PPOConfig):
        limit, held_out = config.ppo.max_prompt_seq_len, config.validation.eval_data_path
        return prepare("prompt", tokenizer, config.data, limit, eval_paths=held_out, most_rows=most_rows)
    fit, own = config.fit, dict[str, Any]()
    use: Use = "sft"
    if isinstance(config, SFTConfig):
        own = {"whole_paths": config.sft.sft_only_data_path, "all_turns": config.sft.train_on == "all"}
    elif isinstance(config, PreferenceConfig):
        use, own = config.reward.data_use, {"step_separator": config.reward.separator}
    return prepare(
        use, tokenizer, config.data, fit.max_seq_len, eval_paths=fit.eval_data_path, eval_fraction=fit.eval_fraction,
        most_rows=most_rows, **own,
    )  # fmt: skip


def prepare(
    use: Use, tokenizer: PreTrainedTokenizerBase, flags: DataFlags, limit: int, whole_paths: list[str] | None = None,
    eval_paths: list[str] | None = None, eval_fraction: float | None = None, all_turns: bool = False,
    step_separator: str = "\n", most_rows: int | None = None, whole_flag: str = "",
) -> TokenRows:  # fmt: skip
    """Token rows of one step from all its data sets, of at most `limit` tokens. `UserError` if one cannot be used or
    has no row for this step, or `--bad_rows` refuses its bad rows; `StopRequested` on a stop request.

    Args:
        whole_paths: further data sets of which this step uses every row (`--sft_only_data_path`).
        eval_fraction: fraction of the training rows held out for evaluation if a data set has no evaluation split
            and `eval_paths` is empty; None leaves evaluation to `eval_paths` alone.
        all_turns, step_separator: see `encode_example` and `TokeniseSettings`.
        most_rows: use only the first rows of each data set, as if there were no others.
        whole_flag: if given, all rows of `flags.data_path`, which this flag names, are for evaluation.
    """
    sources = parse_sources(flags.data_path, whole_flag or "--data_path")
    sources += parse_sources(whole_paths or [], "--sft_only_data_path", [source.name for source in sources])
    sources += parse_sources(eval_paths or [], EVAL_FLAG)
    train, evaluation, streams, forms = list[Part](), list[Part](), list[StreamSource](), dict[str, Form]()
    fraction = None if eval_paths else eval_fraction  # None: data sets for training give no rows for evaluation
    cache = flags.data_output_path
    with main_rank_of_node_first(), subprocesses_may_stop(DOING):
        for source in sources:
            # Read: all rows, or the first ones of a stream. The first rows decide the form, so that all steps agree.
            name, is_eval = source.spec, source.flag in (EVAL_FLAG, whole_flag)
            stream = find_rows(source, cache) if flags.streaming and not is_eval else None
            if stream is None:
                raw, own = load_splits(source, cache, whole=is_eval)
                raw = raw if most_rows is None else raw.select(range(min(most_rows, len(raw))))
                good = (row for row in map(raw.__getitem__, range(len(raw))) if not isinstance(row, BadRow))
                columns, first = list(raw.columns), list(islice(good, FIRST_ROWS))
            else:
                columns, first, own = stream.columns, stream.first, None
                if stream.evaluation and fraction is not None:
                    own = rows_of_splits(stream.opened, stream.evaluation, cache)
            has_template = tokenizer.chat_template is not None
            form = detect_form(source.location, columns, first, has_template, flags, len(sources) == 1)
            logger().info(f"data: {name}: {form.description}")
            if form.warning:
                logger().warning(f"data: {name}: {form.warning}")
            form.require(use)
            forms[name] = form
            settings = TokeniseSettings(form, source.name, use, tokenizer, flags, limit, all_turns, step_separator)

            # The rows of the step, and those held out of them for evaluation
            count = SPLIT_ROWS if stream is not None else len(raw)
            share = (0, 0 if is_eval else count)
            if source.flag == "--data_path" and not is_eval:
                share = share_of_step(count, parse_data_split(flags.data_split), PARTS[use])
                if share[0] == share[1]:
                    raise UserError(f"{name}: --data_split {flags.data_split} leaves no row for this step")
                if stream is None and share != (0, count):
                    used = f"{share[1] - share[0]} of {count} rows (--data_split {flags.data_split})"
                    logger().info(f"data: {name}: this step uses {used}")
            if stream is not None:
                streams.append(stream.source(share, settings))
                if fraction and not stream.evaluation:
                    note = f"--eval_fraction holds no rows out of a stream; {EVAL_FLAG} FILE names rows for evaluation"
                    logger().info(f"data: {name}: {note}")
            else:
                numbers, held_out = np.arange(share[1]), np.arange(count if is_eval else 0)
                if source.flag == "--data_path" and not is_eval:
                    order = torch.randperm(count, generator=shared_generator(SPLIT_SEED)).numpy()
                    numbers = order[slice(*share)]
                if fraction and own is None:
                    numbers, held_out = hold_out(numbers, fraction)
                parts = tokenised(source, raw, settings, numbers, held_out)
                train, evaluation = train + parts[0], evaluation + parts[1]

            # Its own rows for evaluation
            if own is not None and fraction is not None:
                evaluation += tokenised(source, own, settings, np.arange(0), np.arange(len(own)))[1]
            elif own is not None or (stream is not None and stream.evaluation):
                how = "replaced by those of" if eval_paths else "not used; name them with"
                logger().info(f"data: {name}: its rows for evaluation are {how} {EVAL_FLAG}")

    # outside of the block: ranks read their first rows of a stream at the same time
    check_flags_used(list(forms.values()), flags)
    eval_rows, eval_names = joined(evaluation)
    if streams:
        names = tuple(dict.fromkeys(source.name for source in streams))
        return TokenRows(start(streams, use, limit, flags), eval_rows or None, names, eval_names)
    rows, names = joined(mix(train))
    return TokenRows(rows, eval_rows or None, names, eval_names)


def tokenised(
    source: DataSource, raw: Rows, settings: TokeniseSettings, train: np.ndarray, held_out: np.ndarray
) -> tuple[list[Part], list[Part]]:
    """For training and for evaluation, the rows with these numbers that can be used and are within the length limit;
    what is dropped, and why, is logged. `UserError` if `--bad_rows` does not accept it, or if the limit leaves training
    no row or no whole answer."""
    name, policy, limit = source.spec, settings.flags.bad_rows, f"{limit_flag(settings.use)} {settings.limit}"
    table = tokenise_rows(raw, np.concatenate([train, held_out]), settings)
    bad, count = np.flatnonzero(table.fitted == Fitted.UNUSABLE), len(train) + len(held_out)
    first = [str(table.problems[int(index)]) for index in bad[:_SHOWN]]
    refuse_bad(name, len(bad), count, policy, first)
    for line in [f"{name}: {len(bad)} of {count} rows cannot be used", *first] if first else ():
        logger().warning(f"data: skipped: {line}")
    parts: tuple[list[Part], list[Part]] = [], []
    for numbers, kept, is_eval in ((train, parts[0], False), (held_out, parts[1], True)):
        if len(numbers) == 0:
            continue
        order = table.rows_of(numbers)
        order = order[table.fitted[order] != Fitted.UNUSABLE]
        counts = [(int((table.fitted[order] == code).sum()), code.words) for code in Fitted]
        shown = [f"{counted(len(order), 'row')} of {len(numbers)}", *(f"{n} {what}" for n, what in counts if n)]
        if len(order):
            quantiles = np.percentile(table.tokens[order], [50, 99, 100], method="inverted_cdf").astype(int)
            shown.append("tokens before the cut: median {}, 99% {}, most {}".format(*quantiles))
        logger().info(f"data: {name}{' (eval)' * is_eval}: {', '.join(shown)}")
        if not is_eval and len(order) == 0:
            raise UserError(f"{name}: none of its rows for training serves this step")
        if not is_eval and (table.fitted[order] == Fitted.ANSWER_CUT).all():
            raise UserError(f"{name}: every answer is cut by {limit}; raise it")
        order = order[table.fitted[order] != Fitted.DROPPED]
        if not is_eval and len(order) == 0:
            raise UserError(f"{name}: no row is within {limit}; raise it, or use --truncation left")
        kept.append(Part(source, table.rows, order))
    return parts


# Which rows of each data set a step uses, and in which order: they depend on counts and one seed alone, so they are
# equal on every rank and after a resume.


def share_of_step(count: int, shares: tuple[float, float, float], part: int) -> tuple[int, int]:
    """The places in an order of `count` rows that one step uses: `part` 0 is SFT, 1 reward model, 2 PPO. They are
    disjoint and complete."""
    first, last = (round(count * sum(shares[:number]) / sum(shares)) for number in (part, part + 1))
    return first, last


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
