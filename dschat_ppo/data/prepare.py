"""Data sets to token rows for one training step: read, find the form, choose the step's part, hold
out, tokenise, mix.

A token row holds `prompt_ids` (list of int), `answers` (list of lists of int, each ending with its
final token unless truncated), `margin` (float), `source` (int, the number of its data set in
`TokenRows.sources`) and `digest` (a hash of its content); in step 1 `prompt_spans` (half-open
ranges of `prompt_ids` that are earlier answers of the assistant); for KTO `label` (float); for
process reward models `step_ends` (places in the answer) and `step_labels` (floats); in step 3 `row`
(JSON of all columns of the data row and of `data_source`, `answer` and `ground_truth`, for reward
functions).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.dataset_workers import in_processes, worker_count
from dschat_ppo.common.dist import main_rank_of_node_first
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.common.stop_requests import raise_if_stop_requested, subprocesses_may_stop
from dschat_ppo.config.data_flags import DataFlags, StepData, Use, parse_data_split
from dschat_ppo.data.cache import cached, token_key
from dschat_ppo.data.encode import encode_example
from dschat_ppo.data.examples import PARTS, SPLIT_SEED, Example
from dschat_ppo.data.form_choice import FIRST_ROWS, detect_form
from dschat_ppo.data.forms import Form, check_flags_used
from dschat_ppo.data.rows import ORIGIN, ROW, Rows, read_splits
from dschat_ppo.data.sources import DataSource, is_hub_name, open_set, parse_sources
from dschat_ppo.data.streaming import (
    SPLIT_ROWS,
    StreamedRows,
    StreamSource,
    first_rows,
    rows_at_hand,
    start,
    tokens_of,
)
from dschat_ppo.data.tokenise import (
    DOING,
    NOTES,
    Fitted,
    TokeniseSettings,
    features_of,
    refuse_bad,
    tokenise_batch,
)
from dschat_ppo.errors import UserError, counted

BATCH_ROWS = 512  # enough for the tokenizer; rows of 10k tokens then take some 100 MB in a worker
_SHOWN = 5  # bad rows in the log
EVAL_FLAG, PTX_FLAG = "--eval_data_path", "--unsupervised_dataset_name"
_HOLD_OUT, _MIX = 1, 2  # separate the uses of `SPLIT_SEED`


@dataclass(frozen=True)
class TokenRows:
    """Token rows for training, and for evaluation or None. `sources` and `eval_sources` name the
    data sets that their columns `source` number."""

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
    """Token rows of one data set that a step uses: `order` are indices of `rows`, which are in the
    order of the file."""

    source: DataSource
    rows: Dataset
    order: np.ndarray


def prepare(step: StepData, tokenizer: PreTrainedTokenizerBase) -> TokenRows:  # noqa: C901, PLR0915
    """Token rows of one step from all its data sets. `UserError` if one cannot be used or has no
    row for this step, or `--bad_rows` refuses its bad rows; `StopRequested` on a stop request."""
    flags = step.flags
    cache = step.flags.data_output_path
    sources = parse_sources(flags.data_path, step.whole_flag or "--data_path")
    sources += parse_sources(
        step.whole_paths, "--sft_only_data_path", [source.name for source in sources]
    )
    sources += parse_sources(step.eval_paths, EVAL_FLAG)
    train = list[Part]()
    evaluation = list[Part]()
    streams = list[StreamSource]()
    forms = dict[str, Form]()
    # None: data for training give no rows for evaluation
    fraction = None if step.eval_paths else step.eval_fraction
    with main_rank_of_node_first(), subprocesses_may_stop(DOING):
        for source in sources:
            # Read: all rows, or the first ones of a stream. The first rows decide the form, so that
            # all steps agree.
            name = source.spec
            is_eval = source.flag in (EVAL_FLAG, step.whole_flag)
            is_stream = flags.streaming and not is_eval
            opened = open_set(source, cache, is_stream)
            groups, for_eval = opened.chosen(whole=is_eval)
            if is_stream:
                files, first = first_rows(opened, groups)
                columns = list(dict.fromkeys(chain.from_iterable(first)))
            else:
                raw = read_splits(opened, groups, cache)
                if step.most_rows is not None:
                    raw = raw.select(range(min(step.most_rows, len(raw))))
                good = (
                    row for row in map(raw.__getitem__, range(len(raw))) if isinstance(row, dict)
                )
                columns = list(raw.columns)
                first = list(islice(good, FIRST_ROWS))
            if for_eval and fraction is not None:
                own = read_splits(opened, [(for_eval, "")], cache)
            else:
                own = None
            has_template = tokenizer.chat_template is not None
            # what only training reads is not asked of rows for evaluation
            if is_eval:
                own_step = replace(step, teacher_column=None, keeps_answers=False)
            else:
                own_step = step
            use: Use = "sft" if own_step.keeps_answers else step.use
            is_only = len(sources) == 1
            form = detect_form(source.location, columns, first, has_template, flags, is_only, use)
            logger().info(f"data: {name}: {form.description}")
            if form.warning:
                logger().warning(f"data: {name}: {form.warning}")
            forms[name] = form
            settings = TokeniseSettings(form, source.name, columns, tokenizer, own_step)

            # The rows of the step, and those held out of them for evaluation
            count = SPLIT_ROWS if is_stream else len(raw)
            share = (0, 0 if is_eval else count)
            is_divided = source.flag == "--data_path" and not is_eval
            if is_divided:
                share = share_of_step(count, parse_data_split(flags.data_split), PARTS[step.use])
                if share[0] == share[1]:
                    raise UserError(
                        f"{name}: --data_split {flags.data_split} leaves no row for this step"
                    )
                if not is_stream and share != (0, count):
                    used = (
                        f"{share[1] - share[0]} of {count} rows (--data_split {flags.data_split})"
                    )
                    logger().info(f"data: {name}: this step uses {used}")
            if is_stream:
                made = partial(tokens_of, settings=settings)
                streams.append(
                    StreamSource(
                        source.name, source.weight or 1.0, files, share, made, flags.bad_rows
                    )
                )
                if fraction and not for_eval:
                    note = (
                        f"--eval_fraction holds no rows out of a stream; {EVAL_FLAG} FILE names"
                        " rows for evaluation"
                    )
                    logger().info(f"data: {name}: {note}")
            else:
                order = torch.randperm(count, generator=shared_generator(SPLIT_SEED)).numpy()
                numbers = (order if is_divided else np.arange(count))[slice(*share)]
                held_out = np.arange(count if is_eval else 0)
                if fraction and not for_eval:
                    numbers, held_out = hold_out(numbers, fraction)
                parts = tokenised(source, raw, settings, numbers, held_out)
                train = train + parts[0]
                evaluation = evaluation + parts[1]

            # Its own rows for evaluation
            if own is not None:
                own_settings = replace(settings, columns=own.columns)
                evaluation += tokenised(
                    source, own, own_settings, np.arange(0), np.arange(len(own))
                )[1]
            elif for_eval:
                if step.eval_paths:
                    how = "replaced by those of"
                else:
                    how = "not used; name them with"
                logger().info(f"data: {name}: its rows for evaluation are {how} {EVAL_FLAG}")

    # outside of the block: ranks read their first rows of a stream at the same time
    check_flags_used(list(forms.values()), flags)
    # `@ROWS` of a data set that trains is about training, not about the rows held out of it
    eval_counts = [len(part.order) for part in evaluation]
    for position, part in enumerate(evaluation):
        if part.source.flag in (EVAL_FLAG, step.whole_flag) and part.source.samples is not None:
            eval_counts[position] = min(eval_counts[position], part.source.samples)
    eval_rows, eval_names = joined(evaluation, eval_counts)
    if streams:
        names = tuple(dict.fromkeys(source.name for source in streams))
        return TokenRows(start(streams, step), eval_rows or None, names, eval_names)
    rows, names = joined(train, epoch_rows(train))
    return TokenRows(rows, eval_rows or None, names, eval_names)


def tokenised(  # noqa: PLR0915
    source: DataSource,
    raw: Rows,
    settings: TokeniseSettings,
    train: np.ndarray,
    held_out: np.ndarray,
) -> tuple[list[Part], list[Part]]:
    """For training and for evaluation, the token rows of the raw rows with these numbers that can
    be used and are within the length limit; what is dropped, and why, is logged. They are made in
    parallel or taken from the cache. `UserError` if `--bad_rows` does not accept the bad rows, or
    if training is left no row or no whole answer."""
    name = source.spec
    step = settings.step
    cache = settings.step.flags.data_output_path
    # in the order of the file, because every read in the order of the step would be a random access
    numbers = np.sort(np.concatenate([train, held_out]))
    taken = raw.table.select(numbers)
    workers = worker_count(step.flags.preprocessing_num_workers, len(numbers))

    def made(start: int, stop: int) -> list[dict[str, Any]]:
        batch = taken[start:stop]
        rows = tokenise_batch(
            list(map(json.loads, batch[ROW])), list(map(shown_path, batch[ORIGIN])), settings
        )
        return [row | {"number": int(numbers[start + row["number"]])} for row in rows]

    used = hashlib.sha256(numbers.tobytes()).hexdigest()
    key = token_key(raw.table._fingerprint, settings.tokenizer, used, *settings.identity())
    rows = made_rows(
        cache, key, made, len(taken), workers, Features({**features_of(step), **NOTES})
    )
    if not len(rows):
        is_bad = settings.form.name == "kto" and step.use == "sft"
        if is_bad:
            why = "; all answers are labelled bad: --ignore_columns label trains them"
        else:
            why = ""
        what = f"no row of this data set serves this step ({settings.form.description}){why}"
        raise UserError(f"{settings.source}: {what}")
    number, fitted, tokens = (  # without a Python object for each row
        np.concatenate([chunk.to_numpy() for chunk in rows.data.column(note).chunks])
        for note in ("number", "fitted", "tokens")
    )

    bad = np.flatnonzero(fitted == Fitted.UNUSABLE)
    problems = rows.data.column("problem")
    first = [str(problems[int(index)]) for index in bad[:_SHOWN]]
    refuse_bad(name, len(bad), len(numbers), step.flags.bad_rows, first)
    for line in (
        [f"{name}: {len(bad)} of {len(numbers)} rows cannot be used", *first] if first else ()
    ):
        logger().warning(f"data: skipped: {line}")
    noted = rows.data.column("remark").drop_null().to_pylist()
    remarks = Counter(remark for lines in noted for remark in lines.split("\n"))
    for remark, count in remarks.items():
        logger().warning(f"data: {name}: {counted(count, 'row')}: {remark}")

    # The token rows of raw row `n` begin at `begins[n]`; a search would be slower
    counts = np.bincount(number, minlength=int(numbers.max(initial=-1)) + 1)
    begins = np.cumsum(counts) - counts
    limit = f"{'--max_prompt_seq_len' if step.use == 'prompt' else '--max_seq_len'} {step.limit}"
    parts: tuple[list[Part], list[Part]] = [], []
    for asked, kept, is_eval in ((train, parts[0], False), (held_out, parts[1], True)):
        if len(asked) == 0:
            continue
        count = counts[asked]
        order = np.repeat(begins[asked] - np.cumsum(count) + count, count) + np.arange(count.sum())
        order = order[fitted[order] != Fitted.UNUSABLE]
        outcomes = [(int((fitted[order] == code).sum()), code.words) for code in Fitted]
        shown = [
            f"{counted(len(order), 'row')} of {len(asked)}",
            *(f"{n} {what}" for n, what in outcomes if n),
        ]
        if len(order):
            quantiles = np.percentile(tokens[order], [50, 99, 100], method="inverted_cdf").astype(
                int
            )
            shown.append("tokens before the cut: median {}, 99% {}, most {}".format(*quantiles))
        logger().info(f"data: {name}{' (eval)' * is_eval}: {', '.join(shown)}")
        usable = order
        order = order[fitted[order] != Fitted.DROPPED]
        if not is_eval and len(usable) == 0:
            raise UserError(f"{name}: none of its rows for training serves this step")
        if not is_eval and len(order) == 0:
            raise UserError(f"{name}: no row is within {limit}; raise it, or use --truncation left")
        if not is_eval and (fitted[usable] == Fitted.ANSWER_CUT).all():
            raise UserError(f"{name}: every answer is cut by {limit}; raise it")
        kept.append(Part(source, rows.select_columns(list(features_of(step))), order))
    return parts


def made_rows(
    cache: str | None,
    key: str,
    made: Callable[[int, int], list[dict[str, Any]]],
    count: int,
    workers: int,
    features: Features,
) -> Dataset:
    """The token rows `made(start, stop)` of `count` raw rows, which `workers` processes make in
    batches of `BATCH_ROWS`, or from the cache."""

    def write(folder: Path, worker: int) -> None:
        path, begin, end = (
            str(folder / f"rows_{worker:05d}.arrow"),
            *(count * n // workers for n in (worker, worker + 1)),
        )
        with (
            pa.OSFile(path, "wb") as sink,
            pa.ipc.new_stream(sink, features.arrow_schema) as writer,
        ):
            for start in range(begin, end, BATCH_ROWS):
                raise_if_stop_requested(DOING)  # tokenising may take hours
                rows = made(start, min(end, start + BATCH_ROWS))
                writer.write_table(pa.Table.from_pylist(rows, features.arrow_schema))

    return cached(cache, key, lambda folder: in_processes(workers, partial(write, folder), DOING))


# Which rows of each data set a step uses, and in which order: they depend on counts and one seed
# alone, so they are equal on every rank and after a resume.


def share_of_step(count: int, shares: tuple[float, float, float], part: int) -> tuple[int, int]:
    """The places in an order of `count` rows that one step uses: `part` 0 is SFT, 1 reward model, 2
    PPO. They are disjoint and complete."""
    first, last = (round(count * sum(shares[:number]) / sum(shares)) for number in (part, part + 1))
    return first, last


def hold_out(numbers: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split row numbers at random into (for training, held out). At least one row is held out and
    one is kept. Nothing is held out if `fraction` is 0 or there is only one row."""
    if fraction == 0 or len(numbers) < 2:
        return numbers, numbers[:0]
    count = min(len(numbers) - 1, max(1, round(len(numbers) * fraction)))
    order = torch.randperm(len(numbers), generator=shared_generator(SPLIT_SEED, _HOLD_OUT)).numpy()
    return numbers[order[count:]], numbers[order[:count]]


