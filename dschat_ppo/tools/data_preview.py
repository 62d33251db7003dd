"""What a training step sees of its data sets: form, counts, lengths, samples with their loss mask, and bad rows.

`look_at` prepares the data as training does, through `data.prepare.Preparation`, and reads its results. If training
would stop at a row, the data set is prepared a second time with `--bad_rows skip` and `--truncation drop`, to find all
such rows.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.bad_rows import report_duplicates
from dschat_ppo.data.chat_templates import with_template_flags
from dschat_ppo.data.collators import collate_answers, collate_pairs, collate_sft
from dschat_ppo.data.examples import Use
from dschat_ppo.data.forms import FIRST_ROWS, detect_form
from dschat_ppo.data.lengths import FITTED_NAMES, Fitted, describe_lengths
from dschat_ppo.data.prepare import EVAL_FLAG, Preparation, TokenisedSet
from dschat_ppo.data.sources import DataSource
from dschat_ppo.data.splits import ORIGIN, Splits, load_all, load_splits
from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.tokenizers import filler_id, load_tokenizer
from dschat_ppo.tools.data_display import Piece, pieces_of

USES: dict[str, Use] = {"sft": "sft", "reward": "preference", "dpo": "preference", "ppo": "prompt"}
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
BAD = "cannot be used"
_REPORTED = re.compile(
    r"form |\d+ rows; |(prompt|answer) tokens: |skipped: |\d+ rows repeat |this step uses |tokenising "
)
_PERCENTILES = (0, 50, 90, 99, 100)


@dataclass(frozen=True)
class Wanted:
    """What to show.

    Attributes:
        step: "sft", "reward", "dpo" or "ppo".
        config: the configuration of the step.
        most_rows: rows to read of each data set; None for all.
        samples: samples of each data set.
        problems: bad rows of each data set.
    """

    step: str
    config: Any
    most_rows: int | None
    samples: int
    problems: int


@dataclass(frozen=True)
class Sample:
    """One row as it is trained.

    Attributes:
        where: file and row.
        texts: ("prompt", "answer", "chosen" or "rejected", its pieces).
        tokens: number of tokens of each text.
        columns: in step 3, what reward functions receive: column -> value.
    """

    where: str
    texts: list[tuple[str, list[Piece]]]
    tokens: dict[str, int]
    columns: dict[str, Any]


@dataclass
class SetReport:
    """What was found in one data set.

    Attributes:
        source: the data set.
        form, rendering, description, columns: how its rows are read; "" and [] if that is unknown.
        rows: rows in the data set, those for evaluation not included.
        parts: "training" or "evaluation" -> counts, and lengths in tokens.
        samples: of the rows for training; of a data set for evaluation, of its rows.
        bad_rows: number of rows that cannot be used.
        problems: the first of them: "where", "reason" and "message" (both, and the first characters of the row).
        notes: what training logs about the data set besides.
        error: why the step cannot train on the data set, or None.
    """

    source: DataSource
    form: str = ""
    rendering: str = ""
    description: str = ""
    columns: list[str] = field(default_factory=list)
    rows: int = 0
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    bad_rows: int = 0
    problems: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass
class Preview:
    """The report of all data sets of a step.

    Attributes:
        step: "sft", "reward", "dpo" or "ppo".
        has_tokenizer: whether rows were rendered and tokenised.
        notes: about the tokenizer.
        sets: the data sets.
        summary: lines about all of them together.
        error: why the step cannot train, or None.
    """

    step: str
    has_tokenizer: bool
    notes: list[str] = field(default_factory=list)
    sets: list[SetReport] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    error: str | None = None


def arguments_of(wanted: Wanted) -> dict[str, Any]:
    """The arguments of `Preparation` that the step gives it, apart from tokenizer and flags."""
    config, use = wanted.config, USES[wanted.step]
    found: dict[str, Any] = {"use": use, "most_rows": wanted.most_rows}
    if use == "prompt":
        return found | {"limit": config.ppo.max_prompt_seq_len, "eval_paths": config.validation.eval_data_path}
    fit = config.fit
    found |= {"limit": fit.max_seq_len, "eval_paths": fit.eval_data_path, "eval_fraction": fit.eval_fraction}
    if use == "sft":
        found |= {"whole_paths": config.sft.sft_only_data_path, "all_turns": config.sft.train_on == "all"}
    return found


def load(name: str, flags: DataFlags) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name, with the chat template of the flags.

    Raises:
        UserError: there is none, or it cannot be used.
    """
    folder = os.path.expanduser(name)
    if not Path(folder).is_dir():
        if folder.startswith((".", "/")) or folder.count("/") > 1:
            raise UserError(f"--tokenizer {name}: no such folder")
        with reading(f"--tokenizer {name}: neither a local folder nor a model that can be downloaded from the hub"):
            folder = snapshot_download(name, allow_patterns=list(_TOKENIZER_FILES))
    return with_template_flags(load_tokenizer(folder, "--tokenizer"), flags)


