"""From the flags to a stream: what each data set gives it, and its start."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain

from datasets import Features, Value
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data.fitting import Fitted
from dschat_ppo.data.form_choice import FIRST_ROWS
from dschat_ppo.data.prepare import (
    EVAL_FLAG,
    PreparedSource,
    rows_of_eval_splits,
    settings_by_first_rows,
    share_of_data_split,
    tables_of_eval_splits,
)
from dschat_ppo.data.shards import Batch, Row, Shard
from dschat_ppo.data.sources import DataSource, Group, OpenSet, open_set
from dschat_ppo.data.tokenise import TokeniseSettings, features_of, tokenise_batch
from dschat_ppo.errors import UserError
from dschat_ppo.features.streaming.streamed_rows import (
    ALL,
    NOTHING,
    SPLIT_ROWS,
    UNUSABLE,
    StreamedRows,
    StreamSource,
    Tokens,
    raw_batches,
)


def prepare_source(
    source: DataSource, step: StepData, tokenizer: PreTrainedTokenizerBase, is_only: bool
) -> PreparedSource:
    """A data set whose rows for training are read and tokenised while the run trains. `is_only`:
    the step has no other one."""
    flags = step.flags
    opened = open_set(source, flags.data_output_path, download=False)
    groups, eval_splits = opened.chosen()
    files, first = first_rows(opened, groups)
    raw_eval_rows = rows_of_eval_splits(opened, eval_splits, step)
    columns = list(dict.fromkeys(chain.from_iterable(first)))
    settings = settings_by_first_rows(source, columns, first, step, tokenizer, is_only)

    share = ALL
    if source.flag == "--data_path":
        share = share_of_data_split(source, SPLIT_ROWS, step)
    weight = source.weight or 1.0
    tokenise = partial(tokens_of, settings=settings)
    stream = StreamSource(source.name, weight, files, share, tokenise, flags.bad_rows)
    if step.eval_fraction and not (step.eval_paths or eval_splits):
        logger().info(
            f"data: {source.spec}: --eval_fraction holds no rows out of a stream; {EVAL_FLAG} FILE"
            " names rows for evaluation"
        )
    evaluation = tables_of_eval_splits(source, eval_splits, raw_eval_rows, settings, step)
    return PreparedSource(settings.form, columns, evaluation=evaluation, lazy=stream)


def first_rows(opened: OpenSet, groups: Sequence[Group]) -> tuple[list[Shard], list[Row]]:
    """The shards of a data set whose training rows are streamed, in order, and its first rows that
    can be read. Refuses what needs all rows: a number of them, or a slice."""
    source = opened.source
    names, cut = groups[0]
    if source.samples is not None:
        way = "it does not go with --streaming; use a weight, as in NAME:0.5"
        raise UserError(f"{source.flag} {source.spec}: @ROWS needs all rows, so {way}")
    if cut or len(groups) > 1:
        raise UserError(f"{opened.what}: --streaming reads whole splits, not '{source.split}'")
    shards = opened.shards(names)
    first = list[Row]()
    reason = "the data set is empty"
    for batch in raw_batches(shards, ALL):
        first += [row for row in batch.rows if isinstance(row, dict)]
        if len(first) >= FIRST_ROWS:
            break
        if not first and batch.rows:
            reason = f"none of its rows can be read; the first: {batch.origins[0]} {batch.rows[0]}"
    if not first:
        raise UserError(f"{source.flag} {source.spec}: {reason}")
    return shards, first[:FIRST_ROWS]


def start_stream(
    num_rows: int, sources: list[StreamSource], step: StepData
) -> tuple[StreamedRows, tuple[str, ...]]:
    """Start to read the data sets, and wait for the first chunk: `num_rows` token rows for an
    epoch, and the names of the data sets."""
    if len(sources) > 1:
        weights = " : ".join(f"{source.weight:g} {source.name}" for source in sources)
        logger().info(
            "data: stream: each row comes from one of several data sets in the proportion"
            f" {weights}"
        )
    content = "\0".join(shard.content for source in sources for shard in source.shards)
    features = Features({**features_of(step), "source": Value("int32")})
    identity = hashlib.sha256(content.encode()).hexdigest()
    rows = StreamedRows(sources, num_rows, features, identity)
    if {code.words for code in Fitted}.intersection(rows.counts) == {Fitted.ANSWER_CUT.words}:
        raise UserError(f"--data_path: every answer is cut by --max_seq_len {step.limit}; raise it")
    return rows, tuple(dict.fromkeys(source.name for source in sources))


def tokens_of(batch: Batch, settings: TokeniseSettings) -> Tokens:
    """See `StreamSource.tokenise`."""
    token_rows = tokenise_batch(batch.rows, batch.origins, settings)
    names = list(features_of(settings.step))
    served_rows = {token_row["row_index"] for token_row in token_rows}
    counts = Counter[str]()
    remarks = Counter[str]()
    problems = list[str]()
    rows_of_step = list[Row]()
    for token_row in token_rows:
        if token_row.get("remark"):
            remarks.update(token_row["remark"].split("\n"))
        outcome = Fitted(token_row["fitted"])
        if outcome == Fitted.UNUSABLE:
            problems.append(token_row["problem"])
            continue
        counts[outcome.words] += 1
        if outcome != Fitted.DROPPED:
            rows_of_step.append({name: token_row[name] for name in names})
    first_problem = problems[0] if problems else ""
    left_out = Counter({NOTHING: len(batch.rows) - len(served_rows), UNUSABLE: len(problems)})
    # a sum of counters leaves out what was never counted
    return rows_of_step, counts + left_out + remarks, first_problem
