"""`--streaming`: training rows that are read and tokenised while the run trains, for data larger than the disk.

Each rank has a process that makes chunks of its rows ahead of their use. Every chunk comes with the position in the
data after it, and checkpoints hold the positions of the chunks in use, so that a resumed run reads on from there.
"""

from __future__ import annotations

import atexit
import hashlib
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset, Features, Value
from datasets.table import InMemoryTable

from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.logging import logger
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.config.data_flags import DataFlags, parse_data_split
from dschat_ppo.data.examples import PARTS, SPLIT_SEED, Use
from dschat_ppo.data.form_choice import FIRST_ROWS
from dschat_ppo.data.parts import WAY_OUT, Batch, Part, Row, read_part, too_many, way_out
from dschat_ppo.data.sources import DataSource, OpenSet, open_set
from dschat_ppo.data.tokenise import DOING, Fitted, TokeniseSettings, token_features, tokenise_batch
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.processes import signal_when_parent_ends
from dschat_ppo.runtime.stop_requests import raise_if_stop_requested

CHUNK_ROWS = 20_000  # token rows that are shuffled together
SPLIT_ROWS = 1000  # raw rows that `--data_split` divides at a time
READ, UNUSABLE = "raw rows", "that cannot be used"
NOTHING = "without a sample for this step (as bad answers in SFT)"
_SPLIT_USE = 2  # separates these draws from others with `SPLIT_SEED`
_POLL_SECONDS = 0.1
Tokens = tuple[list[Row], Counter[str], str]
Position = dict[str, Any]  # of numbers, texts, lists and dicts, which every checkpoint can hold
START: Position = {"part": 0, "number": 0, "place": None}  # before the first raw row of a data set


# Raw rows


@dataclass(frozen=True)
class StepShare:
    """The raw rows of one step by `--data_split`: of each `SPLIT_ROWS` rows a random part, disjoint from those of the
    other steps (`part` 0, 1, 2). It depends only on the number of a row, so that every step sees the same division."""

    shares: tuple[float, float, float]
    part: int
    seed: int

    @property
    def bounds(self) -> tuple[int, int]:
        """Range of places in the random order of `SPLIT_ROWS` rows that belong to the step."""
        whole = sum(self.shares)
        first, last = (round(SPLIT_ROWS * sum(self.shares[:i]) / whole) for i in (self.part, self.part + 1))
        return first, last

    def includes(self, number: int) -> bool:
        """Whether this raw row, from 0, belongs to the step."""
        block, place = divmod(number, SPLIT_ROWS)
        return place in _chosen(self, block)


@lru_cache(8)
def _chosen(share: StepShare, block: int) -> set[int]:
    """The places inside a block of `SPLIT_ROWS` rows that belong to the step."""
    order = torch.randperm(SPLIT_ROWS, generator=shared_generator(share.seed, _SPLIT_USE, block)).tolist()
    return set(order[slice(*share.bounds)])


def raw_batches(
    parts: Sequence[Part], share: StepShare | None, skip: bool, position: Position = START
) -> Iterator[Batch]:
    """The raw rows of `share`, or all, from `position` on; `place` is the position after them. Without `skip`, a line
    that cannot be read is an error."""
    number, place = position["number"], position["place"]
    for index in range(position["part"], len(parts)):
        for batch in read_part(parts[index], skip, place):
            kept = [at for at in range(len(batch.rows)) if share is None or share.includes(number + at)]
            number += len(batch.rows)
            origins, rows = [batch.origins[at] for at in kept], [batch.rows[at] for at in kept]
            after = {"part": index, "number": number, "place": batch.place}
            yield replace(batch, origins=origins, rows=rows, place=after)
        place = None


# Token rows


@dataclass(frozen=True)
class StreamSource:
    """One data set of a stream. `weight` is its share of the rows, relative to the other data sets; `bad_rows` is the
    flag. `content` identifies the raw rows wherever they are stored. `tokenise` makes of a batch of raw rows the token
    rows that are kept, counts of what was done for the log (of `UNUSABLE` rows too), and the problem of the first bad
    row, or ""; `UserError` for a row that ends the run."""

    name: str
    weight: float
    parts: Sequence[Part]
    share: StepShare | None  # None: all its rows
    tokenise: Callable[[Batch], Tokens]
    bad_rows: str = "few"
    content: str = ""


