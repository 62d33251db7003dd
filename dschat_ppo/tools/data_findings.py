"""What the preview of a step's data finds, for `tools/data_report.py` and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dschat_ppo.data.sources import DataSource
from dschat_ppo.tools.data_display import Piece


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
        used: how many of them this step uses; None if that is unknown.
        share: a sentence about that if it is not all of them, otherwise "".
        unreadable: number of lines of its files that cannot be read, and are not among the rows.
        parts: "training" or "evaluation" -> counts, and lengths in tokens.
        samples: of the rows for training; of a data set for evaluation, of its rows.
        bad_rows: number of rows that cannot be used.
        problems: the first unreadable lines and bad rows: "where", "reason" and "message" (both, and the first
            characters of the row).
        notes: what training logs about the data set besides.
        error: why the step cannot train on the data set, or None.
    """

    source: DataSource
    form: str = ""
    rendering: str = ""
    description: str = ""
    columns: list[str] = field(default_factory=list)
    rows: int = 0
    used: int | None = None
    share: str = ""
    unreadable: int = 0
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
