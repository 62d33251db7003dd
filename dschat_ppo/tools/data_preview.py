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
import tempfile
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
from dschat_ppo.data.bad_lines import BadLines
from dschat_ppo.data.bad_rows import report_duplicates, report_unreadable
from dschat_ppo.data.chat_templates import with_template_flags
from dschat_ppo.data.collators import collate_answers, collate_pairs, collate_sft
from dschat_ppo.data.examples import ADDED, PARTS, Use
from dschat_ppo.data.files import kind_of
from dschat_ppo.data.forms import FIRST_ROWS, detect_form
from dschat_ppo.data.json_rows import JsonColumns
from dschat_ppo.data.label_collators import collate_steps
from dschat_ppo.data.lengths import FITTED_NAMES, Fitted, describe_lengths
from dschat_ppo.data.prepare import EVAL_FLAG, Preparation, TokenisedSet
from dschat_ppo.data.row_readers import FILE_SHIFT, read_tables, unpack
from dschat_ppo.data.sources import COMPRESSED
from dschat_ppo.data.splits import ORIGIN, Splits, load_all, load_splits
from dschat_ppo.data.streaming import StreamedRows
from dschat_ppo.errors import UserError, counted, reading
from dschat_ppo.models.tokenizers import filler_id, load_tokenizer
from dschat_ppo.rewards.build_rewards import check_routes
from dschat_ppo.tools.data_display import Piece, pieces_of
from dschat_ppo.tools.data_findings import Preview, Sample, SetReport, Wanted

_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
BAD = "cannot be used"
_REPORTED = re.compile(
    r"form |\d+ rows; |(prompt|answer) tokens: |skipped: |\d+ rows repeat |this step uses |tokenising "
)
_PERCENTILES = (0, 50, 90, 99, 100)


def use_of(wanted: Wanted) -> Use:
    """What the step reads; in step 2 the objective decides."""
    if wanted.step in ("sft", "ppo"):
        return "sft" if wanted.step == "sft" else "prompt"
    return wanted.config.reward.data_use


def arguments_of(wanted: Wanted) -> dict[str, Any]:
    """The arguments of `Preparation` that the step gives it, apart from tokenizer and flags."""
    config, use = wanted.config, use_of(wanted)
    found: dict[str, Any] = {"use": use, "most_rows": wanted.most_rows}
    if use == "prompt":
        return found | {"limit": config.ppo.max_prompt_seq_len, "eval_paths": config.validation.eval_data_path}
    fit = config.fit
    found |= {"limit": fit.max_seq_len, "eval_paths": fit.eval_data_path, "eval_fraction": fit.eval_fraction}
    if use == "steps":
        found["step_separator"] = config.reward.separator
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
        self.lines.append(("warning: " if record.levelno == logging.WARNING else "") + record.getMessage())


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
    """Prepare the data of a step as training does, and describe them.

    Args:
        tokenizer_name: a folder or hub name.
        wanted: what to look at.

    Raises:
        UserError: the tokenizer cannot be used, or the data sets are not named as they must be.
        StopRequested: a stop request arrives.
    """
    flags, arguments = wanted.config.data, arguments_of(wanted)
    preview = Preview(wanted.step, has_tokenizer=True)
    with noted(preview.notes):
        tokenizer = load(tokenizer_name, flags)
    lenient = replace(flags, bad_rows="skip", truncation="drop" if flags.truncation == "error" else flags.truncation)
    whole = Preparation(tokenizer=tokenizer, flags=flags, **arguments)
    for source in whole.sources():
        report = SetReport(source)
        preview.sets.append(report)
        last, first = whole, len(whole.seen)
        read = len(whole.read)
        try:
            with noted(report.notes, source.spec):
                whole.add(source)
        except UserError as problem:
            report.error = str(problem)
            preview.error = preview.error or report.error
            last, first, read = Preparation(tokenizer=tokenizer, flags=lenient, **arguments), 0, 0
            with noted(report.notes, source.spec), suppress(UserError):  # the first error counts
                last.add(source)
        for splits in last.read[read:]:
            _list_unreadable(report, splits, wanted)
        for prepared in last.seen[first:]:
            _describe(report, prepared, tokenizer, wanted)
    if preview.error is None:
        try:
            with noted(preview.summary):
                rows = whole.mixed()
                if wanted.step == "ppo" and not isinstance(rows.train, StreamedRows):
                    check_routes(wanted.config.rewards, rows.sources, rows.train["row"], wanted.most_rows is None)
        except UserError as problem:
            preview.error = str(problem)
        else:
            held_out = 0 if rows.eval is None else len(rows.eval)
            epoch, verb = counted(len(rows.train), "row"), "is" if held_out == 1 else "are"
            preview.summary.append(f"an epoch has {epoch}; {counted(held_out, 'row')} {verb} held out")
    return preview


def look_at_forms(wanted: Wanted) -> Preview:
    """Detect how the rows of each data set are read, without a tokenizer.

    Raises:
        UserError: the data sets are not named as they must be.
    """
    config, preview = wanted.config, Preview(wanted.step, has_tokenizer=False)
    flags, use = config.data, use_of(wanted)
    # No tokenizer is needed to list the data sets.
    for source in Preparation(tokenizer=None, flags=flags, **arguments_of(wanted)).sources():  # type: ignore[arg-type]
        report = SetReport(source)
        preview.sets.append(report)
        try:
            load = load_all if source.flag == EVAL_FLAG else load_splits
            splits = load(source, flags.data_output_path, flags.bad_rows)
            _list_unreadable(report, splits, wanted)
            report_unreadable(source.spec, splits, flags.bad_rows)
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
            names = ["chosen", "rejected"] if use == "preference" else ["answer"] * len(example.answers)
            texts += [(name, _unrendered([answer] if isinstance(answer, dict) else answer))
                      for name, answer in zip(names, example.answers, strict=False)]  # fmt: skip
            truth = {} if example.truth is None else {"ground_truth": example.truth}
            truth |= {"labels": list(example.labels)} if example.labels else {}
            report.samples.append(Sample(f"{where}{example.suffix}", texts, {}, truth))


