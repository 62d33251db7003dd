"""Token rows that are read and tokenised while the run trains, for data larger than the disk.

A process makes chunks of token rows, one ahead of its use. Every chunk comes with the position in
the data after it, and checkpoints hold these positions, so that a resumed run reads on from the
chunk in use.
"""

from __future__ import annotations

import atexit
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
from datasets import Dataset, Features
from datasets.table import InMemoryTable

from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.logging import logger
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.common.stop_requests import raise_if_stop_requested, reset
from dschat_ppo.data.examples import SPLIT_SEED
from dschat_ppo.data.shards import Batch, Raw, Row, Shard, read_shard
from dschat_ppo.data.tokenise import DOING, refuse_bad
from dschat_ppo.errors import UserError

CHUNK_ROWS = 20_000  # token rows that are shuffled together
SPLIT_ROWS = 1000  # raw rows that `--data_split` divides at a time
ALL = (0, SPLIT_ROWS)  # the share of a step that uses all of them
# what the log counts, beside the words of `Fitted`
READ = "raw rows"
UNUSABLE = "that cannot be used"
NOTHING = "without a sample for this step (as bad answers in SFT)"
_SPLIT_USE = 2  # separates these draws from others with `SPLIT_SEED`
Tokens = tuple[list[Row], Counter[str], str]
Position = dict[str, Any]  # of numbers, texts, lists and dicts, which every checkpoint can hold
# before the first raw row of a data set
START: Position = {"shard": 0, "row_index": 0, "offset": None}


# Raw rows


@lru_cache(8)
def offsets_of_step(share: tuple[int, int], block: int) -> frozenset[int]:
    """The offsets in a block of `SPLIT_ROWS` raw rows that belong to a step: those from `share[0]`
    to `share[1]` of a random order, which every step and run sees alike."""
    generator = shared_generator(SPLIT_SEED, _SPLIT_USE, block)
    order = torch.randperm(SPLIT_ROWS, generator=generator).tolist()
    return frozenset(order[slice(*share)])


def raw_batches(
    shards: Sequence[Shard], share: tuple[int, int], position: Position = START
) -> Iterator[Batch]:
    """The raw rows of a step from `position` on; the `end` of a batch is the position after it."""
    row_index = position["row_index"]
    offset_in_shard = position["offset"]
    for shard_index in range(position["shard"], len(shards)):
        for batch in read_shard(shards[shard_index], offset_in_shard):
            origins = list[str]()
            rows = list[Raw]()
            for origin, row in zip(batch.origins, batch.rows, strict=True):
                block, offset = divmod(row_index, SPLIT_ROWS)
                if offset in offsets_of_step(share, block):
                    origins.append(origin)
                    rows.append(row)
                row_index += 1
            after = {"shard": shard_index, "row_index": row_index, "offset": batch.end}
            yield Batch(origins, rows, after)
        offset_in_shard = None


# Token rows


@dataclass(frozen=True)
class StreamSource:
    """One data set of a stream."""

    name: str
    weight: float  # its share of the rows, relative to the other data sets
    shards: Sequence[Shard]
    share: tuple[int, int]  # see `offsets_of_step`
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
    """The position before the first token row of a stream: for each source that of its `Reader`,
    and how many token rows are taken from it."""
    return {
        "sources": [{"before": START, "used": 0} for _ in sources],
        "taken": [0 for _ in sources],
    }


class Reader:
    """Reads one data set of a stream.

    Attributes:
        source: The data set.
        position: Behind the token row that it gave last: the position `before` a batch of raw rows,
            and how many token rows from there on are `used`. Reading from there may divide the raw
            rows into other batches.
        counts: What was done to the raw rows since the last chunk.
        problem: What is wrong with the first bad row since then, or "".
    """

    def __init__(self, source: StreamSource, position: Position):
        self.source = source
        self.position = position
        self.counts = Counter[str]()
        self.problem = ""

    def rows(self) -> Iterator[Row | None]:
        """Token rows, and None before those of each batch of raw rows."""
        before = self.position["before"]
        used = self.position["used"]
        for batch in raw_batches(self.source.shards, self.source.share, before):
            rows, counts, problem = self.source.tokenise(batch)
            if not used:  # otherwise a chunk before has counted the rows
                self.counts += counts + Counter({READ: len(batch.rows)})
                self.problem = self.problem or problem
            yield None
            for offset in range(used, len(rows)):
                self.position = {"before": before, "used": offset + 1}
                yield rows[offset]
            before = batch.end
            used = max(0, used - len(rows))


def chunks(
    sources: Sequence[StreamSource],
    num_rows: int,
    features: Features,
    first: int,
    position: Position,
) -> Iterator[Chunk | None]:
    """The chunks of a stream of `num_rows` token rows from chunk `first` on, where `position` is;
    None after each batch of raw rows, so that a rank that waits sees progress.

    With several sources, each row comes from the source that lacks most to its share of the rows so
    far. `UserError` if a source has no further row, or `--bad_rows` refuses the bad rows of a
    chunk.
    """
    readers = list[Reader]()
    for source, position_in_source in zip(sources, position["sources"], strict=True):
        readers.append(Reader(source, position_in_source))
    token_rows = [reader.rows() for reader in readers]
    weights = [source.weight for source in sources]
    taken = list(position["taken"])
    rows = list[Row]()
    for row_index in range(first * CHUNK_ROWS, num_rows):
        source_index = neediest(weights, taken)
        row = None
        for row in token_rows[source_index]:
            if row is not None:
                break
            yield None
        is_end = len(rows) + 1 == CHUNK_ROWS or row_index + 1 == num_rows or row is None
        if is_end:
            _refuse_bad_rows(readers)
        if row is None:
            has = f"{sources[source_index].name} has only {taken[source_index]} rows for this step"
            way = "--data_split leaves it none, or --truncation drops all"
            if row_index:
                way = (
                    f"set --streaming_rows {row_index} or less (a run that has begun resumes from"
                    " its newest checkpoint with this value and --resume_force True)"
                )
            raise UserError(f"--streaming_rows {num_rows}: {has}; {way}")
        rows.append(row | {"source": source_index})
        taken[source_index] += 1
        if is_end:
            yield _chunk(rows, row_index, features, readers, taken)
            rows = []
            for reader in readers:
                reader.counts = Counter()
                reader.problem = ""