class _Notes(logging.Handler):
    """Keeps the messages of the log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def noted(lines: list[str], name: str = "") -> Iterator[None]:
    """Add what the block logs to `lines`, without the name of the data set and without what the report says itself."""
    notes = _Notes()
    logger().addHandler(notes)
    try:
        yield
    finally:
        logger().removeHandler(notes)
        for line in notes.lines:
            text = line.removeprefix("data: ").removeprefix(f"{name} (eval): ").removeprefix(f"{name}: ")
            if not _REPORTED.match(text) and text not in lines:
                lines.append(text)


def look_at(tokenizer_name: str, wanted: Wanted) -> Preview:
    """Prepare the data of a step as training does, and describe them. `--streaming` is not applied.

    Args:
        tokenizer_name: a folder or hub name.
        wanted: what to look at.

    Raises:
        UserError: the tokenizer cannot be used, or the data sets are not named as they must be.
        StopRequested: a stop request arrives.
    """
    given, arguments = wanted.config.data, arguments_of(wanted)
    flags = replace(given, streaming=False, streaming_rows=None)
    preview = Preview(wanted.step, has_tokenizer=True)
    with noted(preview.notes):
        tokenizer = load(tokenizer_name, flags)
    lenient = replace(flags, bad_rows="skip", truncation="drop" if flags.truncation == "error" else flags.truncation)
    whole = Preparation(tokenizer=tokenizer, flags=flags, **arguments)
    for source in whole.sources():
        report = SetReport(source)
        preview.sets.append(report)
        seen, first = whole.seen, len(whole.seen)
        try:
            with noted(report.notes, source.spec):
                whole.add(source)
        except UserError as problem:
            report.error = str(problem)
            preview.error = preview.error or report.error
            again = Preparation(tokenizer=tokenizer, flags=lenient, **arguments)
            with noted(report.notes, source.spec), suppress(UserError):  # the first error counts
                again.add(source)
            seen, first = again.seen, 0
        for prepared in seen[first:]:
            _describe(report, prepared, tokenizer, wanted)
    if preview.error is None:
        try:
            with noted(preview.summary):
                rows = whole.mixed()
        except UserError as problem:
            preview.error = str(problem)
        else:
            held_out = 0 if rows.eval is None else len(rows.eval)
            preview.summary.append(f"an epoch has {len(rows.train)} rows; {held_out} rows are for evaluation")
    if given.streaming:
        preview.summary.append(
            f"the data sets were read whole; with --streaming an epoch has {given.streaming_rows} rows, and none are "
            "held out for evaluation"
        )
    return preview


def look_at_forms(wanted: Wanted) -> Preview:
    """Detect how the rows of each data set are read, without a tokenizer.

    Raises:
        UserError: the data sets are not named as they must be.
    """
    config, preview = wanted.config, Preview(wanted.step, has_tokenizer=False)
    flags, use = config.data, USES[wanted.step]
    # No tokenizer is needed to list the data sets.
    for source in Preparation(tokenizer=None, flags=flags, **arguments_of(wanted)).sources():  # type: ignore[arg-type]
        report = SetReport(source)
        preview.sets.append(report)
        try:
            load = load_all if source.flag == EVAL_FLAG else load_splits
            splits = load(source, flags.data_output_path, flags.bad_rows)
            _read_first(report, splits, use, wanted)
        except UserError as problem:
            report.error = str(problem)
            preview.error = preview.error or report.error
    preview.summary.append("the rows are not rendered, tokenised and checked: give --tokenizer for that")
    return preview


def _read_first(report: SetReport, splits: Splits, use: Use, wanted: Wanted) -> None:
    """Detect the form of a data set, and read its first rows."""
    flags, raw = wanted.config.data, splits.train
    report.rows, report.columns = len(raw), [name for name in raw.column_names if name != ORIGIN]
    rows = raw.select(range(min(FIRST_ROWS, len(raw)))).to_list()
    first = [{name: value for name, value in row.items() if name != ORIGIN} for row in rows]
    form = detect_form(report.source.location, report.columns, first, has_template=True, flags=flags)
    report.form, report.rendering, report.description = form.name, form.rendering, form.description
    raw = raw if form.regroup is None else form.regroup(raw)
    for row in raw.select(range(min(max(FIRST_ROWS, wanted.samples), len(raw)))):
        where = splits.origins.describe(row.pop(ORIGIN))
        for example in form.read(row, use, where)[: max(0, wanted.samples - len(report.samples))]:
            texts = [("prompt", _unrendered(example.prompt))]
            names = ["chosen", "rejected"] if use == "preference" else ["answer"]
            texts += [(name, _unrendered([answer] if isinstance(answer, dict) else answer))
                      for name, answer in zip(names, example.answers, strict=False)]  # fmt: skip
            truth = {} if example.truth is None else {"ground_truth": example.truth}
            report.samples.append(Sample(f"{where}{example.suffix}", texts, {}, truth))


def _unrendered(value: str | list[dict[str, Any]]) -> list[Piece]:
    """A text as it is, or messages as `role: content`."""
    text = value if isinstance(value, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in value)
    return [Piece(text, trained=False, special=False)]


def _describe(report: SetReport, found: TokenisedSet, tokenizer: PreTrainedTokenizerBase, wanted: Wanted) -> None:
    """Add what was found in the training or evaluation rows of a data set."""
    table, spec = found.table, report.source.spec
    report.form, report.rendering, report.description = found.form.name, found.form.rendering, found.form.description
    report.columns = [name for name in found.raw.column_names if name != ORIGIN]
    report.rows = report.rows or len(found.raw)
    repeats = report_duplicates(spec, table, found.raw, found.origins, skips=True)
    is_bad = table.fitted == Fitted.UNUSABLE

    def where(index: int) -> str:
        return found.origins.describe(int(found.raw[int(table.number[index])][ORIGIN]))

    for numbers, _, for_training in found.parts:
        order = table.rows_of(numbers)
        good, bad = order[~is_bad[order]], np.sort(order[is_bad[order]])
        part: dict[str, Any] = {"rows": len(numbers), BAD: len(bad), "examples": len(good)}
        part["repeat an earlier example"] = int(repeats[good].sum())
        part |= {name: int((table.fitted[good] == code).sum()) for code, name in FITTED_NAMES.items()}
        part["prompt tokens"] = _lengths(table.prompt_tokens[good])
        if wanted.step != "ppo":
            part["answer tokens"] = _lengths(table.answer_tokens[good])
        report.parts["training" if for_training else "evaluation"] = part
        report.bad_rows += len(bad)
        for index in bad[: max(0, wanted.problems - len(report.problems))]:
            message, _, reason = table.problem(int(index)).partition("\n")
            report.problems.append({"where": where(index), "reason": reason, "message": message})
        shown = good[table.fitted[good] != Fitted.DROPPED]
        for index in shown[: max(0, wanted.samples - len(report.samples))]:
            report.samples.append(sample_of(table.rows, int(index), where(index), tokenizer, wanted))


def _lengths(tokens: np.ndarray) -> dict[str, Any]:
    """Percentiles of (N,) token counts, and the line with the histogram of training's log; {} without rows."""
    if not len(tokens):
        return {}
    values = np.percentile(tokens, _PERCENTILES, method="inverted_cdf").tolist()
    named = dict(zip(("min", "median", "90%", "99%", "max"), map(int, values), strict=True))
    return {**named, "shown": describe_lengths(tokens)}


