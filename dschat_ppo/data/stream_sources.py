"""Data sets of `--streaming`: from the flags to sources of token rows, and their evaluation rows."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import partial

from datasets import Features, Value
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import DataFlags, parse_data_split
from dschat_ppo.data.bad_lines import WAY_OUT
from dschat_ppo.data.cache import content_key, token_key
from dschat_ppo.data.examples import PARTS, SPLIT_SEED, Use
from dschat_ppo.data.form_choice import FIRST_ROWS
from dschat_ppo.data.locate import OpenSet, open_set
from dschat_ppo.data.parts import FilePart, HubPart, Part, Row
from dschat_ppo.data.sources import DataSource
from dschat_ppo.data.streaming import RawBatch, StepShare, StreamedRows, StreamSource, TokenBatch, raw_batches
from dschat_ppo.data.tokenise import FITTED_NAMES, Fitted, TokeniseSettings, token_features, tokenise_batch
from dschat_ppo.errors import UserError, reading

NOTHING = "without a sample for this step (as bad answers in SFT)"


@dataclass(frozen=True)
class StreamedSet:
    """A data set whose training rows are streamed: the parts with them in order, its first rows, and the names of its
    splits with evaluation rows."""

    opened: OpenSet
    parts: list[Part]
    first: list[Row]
    evaluation: list[str]

    @property
    def columns(self) -> list[str]:
        """Those of its first rows, which all its rows have then."""
        return list(dict.fromkeys(name for row in self.first for name in row))


def find_rows(source: DataSource, flags: DataFlags) -> StreamedSet:
    """Open a data set and read its first rows. Refuses what needs all rows: a number of them, or a slice."""
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
    for batch in raw_batches(parts, None, flags.bad_rows != "error"):
        rows, problem = rows + batch.rows, problem or batch.problem
        if len(rows) >= FIRST_ROWS:
            break
    if not rows:
        reason = f"none of its rows can be read; the first: {problem}" if problem else "the data set is empty"
        raise UserError(f"{source.flag} {source.spec}: {reason}")
    return StreamedSet(opened, parts, rows[:FIRST_ROWS], evaluation)


def stream_of(found: StreamedSet, settings: TokeniseSettings) -> StreamSource:
    """The source of its token rows. `UserError` if `--data_split` leaves none for the step."""
    source, share, flags = found.opened.source, None, settings.flags
    if source.flag == "--data_path":
        share = StepShare(parse_data_split(flags.data_split), PARTS[settings.use], SPLIT_SEED)
        if share.bounds[0] == share.bounds[1]:
            raise UserError(f"{source.spec}: --data_split {flags.data_split} leaves no row for this step")
    tokenise = partial(_token_batch, columns=found.columns, settings=settings)
    key = "\0".join(map(str, [source.weight, share, *settings.identity(), *(part.key for part in found.parts)]))
    content = "\0".join(map(content_of, found.parts))
    return StreamSource(source.name, source.weight or 1.0, found.parts, share, tokenise, flags.bad_rows, key, content)


def content_of(part: Part) -> str:
    """What identifies the rows of a part wherever its files lie."""
    if isinstance(part, HubPart):
        return part.key
    with reading(f"{part.flag} {part.name}: cannot be read"):
        return content_key([part.path] if isinstance(part, FilePart) else part.files)


def start(
    sources: list[StreamSource], use: Use, tokenizer: PreTrainedTokenizerBase, limit: int, flags: DataFlags
) -> StreamedRows:
    """Start to read the data sets, and wait for the first chunk."""
    if len(sources) > 1:
        weights = " : ".join(f"{source.weight:g} {source.name}" for source in sources)
        logger().info(f"data: stream: each row comes from one of several data sets in the proportion {weights}")
    key = token_key("\0".join(source.key for source in sources), tokenizer)
    content = hashlib.sha256("\0".join(source.content for source in sources).encode()).hexdigest()
    features = Features({**token_features(use), "source": Value("int32")})
    rows = StreamedRows(flags.data_output_path, key, sources, flags.streaming_rows or 0, features, content)
    if set(FITTED_NAMES.values()).intersection(rows.counts) == {FITTED_NAMES[Fitted.ANSWER_CUT]}:
        raise UserError(f"--data_path: every answer is cut by --max_seq_len {limit}; raise it")
    return rows


def _token_batch(batch: RawBatch, columns: list[str], settings: TokeniseSettings) -> TokenBatch:
    """The token rows of a batch that are kept; see `StreamSource.tokenise`."""
    found = tokenise_batch([dict.fromkeys(columns) | row for row in batch.rows], batch.origins, settings)
    made, bad = [row for row in found if row["problem"] is None], [row for row in found if row["problem"] is not None]
    messages = [row["problem"].partition("\n")[0] for row in bad]
    for row, message in zip(bad, messages, strict=True):
        if row["fitted"] == Fitted.TOO_LONG:
            raise UserError(message)
        if settings.flags.bad_rows == "error":
            raise UserError(f"{message}; {WAY_OUT}")
    names = list(token_features(settings.use))
    rows = [{name: row[name] for name in names} for row in made if row["fitted"] != Fitted.DROPPED]
    counts = Counter(FITTED_NAMES[Fitted(row["fitted"])] for row in made)
    counts[NOTHING] = len(batch.rows) - len({row["number"] for row in found})
    return TokenBatch(rows, dict(counts), len(bad), messages[0] if bad else "")