def epoch_rows(parts: list[Part]) -> list[int]:
    """How many rows an epoch has of each part. Data sets with a weight share the sum of their sizes
    in proportion to their weights, rounded so that the total is exact; `@ROWS` sets a number; of
    all others each row is used once."""
    used = [
        len(part.order) if part.source.samples is None else part.source.samples for part in parts
    ]
    weighted = [place for place, part in enumerate(parts) if part.source.weight is not None]
    weights = [float(parts[place].source.weight or 0) for place in weighted]
    total = sum(len(parts[place].order) for place in weighted)
    before = 0
    for number, place in enumerate(weighted, start=1):
        bound = round(total * sum(weights[:number]) / sum(weights))
        used[place], before = bound - before, bound
    for part, count in zip(parts, used, strict=True):
        if len(parts) > 1 or count != len(part.order):
            share = f"{count} rows of an epoch ({100 * count / sum(used):.1f} %)"
            times = f"{count / len(part.order):.2f} times its {len(part.order)}"
            logger().info(f"data: {part.source.spec}: {share}, {times}")
    return used


def joined(parts: list[Part], counts: list[int]) -> tuple[Dataset, tuple[str, ...]]:
    """So many rows of each part, one part after another: all of them as often as they fit, then a
    random remainder in the order of the file. They have the column `source`, and are memory-mapped
    apart from that and the order. And the names of the data sets that this column numbers."""
    names = tuple(dict.fromkeys(part.source.name for part in parts))
    if not parts:
        return Dataset.from_dict({}), names
    tables = list[Dataset]()
    orders = list[np.ndarray]()
    before = 0
    for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
        times, rest = divmod(count, max(1, len(part.order)))
        shuffled = torch.randperm(
            len(part.order), generator=shared_generator(SPLIT_SEED, _MIX, number)
        )
        orders += [before + part.order] * times + [
            before + part.order[shuffled[:rest].sort().values.numpy()]
        ]
        source = np.full(len(part.rows), names.index(part.source.name), dtype=np.int32)
        tables.append(part.rows.add_column("source", source, feature=Value("int32")))
        before += len(part.rows)
    order = np.concatenate(orders)
    rows = datasets.concatenate_datasets(tables)
    return (rows if np.array_equal(order, np.arange(len(rows))) else rows.select(order)), names


