"""Data sets of `--streaming`: from the flags to sources of token rows, and their evaluation rows."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Features, Value

from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import DataFlags, parse_data_split
from dschat_ppo.data.bad_lines import WAY_OUT
from dschat_ppo.data.cache import token_key
from dschat_ppo.data.chunks import NOTHING, StreamSource, TokenBatch
from dschat_ppo.data.forms import FIRST_ROWS
from dschat_ppo.data.lengths import FITTED_NAMES, Fitted
from dschat_ppo.data.locate import OpenSet, open_set
from dschat_ppo.data.mixture import SPLIT_SEED
from dschat_ppo.data.parts import FilePart, Part, Row, TablePart
from dschat_ppo.data.raw_stream import RawBatch, RawStream, StepShare
from dschat_ppo.data.rows import Splits, splits_named
from dschat_ppo.data.sources import DataSource
from dschat_ppo.data.streaming import StreamedRows, start_stream
from dschat_ppo.data.tokenise import TokeniseSettings, reading_of, token_features, tokenise_batch
from dschat_ppo.errors import UserError, reading

_ENDS = 2**16  # bytes at either end of a file that identify it, with its size


@dataclass(frozen=True)
class StreamedSet:
    """One data set whose training rows are streamed, before its form is known.

    Attributes:
        parts: those with training rows, in order.
        evaluation: names of its splits with evaluation rows.
        columns: those of its first rows, which all its rows have then.
    """

    opened: OpenSet
    parts: list[Part]
    evaluation: list[str]
    columns: tuple[str, ...]

    @property
    def content(self) -> str:
        """What identifies the training rows, wherever they are stored."""
        return "\0".join(content_of(part) for part in self.parts)


@dataclass(frozen=True)
class OpenedSource:
    """One data set of a stream before its reader starts."""

    source: DataSource
    found: StreamedSet
    settings: TokeniseSettings
    share: StepShare | None  # None: all its rows

    def stream(self, bad_rows: str) -> StreamSource:
        """The source of its token rows, with `--bad_rows`."""
        raw = RawStream(self.found.parts, self.share, bad_rows != "error")
        tokenise = partial(_token_batch, columns=self.found.columns, settings=self.settings, skips=bad_rows != "error")
        return StreamSource(self.source.name, self.source.weight or 1.0, raw, tokenise, bad_rows)


def share_of(source: DataSource, part: int, flags: DataFlags) -> StepShare | None:
    """The rows of a data set that `part` of `--data_split` uses; None for all. `UserError` if there are none."""
    if source.flag != "--data_path":
        return None
    share = StepShare(parse_data_split(flags.data_split), part, SPLIT_SEED)
    if share.bounds[0] == share.bounds[1]:
        raise UserError(f"{source.spec}: --data_split {flags.data_split} leaves no row for this step")
    return share


def find_rows(source: DataSource, flags: DataFlags) -> tuple[StreamedSet, list[Row]]:
    """The parts of a data set, and its first rows. Refuses what needs all rows: a number of them, or a slice."""
    if source.samples is not None:
        raise UserError(
            f"{source.flag} {source.spec}: @ROWS needs all rows, so it does not go with --streaming; use a weight, as "
            "in NAME:0.5"
        )
    opened = open_set(source, flags.data_output_path, streaming=True)
    [(name, cut), *others], evaluation = opened.chosen()
    if cut or others:
        raise UserError(f"{opened.what}: --streaming reads whole splits, not '{source.split}'")
    parts = [part for _, part in opened.numbered([name])]
    rows, problem = list[Row](), ""
    raw = RawStream(parts, None, flags.bad_rows != "error")
    while len(rows) < FIRST_ROWS and (batch := raw.batch()) is not None:
        rows, problem = rows + batch.rows, problem or batch.problem
    if not rows:
        reason = f"none of its rows can be read; the first: {problem}" if problem else "the data set is empty"
        raise UserError(f"{source.flag} {source.spec}: {reason}")
    columns = tuple(dict.fromkeys(name for row in rows[:FIRST_ROWS] for name in row))
    return StreamedSet(opened, parts, evaluation, columns), rows[:FIRST_ROWS]


def content_of(part: Part) -> str:
    """What identifies the rows of a part: of each of its files the name, the size and the ends."""
    if not isinstance(part, FilePart | TablePart):
        return part.key
    digest = hashlib.sha256()
    for path in [part.path] if isinstance(part, FilePart) else part.files:
        with reading(f"{part.flag} {path}: cannot be read"), path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            digest.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()


def _key_of(opened: list[OpenedSource], flags: DataFlags) -> str:
    """Key of a stream in the cache: its files, how they are read and mixed, the tokenizer and the code."""
    parts: list[Any] = []
    for each in opened:
        parts += [each.source.weight, each.share, *reading_of(each.settings, flags)]
    places = "\0".join(part.key for each in opened for part in each.found.parts)
    return token_key(places, opened[0].settings.tokenizer, *parts)


def start(opened: list[OpenedSource], flags: DataFlags) -> StreamedRows:
    """Start to read the data sets, and wait for the first chunk. Collective."""
    num_rows, settings = flags.streaming_rows or 0, opened[0].settings
    if len(opened) > 1:
        weights = " : ".join(f"{each.source.weight or 1:g} {each.source.name}" for each in opened)
        logger().info(f"data: stream: each row comes from one of several data sets in the proportion {weights}")
    sources = [each.stream(flags.bad_rows) for each in opened]
    content = hashlib.sha256("\0".join(each.found.content for each in opened).encode()).hexdigest()
    features = Features({**_columns(settings.use), "source": Value("int32")})
    rows = start_stream(flags.data_output_path, _key_of(opened, flags), sources, num_rows, features, content)
    counts = rows.counts_of_first_chunk()
    if set(FITTED_NAMES.values()).intersection(counts) == {FITTED_NAMES[Fitted.ANSWER_CUT]}:
        raise UserError(f"--data_path: every answer is cut by --max_seq_len {settings.limit}; raise it")
    return rows


def evaluation_of(opened: OpenedSource, flags: DataFlags) -> Splits:
    """The rows of the splits for evaluation of a data set, as `train`. The training rows are not read."""
    return splits_named(opened.found.opened, opened.found.evaluation, flags.data_output_path, flags.bad_rows)


def _columns(use: str) -> Features:
    """Columns of a token row; without its digest, which only a table of all rows needs."""
    return Features({name: kind for name, kind in token_features(use).items() if name != "digest"})


def _token_batch(batch: RawBatch, columns: tuple[str, ...], settings: TokeniseSettings, skips: bool) -> TokenBatch:
    """The token rows of a batch that are kept; see `StreamSource.tokenise`."""
    raw_rows = [dict.fromkeys(columns) | row for row in batch.rows]
    found = tokenise_batch(raw_rows, batch.origins, settings)
    bad = [row for row in found if row["problem"] is not None]
    for row in bad:
        message = row["problem"].partition("\n")[0]
        if row["fitted"] == Fitted.TOO_LONG or not skips:
            raise UserError(message if row["fitted"] == Fitted.TOO_LONG else f"{message}; {WAY_OUT}")
    made = [row for row in found if row["problem"] is None]
    names = list(_columns(settings.use))
    rows = [{name: row[name] for name in names} for row in made if row["fitted"] != Fitted.DROPPED]
    counts = Counter(FITTED_NAMES[Fitted(row["fitted"])] for row in made)
    counts[NOTHING] = len(batch.rows) - len({row["number"] for row in found})
    return TokenBatch(rows, dict(counts), len(bad), bad[0]["problem"].partition("\n")[0] if bad else "")