class _Reader:
    """Reads one source: `rows` gives its token rows, and None after each batch of raw rows. `position` is behind the
    last token row: the position before its batch, and how many token rows from there on are used; reading from there
    may divide the rows into other batches."""

    def __init__(self, source: StreamSource, position: Position):
        self.source, self.position, self.rows = source, position, self._read()
        self.counts, self.problem = Counter[str](), ""  # of the raw rows read for this chunk; the first problem

    def _read(self) -> Iterator[Row | None]:
        source, before, used = self.source, self.position["before"], self.position["used"]
        for batch in raw_batches(source.parts, source.share, source.bad_rows != "error", before):
            rows, counts, problem = source.tokenise(batch)
            if not used:  # otherwise a chunk before has counted them
                self.counts.update({READ: len(batch.rows) + batch.unreadable, UNUSABLE: batch.unreadable})
                self.counts.update(counts)
                self.problem = self.problem or batch.problem or problem
            for number in range(used, len(rows)):
                self.position = {"before": before, "used": number + 1}
                yield rows[number]
            yield None
            before, used = batch.place, max(0, used - len(rows))

    def end_chunk(self) -> tuple[Counter[str], str]:
        """`counts` and `problem` of the chunk. `UserError` if `--bad_rows` refuses so many unusable rows."""
        counts, problem, policy = self.counts, self.problem, self.source.bad_rows
        bad, rows = counts[UNUSABLE], counts[READ]
        if too_many(bad, rows, policy):
            hint = way_out(bad, rows, policy)
            raise UserError(f"{self.source.name}: {bad} of {rows} rows cannot be used{hint}. The first: {problem}")
        self.counts, self.problem = Counter(), ""
        return counts, problem


@dataclass(frozen=True)
class Chunk:
    """Token rows in their order, the position after them, what was done to the raw rows, and the problems of some."""

    rows: Dataset
    after: Position
    counts: Counter[str]
    problems: Sequence[str]


def start_of(sources: Sequence[StreamSource]) -> Position:
    """The position before the first token row of a stream."""
    return {"sources": [{"before": START, "used": 0} for _ in sources], "taken": [0 for _ in sources]}


def chunks(
    sources: Sequence[StreamSource], num_rows: int, features: Features, first: int, position: Position
) -> Iterator[Chunk | None]:
    """The chunks of a stream of `num_rows` token rows from `first` on, where `position` is; None after each batch of
    raw rows, so that a rank that waits sees progress.

    With several sources, each row comes from the source that lacks most to its share of the rows so far. `UserError` if
    a source has no further row.
    """
    readers = [_Reader(source, place) for source, place in zip(sources, position["sources"], strict=True)]
    weights, taken = [source.weight for source in sources], list(position["taken"])
    rows = list[Row]()
    for number in range(first * CHUNK_ROWS, num_rows):
        source = neediest(weights, taken)
        for row in readers[source].rows:
            if row is not None:
                break
            yield None
        else:
            readers[source].end_chunk()  # the better reason, if there is one
            way = f"set --streaming_rows {number} or less (a run that has begun resumes from its newest checkpoint with"
            way += " this value and --resume_force True)"
            way = way if number else "--data_split leaves it none, or --truncation drops all"
            has = f"{sources[source].name} has only {taken[source]} rows for this step"
            raise UserError(f"--streaming_rows {num_rows}: {has}; {way}")
        rows.append(row | {"source": source})
        taken[source] += 1
        if len(rows) == CHUNK_ROWS or number + 1 == num_rows:
            counts, problems = zip(*(reader.end_chunk() for reader in readers), strict=True)
            after = {"sources": [reader.position for reader in readers], "taken": list(taken)}
            table = InMemoryTable(pa.Table.from_pylist(rows, features.arrow_schema))
            made = Dataset(table, fingerprint=f"{number}")
            yield Chunk(made, after, sum(counts, Counter()), list(filter(None, problems)))
            rows = []


def neediest(weights: Sequence[float], taken: Sequence[int]) -> int:
    """The source whose number of rows is furthest below its share of the rows so far and the next one."""
    rows = (sum(taken) + 1) / sum(weights)
    lacking = [weight * rows - count for weight, count in zip(weights, taken, strict=True)]
    return lacking.index(max(lacking))