# Plain text


def text_blocks(
    spec: str,
    config_name: str | None,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    flags: DataFlags,
) -> Dataset:
    """Plain text for the PTX loss, concatenated and cut into blocks (Ouyang et al. 2022, section
    3.5).

    Join the texts of a data set with a column `text` by EOS, and cut them into token rows of
    `length` tokens (a few are shorter): the first token as `prompt_ids`, the others as the only
    answer."""
    ids = List(Value("int32"))
    cache = flags.data_output_path
    columns = {"prompt_ids": ids, "answers": List(ids), "margin": Value("float32")}

    def blocks_of(start: int, stop: int) -> list[dict[str, Any]]:
        batch = rows.table[start:stop]
        ids = list[int]()
        problems = list[str]()
        for raw, origin in zip(
            map(json.loads, batch[ROW]), map(shown_path, batch[ORIGIN]), strict=True
        ):
            if isinstance(raw, str):
                problems.append(f"{origin} {raw}")
                continue
            try:
                text = raw.get("text") or ""
                if not isinstance(text, str):
                    raise UserError(f"'text' holds {str(text)[:40]}; it needs a text column 'text'")
                ids += encode_example(tokenizer, Example("", [text])).answers[0]
            except UserError as problem:
                problems.append(f"{origin}: {problem}")
                continue
            ids += [tokenizer.eos_token_id] * (ids[-1] != tokenizer.eos_token_id)
        blocks = [ids[start : start + length] for start in range(0, len(ids), length)]
        made = [
            {"prompt_ids": block[:1], "answers": [block[1:]], "margin": 0.0}
            for block in blocks
            if len(block) > 1
        ]
        return made + [
            {"prompt_ids": [], "answers": [], "margin": 0.0, "problem": problem}
            for problem in problems
        ]

    with main_rank_of_node_first(), subprocesses_may_stop(DOING):
        (source,) = parse_sources([spec], PTX_FLAG)
        if is_hub_name(source.location):
            source = replace(source, config=source.config or config_name)
        opened = open_set(source, cache)
        rows = read_splits(opened, opened.chosen()[0], cache)
        if "text" not in rows.columns:
            has = ", ".join(rows.columns)
            raise UserError(
                f"{PTX_FLAG} {spec}: has the columns {has}; it needs a text column 'text'"
            )
        key = token_key(rows.table._fingerprint, tokenizer, "text blocks", length)
        workers = worker_count(flags.preprocessing_num_workers, len(rows))
        features = Features(columns | {"problem": Value("string")})
        blocks = made_rows(cache, key, blocks_of, len(rows), workers, features)
    found: list[str | None] = blocks["problem"][:]
    bad = [problem for problem in found if problem is not None]
    refuse_bad(f"{PTX_FLAG} {spec}", len(bad), len(rows), flags.bad_rows, bad[:1])
    if bad:
        logger().warning(
            f"data: skipped: {len(bad)} of {len(rows)} rows cannot be used; the first: {bad[0]}"
        )
        blocks = blocks.select([number for number, problem in enumerate(found) if problem is None])
    blocks = blocks.select_columns(list(columns))
    if not len(blocks):
        raise UserError(f"{PTX_FLAG} {spec}: no text has two tokens or more")
    logger().info(
        f"data: {source.spec}: {len(rows)} texts, {len(blocks)} blocks of up to {length} tokens"
    )
    return blocks
