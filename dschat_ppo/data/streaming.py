"""`--streaming`: training rows that are read and tokenised while the run trains, for data larger than the disk.

Each rank has a process that makes its rows ahead of their use. Rank and process talk through one pipe: the rank sends
where to begin, or None for the next piece; the process answers each None.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import torch
from datasets import Dataset, DatasetInfo, Features
from datasets.table import InMemoryTable

from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import make_folder
from dschat_ppo.common.heartbeat import heartbeat, on_heartbeat
from dschat_ppo.common.logging import logger
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data.bad_lines import BadLines, too_many, way_out
from dschat_ppo.data.parts import Part, Row, read_part
from dschat_ppo.errors import StorageError, UserError, in_one_line
from dschat_ppo.runtime.processes import signal_when_parent_ends
from dschat_ppo.runtime.stop_requests import raise_if_stop_requested

CHUNK_ROWS = 20_000  # token rows that are shuffled together
SPLIT_ROWS = 1000  # raw rows that `--data_split` divides at a time
READ, UNUSABLE = "raw rows", "that cannot be used"
_SPLIT_USE = 2  # separates these draws from others with `SPLIT_SEED`
_POLL_SECONDS = 0.1
_DOING = "prepared the data"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # DeepSpeed's launcher sends them to all its descendants
Position = dict[str, Any]  # in values that JSON can hold
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


@dataclass(frozen=True)
class RawBatch:
    """Some raw rows of a data set that belong to this step, "FILE, row N" of each, and the position after them. Lines
    between them that cannot be read are left out: `unreadable` is their number, `problem` that of the first, or ""."""

    origins: list[str]
    rows: list[Row]
    unreadable: int = 0
    problem: str = ""
    after: Position | None = None


def raw_batches(
    parts: Sequence[Part], share: StepShare | None, skip: bool, position: Position = START
) -> Iterator[RawBatch]:
    """The raw rows of `share`, or all, from `position` on. Without `skip`, a line that cannot be read is an error. A
    batch may have no rows."""
    bad, number, place = BadLines(skip), position["number"], position["place"]
    for part_number in range(position["part"], len(parts)):
        part = parts[part_number]
        batches, has_ended = read_part(part, bad, place), False
        while not has_ended:
            found = next(batches, None)
            has_ended, place = found is None, found and found.place
            rows, numbers = (found.rows, found.numbers) if found else ([], [])
            kept = [index for index in range(len(rows)) if share is None or share.includes(number + index)]
            number += len(rows)
            origins = [f"{part.name}, row {numbers[index]}" for index in kept]
            problem = bad.first and f"{part.name}, {bad.first}"
            after = {"part": part_number + has_ended, "number": number, "place": place}
            yield RawBatch(origins, [rows[index] for index in kept], bad.count, problem, after)
            bad.forget()


# Token rows


@dataclass(frozen=True)
class TokenBatch:
    """Token rows that are kept of a batch of raw rows, and for the log what was done to how many. `unusable` raw rows
    are skipped because something is wrong with them; `problem` is that of the first one, or ""."""

    rows: list[Row]
    counts: dict[str, int]
    unusable: int = 0
    problem: str = ""


@dataclass(frozen=True)
class StreamSource:
    """One data set of a stream: its raw rows, and what makes token rows of them (`UserError` for a row that ends the
    run). `weight` is its share of the rows, relative to the other data sets; `bad_rows` is the flag. `key` identifies
    the raw rows on this machine and how they are read, `content` the raw rows wherever they are stored."""

    name: str
    weight: float
    parts: Sequence[Part]
    share: StepShare | None  # None: all its rows
    tokenise: Callable[[RawBatch], TokenBatch]
    bad_rows: str = "few"
    key: str = ""
    content: str = ""


@dataclass(frozen=True)
class Piece:
    """Some token rows, perhaps none, in their order. A piece ends with each batch of raw rows, so that a rank that
    waits sees progress. The last piece of a chunk has the position after it, what was done to its raw rows, and the
    problems of some."""

    rows: pa.Table
    after: Position | None = None
    counts: Counter[str] = field(default_factory=Counter)
    problems: Sequence[str] = ()


class _Reader:
    """Reads one source: `next(rows)` is its next token row, or {} after a batch of raw rows. `position` is the place of
    that row: a batch of raw rows, and how many of its token rows are used."""

    def __init__(self, source: StreamSource, position: Position):
        self.source, self.position, self.rows = source, position, self._read()
        self.counts, self.problem = Counter[str](), ""  # of the raw rows read for this chunk; the first problem

    def _read(self) -> Iterator[Row]:
        source, before, used = self.source, self.position["before"], self.position["used"]
        for batch in raw_batches(source.parts, source.share, source.bad_rows != "error", before):
            tokens = source.tokenise(batch) if batch.rows else TokenBatch([], {})
            if not used:  # otherwise a chunk before has counted them
                unusable = batch.unreadable + tokens.unusable
                self.counts.update({READ: len(batch.rows) + batch.unreadable, UNUSABLE: unusable} | tokens.counts)
                self.problem = self.problem or batch.problem or tokens.problem
            for number in range(used, len(tokens.rows)):
                self.position = {"before": before, "used": number + 1}
                yield tokens.rows[number]
            yield {}
            before, used = batch.after, 0

    def end_chunk(self) -> tuple[Counter[str], str]:
        """`counts` and `problem` of the chunk. `UserError` if `--bad_rows` refuses so many unusable rows."""
        counts, problem, policy = self.counts, self.problem, self.source.bad_rows
        bad, rows = counts[UNUSABLE], counts[READ]
        if too_many(bad, rows, policy):
            hint = way_out(bad, rows, policy)
            raise UserError(f"{self.source.name}: {bad} of {rows} rows cannot be used{hint}. The first: {problem}")
        self.counts, self.problem = Counter(), ""
        return counts, problem


def start_of(sources: Sequence[StreamSource]) -> Position:
    """The position before the first token row of a stream."""
    return {"sources": [{"before": START, "used": 0} for _ in sources], "taken": [0 for _ in sources]}


def pieces(
    sources: Sequence[StreamSource], num_rows: int, chunk_rows: int, schema: pa.Schema, first: int, position: Position
) -> Iterator[Piece]:
    """The token rows `first .. num_rows - 1` of a stream; `position` is that before row `first`, where a chunk begins.

    With several sources, each row comes from the source that lacks most to its share of the rows so far. `UserError` if
    a source has no further row.
    """
    readers = [_Reader(source, place) for source, place in zip(sources, position["sources"], strict=True)]
    weights, taken = [source.weight for source in sources], list(position["taken"])
    rows, number = list[Row](), first
    while number < num_rows:
        source = neediest(weights, taken)
        row = next(readers[source].rows, None)
        if row is None:
            readers[source].end_chunk()  # the better reason, if there is one
            what = f"--streaming_rows {num_rows}: {sources[source].name} has only {taken[source]} rows for this step"
            if number == 0:
                raise UserError(f"{what}: --data_split leaves it none, or --truncation drops all")
            mixture = f", enough for {number} rows of the mixture" if len(sources) > 1 else ""
            raise UserError(
                f"{what}{mixture}; set --streaming_rows {number} or less (a run that has begun resumes from its newest "
                "checkpoint with this value and --resume_force True)"
            )
        if row:
            rows.append(row | {"source": source})
            taken[source] += 1
            number += 1
        if row and (number % chunk_rows == 0 or number == num_rows):
            counts, problems = zip(*(reader.end_chunk() for reader in readers), strict=True)
            after = {"sources": [reader.position for reader in readers], "taken": list(taken)}
            table = pa.Table.from_pylist(rows, schema)
            yield Piece(table, after, sum(counts, Counter()), list(filter(None, problems)))
        elif not row:
            yield Piece(pa.Table.from_pylist(rows, schema))
        else:
            continue
        rows = []


def neediest(weights: Sequence[float], taken: Sequence[int]) -> int:
    """The source whose number of rows is furthest below its share of the rows so far and the next one."""
    rows = (sum(taken) + 1) / sum(weights)
    lacking = [weight * rows - count for weight, count in zip(weights, taken, strict=True)]
    return lacking.index(max(lacking))


# The process that makes them


def _serve(pipe: Connection, other_end: Connection, pieces_from: Callable[[int, Position], Iterator[Piece]]) -> None:
    """Body of the process: make pieces a chunk ahead, and answer the rank. The process ignores signals, since the rank
    still needs the rows of its last step; it ends with the rank."""
    other_end.close()  # so that the pipe ends with the rank
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    signal_when_parent_ends(signal.SIGKILL)
    on_heartbeat(None)  # its timer belongs to the rank
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of the tokenizer do not survive a fork
    made: Iterator[Piece | UserError] = iter(())
    ready: deque[Piece | UserError] = deque()
    while True:
        while sum(map(_size, ready)) < CHUNK_ROWS and not pipe.poll() and (piece := next(made, None)) is not None:
            ready.append(piece)
        try:
            order = pipe.recv()
            if order is None:
                pipe.send(ready.popleft() if ready else next(made))
            else:
                made = _or_problem(pieces_from(*order))
                ready.clear()
        except (EOFError, OSError):
            return


def _size(piece: Piece | UserError) -> int:
    """Rows of a piece; one without rows counts as one."""
    return max(1, len(piece.rows)) if isinstance(piece, Piece) else 1


def _or_problem(made: Iterator[Piece]) -> Iterator[Piece | UserError]:
    try:
        yield from made
    except UserError as problem:
        yield problem


# What the rank sees


class StreamedRows:
    """Token rows of a stream: `len(rows)`, `rows[i]` and `rows[[i, j]]` as for a `Dataset`.

    Row i is in chunk i // `CHUNK_ROWS`. Chunk 0, the one in use and the one before are in memory, so rows are to be
    used in the order of `batches.chunked_order`.

    Args:
        root: folder of prepared data, which holds the saved positions; None for that of `datasets`.
        key: identifies the rows and how they are prepared. Positions depend on nothing else, so runs may share them.
        sources, num_rows, features: data sets, rows of an epoch, and columns of the token rows.
        fingerprint: identifies the rows by what they are made from.
    """

    def __init__(
        self, root: str | None, key: str, sources: Sequence[StreamSource], num_rows: int, features: Features,
        fingerprint: str,
    ):  # fmt: skip
        self.column_names = list(features)
        self.fingerprint = fingerprint
        self.counts: dict[str, int] = {}  # what was done with the raw rows of chunk 0
        cache = Path(root or datasets.config.HF_DATASETS_CACHE).expanduser()
        self._home = cache / "dschat_ppo" / f"stream_{key}_{CHUNK_ROWS}"
        try:
            make_folder(self._home)
        except OSError as problem:
            raise UserError(
                f"{self._home}: cannot be written ({problem.strerror}), and positions in the data are stored there; "
                "name another folder with --data_output_path"
            ) from None
        self._num_rows = num_rows
        self._features = features
        self._start = start_of(sources)
        self._chunks: dict[int, Dataset] = {}
        self._next = -1  # the chunk that the process makes next
        self._pipe, other_end = multiprocessing.Pipe()
        make = partial(pieces, sources, num_rows, CHUNK_ROWS, features.arrow_schema)
        self.process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(other_end, self._pipe, make), daemon=True
        )
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the process ignores them
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
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
        """Let the process begin at a chunk, or at the last one before it whose position is saved."""
        saved = ((number, self._saved(number)) for number in range(chunk, 0, -1))
        self._next, position = next(((number, found) for number, found in saved if found), (0, self._start))
        if self._next < chunk and dist.is_main():
            logger().warning(
                f"data: the position of the stream after row {chunk * CHUNK_ROWS} was not saved, so it is read again "
                f"from row {self._next * CHUNK_ROWS}"
            )
        with suppress(OSError):  # the process has ended, which `_receive` reports
            self._pipe.send((self._next * CHUNK_ROWS, position))

    def _receive(self, may_stop: bool) -> Dataset:
        """The rows of the next chunk; what was done is logged, and the position after it saved."""
        tables, last = list[pa.Table](), None
        while last is None or last.after is None:
            try:
                self._pipe.send(None)
                while may_stop and not self._pipe.poll(_POLL_SECONDS):
                    raise_if_stop_requested(_DOING)
                found: Piece | UserError = self._pipe.recv()
            except (EOFError, OSError):
                raise UserError(
                    "the process that reads the stream has ended, most often because memory ran out (its own message, "
                    "if any, is above); run the same command again to resume from the newest checkpoint"
                ) from None
            heartbeat()
            if isinstance(found, UserError):
                self._next = -1
                raise found
            tables.append(found.rows)
            last = found
        chunk, self._next = self._next, self._next + 1
        table = InMemoryTable(pa.concat_tables(tables))
        rows = Dataset(table, info=DatasetInfo(features=self._features), fingerprint=f"{self._home.name}_{chunk}")
        if chunk == 0:
            self.counts = last.counts
        if dist.is_main():
            first = chunk * CHUNK_ROWS
            done = ", ".join(f"{number} {what}" for what, number in last.counts.items())
            done = done or "read together with the rows before"
            logger().info(f"data: stream: rows {first + 1} to {first + len(rows)} of {self._num_rows}: {done}")
            for problem in last.problems:
                logger().warning(f"data: skipped: {problem}")
        if dist.local_rank() == 0 and len(rows) == CHUNK_ROWS and self._saved(chunk + 1) is None:
            self._save(chunk + 1, last.after)
        return rows

    def _file_of(self, chunk: int) -> Path:
        """The file with the position before a chunk."""
        return self._home / f"before_{chunk:06d}.json"

    def _saved(self, chunk: int) -> Position | None:
        """The saved position before a chunk; None if there is none, or the file is damaged."""
        try:
            position = json.loads(self._file_of(chunk).read_bytes())
            sizes = {len(position[name]) for name in self._start}
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return position if sizes == {len(self._start["taken"])} else None

    def _save(self, chunk: int, position: Position) -> None:
        path = self._file_of(chunk)
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # other runs and machines may write it too
        try:
            draft.write_text(json.dumps(position), encoding="utf-8")
            os.replace(draft, path)
        except OSError as problem:
            raise StorageError(f"{path}: cannot be written ({in_one_line(problem)})") from None


def rows_at_hand(rows: Dataset | StreamedRows) -> Dataset:
    """All rows, or of a stream those of its first chunk."""
    return rows._use(0) if isinstance(rows, StreamedRows) else rows
