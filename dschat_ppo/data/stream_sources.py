"""Data sets of `--streaming`: from the flags to sources of token rows, and their evaluation rows."""

from __future__ import annotations

import hashlib
import pickle
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, Value

from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import DataFlags, parse_data_split
from dschat_ppo.data.cache import stream_key
from dschat_ppo.data.chunks import NOTHING, StreamSource, TokenBatch
from dschat_ppo.data.conversion import conversion_error
from dschat_ppo.data.forms import FIRST_ROWS
from dschat_ppo.data.lengths import FITTED_NAMES, Fitted
from dschat_ppo.data.mixture import SPLIT_SEED
from dschat_ppo.data.raw_stream import RawBatch, RawStream, Row, StepShare, StreamPart
from dschat_ppo.data.sources import DataSource, is_hub_name
from dschat_ppo.data.splits import ORIGIN, Origins, Splits, load_all
from dschat_ppo.data.stream_parts import StreamedSet, open_set
from dschat_ppo.data.streaming import StreamedRows, start_stream
from dschat_ppo.data.tokenise import TokeniseSettings, reading_of, token_features, tokenise_batch
from dschat_ppo.errors import UserError, reading


@dataclass(frozen=True)
class OpenedSource:
    """One data set of a stream before its reader starts."""

    source: DataSource
    found: StreamedSet
    settings: TokeniseSettings
    share: StepShare | None  # None: all its rows

    def stream(self, bad_rows: str) -> StreamSource:
        """The source of its token rows, with `--bad_rows`."""
        raw = RawStream(self.found.train, self.share)
        tokenise = partial(_token_batch, settings=self.settings, skips=bad_rows != "error")
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
    """The files of a data set, and its first rows."""
    scratch = Path(flags.data_output_path or datasets.config.HF_DATASETS_CACHE).expanduser()
    try:
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"--data_output_path {scratch}: cannot be written ({problem.strerror})") from None
    found = open_set(source, flags.bad_rows != "error", scratch)
    rows, unreadable = first_rows(found.train)
    if not rows:
        reason = f"none of its rows can be read; the first: {unreadable}" if unreadable else "the data set is empty"
        raise UserError(f"{source.flag} {source.spec}: {reason}")
    return found, rows


def first_rows(parts: tuple[StreamPart, ...]) -> tuple[list[Row], str]:
    """(the first `FIRST_ROWS` rows, read in a child process, which a damaged file may crash; problem of the first
    skipped line before them, or "")."""
    first_problem = ""
    for part in parts:
        with tempfile.NamedTemporaryFile() as file:

            def read(part: StreamPart = part, path: str = file.name) -> None:
                rows, problem = list[Row](), ""
                for batch in part.batches(None):
                    rows += batch.rows
                    problem = problem or batch.problem
                    if len(rows) >= FIRST_ROWS:
                        break
                Path(path).write_bytes(pickle.dumps((rows[:FIRST_ROWS], problem)))

            reason = conversion_error(read)
            if reason is not None:
                raise UserError(f"{part.flag} {part.name}: {reason}")
            rows, skipped = pickle.loads(Path(file.name).read_bytes())
        first_problem = first_problem or (skipped and f"{part.name}, {skipped}")
        if rows:
            return rows, first_problem
    return [], first_problem


def _key_of(opened: list[OpenedSource], flags: DataFlags) -> str:
    """Key of a stream in the cache: its files, how they are read and mixed, the tokenizer and the code."""
    parts: list[Any] = []
    for each in opened:
        parts += [each.source.weight, each.share, *reading_of(each.settings, flags)]
    places = "\0".join(each.found.place for each in opened)
    return stream_key(places, opened[0].settings.tokenizer, *parts)


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
    source, found = opened.source, opened.found
    if not is_hub_name(source.location):
        wanted = replace(source, split="+".join(found.evaluation))
        return load_all(wanted, flags.data_output_path, flags.bad_rows)
    part = found.hub_parts[found.evaluation[0]]
    with reading(f"{part.flag} {part.name}: cannot be read"):
        rows = Dataset.from_list([row for batch in part.batches(None) for row in batch.rows])
    rows = rows.add_column(ORIGIN, np.arange(1, len(rows) + 1, dtype=np.int64))
    rows._fingerprint = hashlib.sha256(f"{found.content} {part.name}".encode()).hexdigest()[:32]
    return Splits(rows, None, Origins((part.name,)))


def _columns(use: str) -> Features:
    """Columns of a token row; without its digest, which only a table of all rows needs."""
    return Features({name: kind for name, kind in token_features(use).items() if name != "digest"})


def _token_batch(batch: RawBatch, settings: TokeniseSettings, skips: bool) -> TokenBatch:
    """The token rows of a batch that are kept; see `StreamSource.tokenise`."""
    columns, bad = tokenise_batch(batch.rows, batch.origins, settings)
    stopping = next((problem for problem in bad if problem.is_too_long or not skips), None)
    if stopping is not None:
        raise UserError(stopping.stop_message)
    fitted = columns["fitted"]
    names = list(_columns(settings.use))
    rows = [{name: columns[name][i] for name in names} for i, code in enumerate(fitted) if code != Fitted.DROPPED]
    counts = Counter(FITTED_NAMES[Fitted(code)] for code in fitted)
    counts[NOTHING] = len({*range(len(batch.rows))} - {*columns["index"], *(problem.index for problem in bad)})
    return TokenBatch(rows, dict(counts), len({problem.index for problem in bad}), bad[0].message if bad else "")