def _refuse_bad_rows(readers: Sequence[Reader]) -> None:
    """`UserError` if `--bad_rows` does not accept the bad rows since the last chunk."""
    for reader in readers:
        source = reader.source
        counts = reader.counts
        refuse_bad(source.name, counts[UNUSABLE], counts[READ], source.bad_rows, [reader.problem])


def _chunk(
    rows: list[Row],
    last_index: int,
    features: Features,
    readers: Sequence[Reader],
    taken: Sequence[int],
) -> Chunk:
    """The chunk that ends with row `last_index` of the stream. `taken`: how many token rows of each
    source are used up to there."""
    table = InMemoryTable(pa.Table.from_pylist(rows, features.arrow_schema))
    after = {"sources": [reader.position for reader in readers], "taken": list(taken)}
    counts = Counter[str]()
    for reader in readers:
        counts += reader.counts
    problems = [reader.problem for reader in readers if reader.problem]
    return Chunk(Dataset(table, fingerprint=f"{last_index}"), after, counts, problems)


def neediest(weights: Sequence[float], taken: Sequence[int]) -> int:
    """The source whose number of rows is furthest below its share of the rows so far and the next
    one."""
    rows = (sum(taken) + 1) / sum(weights)
    lacking = [weight * rows - count for weight, count in zip(weights, taken, strict=True)]
    return lacking.index(max(lacking))


# What a rank sees


def _send_chunks(
    chunks_of_stream: Iterator[Chunk | None], pipe: Connection, of_rank: Connection
) -> None:
    """In the process: send the chunks, and an error in place of one that cannot be made. A chunk
    waits in the pipe until the rank needs it. Signals that DeepSpeed's launcher sends to all
    descendants do not end the process: the rank still needs the rows of its last step. The end of
    the pipe does: the rank has ended, or reads from another place."""
    reset()
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    # the threads of the tokenizer do not survive a fork
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    of_rank.close()
    with pipe, suppress(BrokenPipeError):
        try:
            for chunk in chunks_of_stream:
                pipe.send(chunk)
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
        self._sources = sources
        self._features = features
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

    def first_chunk(self) -> Dataset:
        """The rows of chunk 0, which stay in memory."""
        return self._use(0)

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
                index: rows for index, rows in self._chunks.items() if index in (0, chunk - 1)
            }
            while self._next <= chunk:
                rows = self._receive(may_stop)
            self._chunks[chunk] = rows
            if 0 < chunk == (self._num_rows - 1) // CHUNK_ROWS:
                self._begin(1)  # of the next epoch
        return self._chunks[chunk]

    def _begin(self, chunk: int) -> None:
        """Let a process begin at a chunk, or at the last one before it whose position is known."""
        self._next = max(index for index in self._positions if index <= chunk)
        if self._next < chunk and dist.is_main():
            logger().warning(
                "data: the checkpoint has no position of these rows after row"
                f" {chunk * CHUNK_ROWS}, so they are read again from row {self._next * CHUNK_ROWS}"
            )
        position = self._positions[self._next]
        to_send = chunks(self._sources, self._num_rows, self._features, self._next, position)
        self._pipe, sending_end = Pipe(duplex=False)
        self.process = get_context("fork").Process(
            target=_send_chunks, args=(to_send, sending_end, self._pipe)
        )
        self.process.start()
        sending_end.close()  # the end of the process ends the pipe
        atexit.register(self.process.kill)  # before `multiprocessing` waits for it

    def _receive(self, may_stop: bool) -> Dataset:
        """The rows of the next chunk; what was done is logged. After a failure, another process
        begins."""
        index = self._next
        self._next = -1
        received: Chunk | UserError | None = None
        while received is None:  # a batch of raw rows is done
            if may_stop:
                raise_if_stop_requested(DOING)
            try:
                received = self._pipe.recv()
            except (EOFError, OSError):
                # or else the end of this rank ends it before its traceback is written
                self.process.join(5)
                raise UserError(
                    "the process that reads the stream has ended (its own message, if any, is"
                    " above), most often because memory ran out; run the same command again to"
                    " resume"
                ) from None
            heartbeat()
        if isinstance(received, UserError):
            raise received
        self._next = index + 1
        if len(received.rows) == CHUNK_ROWS:
            self._positions[self._next] = received.after
        if index == 0:
            self.counts = received.counts
        if dist.is_main():
            first = index * CHUNK_ROWS
            done = ", ".join(f"{count} {what}" for what, count in received.counts.items())
            done = done or "read together with the rows before"
            logger().info(
                f"data: stream: rows {first + 1} to {first + len(received.rows)} of"
                f" {self._num_rows}: {done}"
            )
            for problem in received.problems:
                logger().warning(f"data: skipped: {problem}")
        return received.rows