# The process that makes them


def _serve(pipe: Connection, other_end: Connection, chunks_from: Callable[[int, Position], Iterator[Any]]) -> None:
    """Body of the process: make chunks from where the rank says, `(its number of the order, chunk, position)`, until it
    says otherwise. A chunk waits in the pipe until the rank takes it. The process ignores signals, since the rank still
    needs the rows of its last step; it ends with the rank."""
    other_end.close()  # so that the pipe ends with the rank
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # DeepSpeed's launcher sends them to all descendants
        signal.signal(number, signal.SIG_IGN)
    signal_when_parent_ends(signal.SIGKILL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of the tokenizer do not survive a fork
    made: Iterator[Any] = iter(())
    answer: Any
    has_ended = True
    with suppress(EOFError, OSError):  # the rank has ended
        while True:
            if has_ended or pipe.poll():
                order, *place = pipe.recv()
                made = chunks_from(*place)
            try:
                answer, has_ended = next(made), False
            except (UserError, StopIteration) as problem:
                answer, has_ended = problem, True
            pipe.send((order, answer))


# What the rank sees


class StreamedRows:
    """Token rows of a stream: `len(rows)`, `rows[i]` and `rows[[i, j]]` as for a `Dataset`.

    Row i is in chunk i // `CHUNK_ROWS`. Chunk 0, the one in use and the one before are in memory, so rows are to be
    used in the order of `batches.chunked_order`.

    Args:
        sources, num_rows, features: data sets, rows of an epoch, and columns of the token rows.
        fingerprint: identifies the rows by what they are made from.
    """

    def __init__(self, sources: Sequence[StreamSource], num_rows: int, features: Features, fingerprint: str):
        self.column_names = list(features)
        self.fingerprint = fingerprint
        self.counts: dict[str, int] = {}  # what was done with the raw rows of chunk 0
        self._num_rows = num_rows
        self._positions = {0: start_of(sources)}  # before chunk 0, 1 and those near the one in use
        self._chunks: dict[int, Dataset] = {}
        self._order, self._next = 0, -1  # orders given to the process, and the chunk that it makes next
        self._pipe, other_end = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(other_end, self._pipe, partial(chunks, sources, num_rows, features)), daemon=True
        )
        self.process.start()
        other_end.close()
        atexit.register(self.process.kill)  # before `multiprocessing` waits for it: it ignores SIGTERM
        self._use(0, may_stop=True)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int | Sequence[int]) -> dict[str, Any]:
        """One row, or the columns of several. `UserError` if the stream has fewer, or a row of the chunk is bad."""
        if isinstance(index, int):
            if not 0 <= index < self._num_rows:
                raise IndexError(index)
            return dict(self._use(index // CHUNK_ROWS)[index % CHUNK_ROWS])
        rows = [self[number] for number in index]
        return {name: [row[name] for row in rows] for name in self.column_names}

    def state_dict(self) -> dict[str, Any]:
        """The positions before the chunks in use, for `load_state_dict`."""
        return {"rows": self.fingerprint, "positions": self._positions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Read on from a saved position, in other rows from the start."""
        if state["rows"] == self.fingerprint:
            self._positions = state["positions"] | self._positions

    def _use(self, chunk: int, may_stop: bool = False) -> Dataset:
        """The rows of a chunk. A stop request ends the wait for them (`StopRequested`) only if `may_stop`: in training,
        the state is saved after the optimizer step."""
        if chunk not in self._chunks:
            if self._next != chunk:
                self._go_to(chunk)
            self._chunks = {number: self._chunks[number] for number in (0, chunk - 1) if number in self._chunks}
            while self._next <= chunk:
                rows = self._receive(may_stop)
            self._chunks[chunk] = rows
            if 0 < chunk == (self._num_rows - 1) // CHUNK_ROWS:
                self._go_to(1)  # of the next epoch
        return self._chunks[chunk]

    def _go_to(self, chunk: int) -> None:
        """Let the process begin at a chunk, or at the last one before it whose position is known."""
        self._next = max(number for number in self._positions if number <= chunk)
        if self._next < chunk and dist.is_main():
            logger().warning(
                f"data: the checkpoint has no position of these rows after row {chunk * CHUNK_ROWS}, so they are read "
                f"again from row {self._next * CHUNK_ROWS}"
            )
        self._order += 1
        with suppress(OSError):  # the process has ended, which `_receive` reports
            self._pipe.send((self._order, self._next, self._positions[self._next]))

    def _receive(self, may_stop: bool) -> Dataset:
        """The rows of the next chunk; what was done is logged."""
        order, found = 0, None
        while order != self._order or found is None:  # the answer to an order before, or a batch of raw rows is done
            try:
                while may_stop and not self._pipe.poll(_POLL_SECONDS):
                    raise_if_stop_requested(DOING)
                order, found = self._pipe.recv()
            except (EOFError, OSError):
                raise UserError(
                    "the process that reads the stream has ended, most often because memory ran out (its own message, "
                    "if any, is above); run the same command again to resume from the newest checkpoint"
                ) from None
            heartbeat()
        if not isinstance(found, Chunk):
            self._next = -1
            raise found
        chunk, self._next = self._next, self._next + 1
        known = self._positions | ({self._next: found.after} if len(found.rows) == CHUNK_ROWS else {})
        self._positions = {number: known[number] for number in known if number in (0, 1) or chunk <= number + 1}
        self.counts = found.counts if chunk == 0 else self.counts
        if dist.is_main():
            first = chunk * CHUNK_ROWS
            done = ", ".join(f"{number} {what}" for what, number in found.counts.items())
            done = done or "read together with the rows before"
            logger().info(f"data: stream: rows {first + 1} to {first + len(found.rows)} of {self._num_rows}: {done}")
            for problem in found.problems:
                logger().warning(f"data: skipped: {problem}")
        return found.rows


def rows_at_hand(rows: Dataset | StreamedRows) -> Dataset:
    """All rows, or of a stream those of its first chunk."""
    return rows._use(0) if isinstance(rows, StreamedRows) else rows


def stream_state(rows: Dataset | StreamedRows) -> dict[str, Any] | None:
    """For a checkpoint: the positions of a stream, or None."""
    return rows.state_dict() if isinstance(rows, StreamedRows) else None


def load_stream_state(rows: Dataset | StreamedRows, state: dict[str, Any] | None) -> None:
    """Restore `stream_state`."""
    if isinstance(rows, StreamedRows) and state is not None:
        rows.load_state_dict(state)


# From the flags to a stream


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
    parts = opened.parts([name])
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
    content = "\0".join(part.content for part in found.parts)
    return StreamSource(source.name, source.weight or 1.0, found.parts, share, tokenise, flags.bad_rows, content)


def start(sources: list[StreamSource], use: Use, limit: int, flags: DataFlags) -> StreamedRows:
    """Start to read the data sets, and wait for the first chunk."""
    if len(sources) > 1:
        weights = " : ".join(f"{source.weight:g} {source.name}" for source in sources)
        logger().info(f"data: stream: each row comes from one of several data sets in the proportion {weights}")
    content = hashlib.sha256("\0".join(source.content for source in sources).encode()).hexdigest()
    features = Features({**token_features(use), "source": Value("int32")})
    rows = StreamedRows(sources, flags.streaming_rows or 0, features, content)
    if {code.words for code in Fitted}.intersection(rows.counts) == {Fitted.ANSWER_CUT.words}:
        raise UserError(f"--data_path: every answer is cut by --max_seq_len {limit}; raise it")
    return rows


def _token_batch(batch: Batch, columns: list[str], settings: TokeniseSettings) -> Tokens:
    """See `StreamSource.tokenise`."""
    found = tokenise_batch([dict.fromkeys(columns) | row for row in batch.rows], batch.origins, settings)
    made, bad = [row for row in found if row["problem"] is None], [row for row in found if row["problem"] is not None]
    messages = [row["problem"] for row in bad]
    if messages and settings.flags.bad_rows == "error":
        raise UserError(f"{messages[0]}; {WAY_OUT}")
    names = list(token_features(settings.use))
    rows = [{name: row[name] for name in names} for row in made if row["fitted"] != Fitted.DROPPED]
    counts = Counter(Fitted(row["fitted"]).words for row in made)
    counts += Counter({NOTHING: len(batch.rows) - len({row["number"] for row in found}), UNUSABLE: len(bad)})
    return rows, counts, messages[0] if bad else ""