def sample_of(rows: Dataset, index: int, where: str, tokenizer: PreTrainedTokenizerBase, wanted: Wanted) -> Sample:
    """A token row as text. The loss mask is that of the step's batches.

    In step 2 the trained tokens of a reward model are the last ones, whose scores the loss compares.
    """
    row, pad_id = rows[index], filler_id(tokenizer)
    prompt = row["prompt_ids"]
    texts: list[tuple[str, list[Piece]]] = []
    tokens = {"prompt": len(prompt)}
    if wanted.step == "ppo":
        before, _ = pieces_of(tokenizer, prompt, [False] * len(prompt), len(prompt))
        return Sample(where, [("prompt", before)], tokens, json.loads(row["row"]))
    if wanted.step == "sft":
        batch = collate_sft(rows, [index], pad_id, wanted.config.sft.train_on_prompt)
        ids, masks, names = batch.input_ids, batch.loss_mask, ["answer"]
    elif wanted.step == "dpo":
        answers = collate_answers(rows, [index], pad_id)
        ids, masks, names = answers.input_ids, answers.answer_mask, ["chosen", "rejected"]
    else:
        pairs = collate_pairs(rows, [index], pad_id)
        last = pairs.lengths.unsqueeze(1) - 1
        ids, masks, names = pairs.input_ids, torch.arange(pairs.input_ids.shape[1]) == last, ["chosen", "rejected"]
    for name, own, mask, answer in zip(names, ids, masks, row["answers"], strict=True):
        length = len(prompt) + len(answer)
        before, after = pieces_of(tokenizer, own[:length].tolist(), mask[:length].tolist(), len(prompt))
        texts += [] if texts else [("prompt", before)]
        texts.append((name, after))
        tokens[name] = len(answer)
    columns = {"margin": row["margin"]} if row["margin"] else {}
    return Sample(where, texts, tokens, columns)
