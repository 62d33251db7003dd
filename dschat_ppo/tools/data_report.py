"""The report of `tools/data.py` as lines of text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dschat_ppo.errors import counted
from dschat_ppo.tools.data_display import indented, shortened, text_of, visible
from dschat_ppo.tools.data_findings import Preview, Sample, SetReport

LEGENDS = {
    "sft": "marked: the tokens that the loss covers",
    "reward": "marked: the tokens whose scores the loss compares",
    "dpo": "marked: the tokens whose log-probs the loss compares",
    "ppo": "the prompt ends where the response begins; no token of it is trained",
}
_SHOWN_FIRST = ("data_source", "answer", "ground_truth")  # of the columns for reward functions
_MOST_OF_A_COLUMN = 200  # characters


def lines_of(preview: Preview, full: bool, colour: bool) -> Iterator[str]:
    """The report.

    Args:
        preview: what was found.
        full: long texts whole.
        colour: mark trained tokens by colour, otherwise by brackets.
    """
    yield from preview.notes
    for number, report in enumerate(preview.sets, start=1):
        yield f"data set {number} of {len(preview.sets)}: {report.source.flag} {report.source.spec}"
        yield from _set_lines(report)
        if report.samples:
            yield f"  samples ({LEGENDS[preview.step]})" if preview.has_tokenizer else "  samples (not rendered)"
        for sample in report.samples:
            yield from _sample_lines(sample, full, colour)
        if report.unreadable + report.bad_rows:
            yield _problems_title(report)
        for problem in report.problems:
            yield f"    {visible(problem['message'])}"
        if report.error not in (None, preview.error):
            yield f"  this step cannot train on it: {visible(str(report.error))}"
        yield ""
    yield from preview.summary


def _set_lines(report: SetReport) -> Iterator[str]:
    rows = [("read as", report.description), ("columns", ", ".join(map(visible, report.columns)))]
    rows += [("rows", f"{report.rows}{report.share and '; '}{report.share}")] if report.rows else []
    for name, part in report.parts.items():
        counts = ", ".join(_count(value, what) for what, value in part.items() if isinstance(value, int) and value)
        rows.append((name, counts))
        rows += [(f"  {what}", value["shown"]) for what, value in part.items() if isinstance(value, dict) and value]
    rows += [("note", note) for note in report.notes]
    for title, text in rows:
        if text:
            yield f"  {title.ljust(16)}{visible(text)}"


def _count(value: int, what: str) -> str:
    """A count of a part, whose names are those of several rows."""
    one = {"rows": "row", "examples": "example", "repeat an earlier example": "repeats an earlier example"}
    return counted(value, one.get(what, what), what)


def _problems_title(report: SetReport) -> str:
    counts = [(report.unreadable, "line", "cannot be read"), (report.bad_rows, "row", "cannot be used")]
    shown = len(report.problems)
    first = f", the first {shown}" if report.unreadable + report.bad_rows > shown > 0 else ""
    title = " and ".join(f"{counted(count, what)} that {why}" for count, what, why in counts if count)
    return f"  {title}{first}{':' if shown else ''}"


def _sample_lines(sample: Sample, full: bool, colour: bool) -> Iterator[str]:
    counts = ", ".join(f"{name} {count} tokens" for name, count in sample.tokens.items())
    yield f"   {sample.where}{': ' if counts else ''}{counts}"
    for name, pieces in sample.texts:
        yield from indented(name, text_of(pieces if full else shortened(pieces), colour), colour)
    for name, value in _columns(sample.columns):
        text = visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
        text = text.replace("\n", "")
        short = text if full or len(text) <= _MOST_OF_A_COLUMN else f"{text[:_MOST_OF_A_COLUMN]}..."
        yield from indented(name, short, colour)


def _columns(columns: dict[str, Any]) -> list[tuple[str, Any]]:
    """What is shown of a row's columns: those that rules read, and the names of the others."""
    first = [(name, columns[name]) for name in (*_SHOWN_FIRST, "margin") if columns.get(name) is not None]
    others = [name for name in columns if name not in dict(first)]
    return [*first, *([("columns", ", ".join(others))] if others else [])]