def _unrendered(value: str | list[dict[str, Any]]) -> list[Piece]:
    """A text as it is, or messages as `role: content`."""
    text = value if isinstance(value, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in value)
    return [Piece(text, trained=False, special=False)]


@dataclass
class _ListedLines(BadLines):
    """Bad lines, each with its place, cause and first characters."""

    found: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, place: str, cause: str, content: str, lines: int = 1) -> None:
        self.first = ""  # of this line
        super().add(place, cause, content, lines)
        self.found.append((place, cause, self.first))


def _list_unreadable(report: SetReport, splits: Splits, wanted: Wanted) -> None:
    """Add the lines that were left out because they cannot be read. Only their number is known, and the first of them:
    the files that have rows in `splits` are read again, up to the last line that is shown."""
    report.unreadable = splits.skipped.count
    if not report.unreadable:
        return
    tables = [rows for rows in (splits.train, splits.eval) if rows is not None]
    numbers = np.unique(np.concatenate([rows.data.column(ORIGIN).to_numpy() >> FILE_SHIFT for rows in tables]))
    for name in (splits.origins.names[number] for number in numbers):
        path, missing = Path(name), wanted.problems - len(report.problems)
        kind = kind_of(path)
        if kind is None or missing <= 0:
            continue
        bad = _ListedLines(skip=True)
        cache = wanted.config.data.data_output_path
        with tempfile.TemporaryDirectory(dir=cache and os.path.expanduser(cache)) as folder:
            if path.suffix.lower() in COMPRESSED:
                unpack(path, Path(folder) / "unpacked")
                path = Path(folder) / "unpacked"
            for _ in read_tables(kind, path, bad, JsonColumns()):
                if len(bad.found) >= missing:
                    break
        report.problems += [
            {"where": f"{name}, {place}", "reason": cause, "message": f"{name}, {message}"}
            for place, cause, message in bad.found[:missing]
        ]


def _describe(report: SetReport, found: TokenisedSet, tokenizer: PreTrainedTokenizerBase, wanted: Wanted) -> None:
    """Add what was found in the training or evaluation rows of a data set."""
    table, spec = found.table, report.source.spec
    report.form, report.rendering, report.description = found.form.name, found.form.rendering, found.form.description
    report.columns = [name for name in found.raw.column_names if name != ORIGIN]
    report.rows = report.rows or len(found.raw)
    if report.used is None:  # the rows for evaluation come later, if they are a split of their own
        report.used = sum(len(numbers) for numbers, _, _ in found.parts)
        report.share = _share_of(report, wanted)
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


def _share_of(report: SetReport, wanted: Wanted) -> str:
    if report.used == report.rows:
        return ""
    every = ",".join("1" if part == PARTS[use_of(wanted)] else "0" for part in range(3))
    return (
        f"this step uses {report.used} of {counted(report.rows, 'row')} (--data_split {wanted.config.data.data_split}),"
        f" the others are not checked; --data_split {every} gives this step all rows"
    )


def _lengths(tokens: np.ndarray) -> dict[str, Any]:
    """Percentiles of (N,) token counts, and the line with the histogram of training's log; {} without rows."""
    if not len(tokens):
        return {}
    values = np.percentile(tokens, _PERCENTILES, method="inverted_cdf").tolist()
    named = dict(zip(("min", "median", "90%", "99%", "max"), map(int, values), strict=True))
    return {**named, "shown": describe_lengths(tokens)}


def sample_of(rows: Dataset, index: int, where: str, tokenizer: PreTrainedTokenizerBase, wanted: Wanted) -> Sample:
    """A token row as text. The loss mask is that of the step's batches.

    In step 2 the trained tokens of a reward model are the last ones of answers or steps, whose scores the loss reads.
    """
    row, pad_id, use = rows[index], filler_id(tokenizer), use_of(wanted)
    prompt, texts = row["prompt_ids"], list[tuple[str, list[Piece]]]()
    tokens = {"prompt": len(prompt)}
    if wanted.step == "ppo":
        before, _ = pieces_of(tokenizer, prompt, [False] * len(prompt), len(prompt))
        columns = {name: value for name, value in json.loads(row["row"]).items() if name not in ADDED}
        return Sample(where, [("prompt", before)], tokens, columns)
    labels: dict[str, Any] = {"margin": row["margin"]} if row["margin"] else {}
    if use in ("sft", "unpaired"):
        batch = collate_sft(rows, [index], pad_id, use == "sft" and wanted.config.sft.train_on_prompt)
        ids, masks, names = batch.input_ids, batch.loss_mask, ["answer"]
        labels |= {"desirable": row["label"] > 0.5} if use == "unpaired" else {}
    elif use == "steps":
        steps, labels["labels"] = collate_steps(rows, [index], pad_id), row["step_labels"]
        ids, masks, names = steps.input_ids, steps.label_mask, ["answer"]
    elif not wanted.config.reward.trains_classifier:
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
    return Sample(where, texts, tokens, labels)
