"""`--streaming`: training rows that are read and tokenised while the run trains, for data larger
than the disk.

A process makes chunks of token rows, one ahead of its use. Every chunk comes with the position in
the data after it, and checkpoints hold these positions, so that a resumed run reads on from the
chunk in use.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import Pipe, get_context
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
from dschat_ppo.common.stop_requests import raise_if_stop_requested, reset
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data.examples import SPLIT_SEED
from dschat_ppo.data.form_choice import FIRST_ROWS
from dschat_ppo.data.parts import Batch, Part, Row, read_part
from dschat_ppo.data.sources import Group, OpenSet
from dschat_ppo.data.tokenise import (
    DOING,
    Fitted,
    TokeniseSettings,
    features_of,
    refuse_bad,
    tokenise_batch,
)
from dschat_ppo.errors import UserError

CHUNK_ROWS = 20_000  # token rows that are shuffled together
SPLIT_ROWS = 1000  # raw rows that `--data_split` divides at a time
ALL = (0, SPLIT_ROWS)  # the share of a step that uses all of them
READ, UNUSABLE = "raw rows", "that cannot be used"
NOTHING = "without a sample for this step (as bad answers in SFT)"
_SPLIT_USE = 2  # separates these draws from others with `SPLIT_SEED`
Tokens = tuple[list[Row], Counter[str], str]
Position = dict[str, Any]  # of numbers, texts, lists and dicts, which every checkpoint can hold
START: Position = {"part": 0, "number": 0, "place": None}  # before the first raw row of a data set


# Raw rows


@lru_cache(8)
def places_of_step(share: tuple[int, int], block: int) -> frozenset[int]:
    """The places in a block of `SPLIT_ROWS` raw rows that belong to a step: those from `share[0]`
    to `share[1]` of a random order, which every step and run sees alike."""
    order = torch.randperm(
        SPLIT_ROWS, generator=shared_generator(SPLIT_SEED, _SPLIT_USE, block)
    ).tolist()
    return frozenset(order[slice(*share)])


def raw_batches(
    parts: Sequence[Part], share: tuple[int, int], position: Position = START
) -> Iterator[Batch]:
    """The raw rows of a step from `position` on; `place` is the position after them."""
    number = position["number"]
    place = position["place"]
    for index in range(position["part"], len(parts)):
        for batch in read_part(parts[index], place):
            spots = (divmod(number + at, SPLIT_ROWS) for at in range(len(batch.rows)))
            kept = [
                at for at, (block, spot) in enumerate(spots) if spot in places_of_step(share, block)
            ]
            number += len(batch.rows)
            after = {"part": index, "number": number, "place": batch.place}
            yield Batch([batch.origins[at] for at in kept], [batch.rows[at] for at in kept], after)
        place = None


# Token rows


@dataclass(frozen=True)
class StreamSource:
    """One data set of a stream."""

    name: str
    weight: float  # its share of the rows, relative to the other data sets
    parts: Sequence[Part]
    share: tuple[int, int]  # see `raw_batches`
    # raw rows -> token rows that are kept, counts of what was done for the log (of `UNUSABLE` rows
    # too), and what is wrong with the first bad row, or ""; `UserError` for a row that ends the run
    tokenise: Callable[[Batch], Tokens]
    bad_rows: str = "few"  # the flag


@dataclass(frozen=True)
class Chunk:
    """Token rows in their order, the position after them, what was done to the raw rows, and the
    problems of some."""

    rows: Dataset
    after: Position
    counts: Counter[str]
    problems: Sequence[str]


def start_of(sources: Sequence[StreamSource]) -> Position:
    """The position before the first token row of a stream."""
    return {
        "sources": [{"before": START, "used": 0} for _ in sources],
        "taken": [0 for _ in sources],
    }


class Reader:
    """Reads one data set of a stream. `place` is behind the token row that it gave last: the
    position before a batch of raw rows, and how many token rows from there on are used; reading
    from there may divide the rows into other batches. `counts` and `problem`, the first one, are
    about the batches since the last chunk."""

    def __init__(self, source: StreamSource, place: Position):
        self.source = source
        self.place = place
        self.counts = Counter[str]()
        self.problem = ""

    def rows(self) -> Iterator[Row | None]:
        """Token rows, and None before those of each batch of raw rows."""
        before = self.place["before"]
        used = self.place["used"]
        for batch in raw_batches(self.source.parts, self.source.share, before):
            rows, counts, problem = self.source.tokenise(batch)
            if not used:  # otherwise a chunk before has counted the rows
                self.counts += counts + Counter({READ: len(batch.rows)})
                self.problem = self.problem or problem
            yield None
            for number in range(used, len(rows)):
                self.place = {"before": before, "used": number + 1}
                yield rows[number]
            before = batch.place
            used = max(0, used - len(rows))


def chunks(
    sources: Sequence[StreamSource],
    num_rows: int,
    features: Features,
    first: int,
    position: Position,
) -> Iterator[Chunk | None]:
    """The chunks of a stream of `num_rows` token rows from `first` on, where `position` is; None
    after each batch of raw rows, so that a rank that waits sees progress.

    With several sources, each row comes from the source that lacks most to its share of the rows so
    far. `UserError` if a source has no further row, or `--bad_rows` refuses the bad rows of a
    chunk.
    """
    readers = [
        Reader(source, place) for source, place in zip(sources, position["sources"], strict=True)
    ]
    found = [reader.rows() for reader in readers]
    taken = list(position["taken"])
    rows = list[Row]()
    for number in range(first * CHUNK_ROWS, num_rows):
        which = neediest([source.weight for source in sources], taken)
        row = None
        for row in found[which]:
            if row is not None:
                break
            yield None
        is_end = len(rows) + 1 == CHUNK_ROWS or number + 1 == num_rows or row is None
        for one in readers if is_end else ():
            refuse_bad(
                one.source.name,
                one.counts[UNUSABLE],
                one.counts[READ],
                one.source.bad_rows,
                [one.problem],
            )
        if row is None:
            if number:
                way = (
                    f"set --streaming_rows {number} or less (a run that has begun resumes from its"
                    " newest checkpoint with this value and --resume_force True)"
                )
            else:
                way = "--data_split leaves it none, or --truncation drops all"
            has = f"{sources[which].name} has only {taken[which]} rows for this step"
            raise UserError(f"--streaming_rows {num_rows}: {has}; {way}")
        rows.append(row | {"source": which})
        taken[which] += 1
        if is_end:
            table = InMemoryTable(pa.Table.from_pylist(rows, features.arrow_schema))
            after = {"sources": [one.place for one in readers], "taken": list(taken)}
            counts = sum((one.counts for one in readers), Counter())
            problems = [one.problem for one in readers]
            yield Chunk(
                Dataset(table, fingerprint=f"{number}"), after, counts, list(filter(None, problems))
            )
            rows = []
            for one in readers:
                one.counts = Counter()
                one.problem = ""


def neediest(weights: Sequence[float], taken: Sequence[int]) -> int:
    """The source whose number of rows is furthest below its share of the rows so far and the next
    one."""
    rows = (sum(taken) + 1) / sum(weights)
    lacking = [weight * rows - count for weight, count in zip(weights, taken, strict=True)]
    return lacking.index(max(lacking))


# What a rank sees


def _send_chunks(made: Iterator[Chunk | None], pipe: Connection, of_rank: Connection) -> None:
    """In the process: send what is made, and an error in place of what cannot be made. A chunk
    waits in the pipe until the rank needs it. Signals that DeepSpeed's launcher sends to all
    descendants do not end the process: the rank still needs the rows of its last step. The end of
    the pipe does: the rank has ended, or reads from another place."""
    reset()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # the threads of the tokenizer do not survive a fork
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    of_rank.close()
    with pipe, suppress(BrokenPipeError):
        try:
            for found in made:
                pipe.send(found)
        except UserError as problem:
            pipe.send(problem)
    os._exit(0)  # without the handlers at the end of the rank


class StreamedRows:
    """Token rows of a stream: `len(rows)`, the rows of an epoch, and `rows[i]` as for a `Dataset`.
    Row i is in chunk i // `CHUNK_ROWS`. Chunk 0, the one in use and the one before are in memory,
    so rows are to be used in the order of `batches.chunked_order`. `fingerprint` identifies the
    rows by what they are made from."""

    def __init__(
        self, sources: Sequence[StreamSource], num_rows: int, features: Features, fingerprint: str
    ):
        self.column_names = list(features)
        self.fingerprint = fingerprint
        self._num_rows = num_rows
        self.counts = Counter[str]()  # what was done with the raw rows of chunk 0
        self._sources, self._features = sources, features
        self._positions = {0: start_of(sources)}  # before chunks
        self._chunks: dict[int, Dataset] = {}
        self._begin(0)
        self._use(0, may_stop=True)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row. `UserError` if the stream has fewer, or a row of the chunk is bad."""
        if not 0 <= index < self._num_rows:
            raise IndexError(index)
        return dict(self._use(index // CHUNK_ROWS)[index % CHUNK_ROWS])

    def state_dict(self) -> dict[str, Any]:
        """The positions before chunks, for `load_state_dict`."""
        return {"rows": self.fingerprint, "positions": dict(self._positions)}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Read on from a saved position, in other rows from the start."""
        if state is not None and state["rows"] == self.fingerprint:
            self._positions = state["positions"] | self._positions

    def _use(self, chunk: int, may_stop: bool = False) -> Dataset:
        """The rows of a chunk. A stop request ends the wait for them (`StopRequested`) only if
        `may_stop`: in training, the state is saved after the optimizer step."""
        if chunk not in self._chunks:
            if self._next != chunk:
                self._begin(chunk)
            self._chunks = {
                number: self._chunks[number] for number in (0, chunk - 1) if number in self._chunks
            }
            while self._next <= chunk:
                rows = self._receive(may_stop)
            self._chunks[chunk] = rows
            if 0 < chunk == (self._num_rows - 1) // CHUNK_ROWS:
                self._begin(1)  # of the next epoch
        return self._chunks[chunk]

    def _begin(self, chunk: int) -> None:
        """Let a process begin at a chunk, or at the last one before it whose position is known."""
        self._next = max(number for number in self._positions if number <= chunk)
        if self._next < chunk and dist.is_main():
            logger().warning(
                "data: the checkpoint has no position of these rows after row"
                f" {chunk * CHUNK_ROWS}, so they are read again from row {self._next * CHUNK_ROWS}"
            )
        made = chunks(
            self._sources, self._num_rows, self._features, self._next, self._positions[self._next]
        )
        self._pipe, inside = Pipe(duplex=False)
        self.process = get_context("fork").Process(
            target=_send_chunks, args=(made, inside, self._pipe)
        )
        self.process.start()
        inside.close()  # the end of the process ends the pipe
        atexit.register(self.process.kill)  # before `multiprocessing` waits for it

    def _receive(self, may_stop: bool) -> Dataset:
        """The rows of the next chunk; what was done is logged. After a failure, another process
        begins."""
        number = self._next
        self._next = -1
        found = None
        while found is None:  # a batch of raw rows is done
            if may_stop:
                raise_if_stop_requested(DOING)
            try:
                found = self._pipe.recv()
            except (EOFError, OSError):
                # or else the end of this rank ends it before its traceback is written
                self.process.join(5)
                what = (
                    "the process that reads the stream has ended (its own message, if any, is"
                    " above)"
                )
                way = "most often because memory ran out; run the same command again to resume"
                raise UserError(f"{what}, {way}") from None
            heartbeat()
        if isinstance(found, UserError):
            raise found
        first = number * CHUNK_ROWS
        self._next = number + 1
        if len(found.rows) == CHUNK_ROWS:
            self._positions[self._next] = found.after
        self.counts = self.counts if first else found.counts
        if dist.is_main():
            done = ", ".join(f"{number} {what}" for what, number in found.counts.items())
            done = done or "read together with the rows before"
            logger().info(
                f"data: stream: rows {first + 1} to {first + len(found.rows)} of {self._num_rows}:"
                f" {done}"
            )
            for told in found.problems:
                logger().warning(f"data: skipped: {told}")
        return found.rows


def rows_at_hand(rows: Dataset | StreamedRows) -> Dataset:
    """All rows, or of a stream those of its first chunk."""
    if isinstance(rows, StreamedRows):
        return rows._use(0)
    return rows


# From the flags to a stream


def first_rows(found: OpenSet, groups: Sequence[Group]) -> tuple[list[Part], list[Row]]:
    """The parts of a data set whose training rows are streamed, in order, and its first rows that
    can be read. Refuses what needs all rows: a number of them, or a slice."""
    source, [(names, cut), *others] = found.source, groups
    if source.samples is not None:
        way = "it does not go with --streaming; use a weight, as in NAME:0.5"
        raise UserError(f"{source.flag} {source.spec}: @ROWS needs all rows, so {way}")
    if cut or others:
        raise UserError(f"{found.what}: --streaming reads whole splits, not '{source.split}'")
    parts = found.parts(names)
    first = list[Row]()
    reason = "the data set is empty"
    for batch in raw_batches(parts, ALL):
        first += [row for row in batch.rows if isinstance(row, dict)]
        if len(first) >= FIRST_ROWS:
            break
        if not first and batch.rows:
            reason = f"none of its rows can be read; the first: {batch.origins[0]} {batch.rows[0]}"
    if not first:
        raise UserError(f"{source.flag} {source.spec}: {reason}")
    return parts, first[:FIRST_ROWS]


def start_stream(sources: list[StreamSource], step: StepData) -> StreamedRows:
    """Start to read the data sets, and wait for the first chunk."""
    if len(sources) > 1:
        weights = " : ".join(f"{source.weight:g} {source.name}" for source in sources)
        logger().info(
            "data: stream: each row comes from one of several data sets in the proportion"
            f" {weights}"
        )
    content = "\0".join(part.content for source in sources for part in source.parts)
    features = Features({**features_of(step), "source": Value("int32")})
    identity = hashlib.sha256(content.encode()).hexdigest()
    rows = StreamedRows(sources, step.flags.streaming_rows or 0, features, identity)
    if {code.words for code in Fitted}.intersection(rows.counts) == {Fitted.ANSWER_CUT.words}:
        raise UserError(f"--data_path: every answer is cut by --max_seq_len {step.limit}; raise it")
    return rows


def tokens_of(batch: Batch, settings: TokeniseSettings) -> Tokens:
    """See `StreamSource.tokenise`."""
    found = tokenise_batch(batch.rows, batch.origins, settings)
    names = list(features_of(settings.step))
    problems = [row["problem"] for row in found if row["fitted"] == Fitted.UNUSABLE]
    made = [row for row in found if row["fitted"] != Fitted.UNUSABLE]
    counts = Counter(Fitted(row["fitted"]).words for row in made)
    counts += Counter(
        {
            NOTHING: len(batch.rows) - len({row["row_index"] for row in found}),
            UNUSABLE: len(problems),
        }
    )
    counts += Counter(
        remark for row in made for remark in (row["remark"] or "").split("\n") if remark
    )
    kept = [{name: row[name] for name in names} for row in made if row["fitted"] != Fitted.DROPPED]
    return kept, counts, problems[0] if problems else ""
