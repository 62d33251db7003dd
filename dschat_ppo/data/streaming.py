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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, DatasetInfo, Features
from datasets.table import InMemoryTable

from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import make_folder
from dschat_ppo.common.heartbeat import heartbeat, on_heartbeat
from dschat_ppo.common.logging import logger
from dschat_ppo.data.stream_pieces import ChunkEnd, Piece, Position, StreamSource, pieces, start_of
from dschat_ppo.errors import StorageError, UserError, in_one_line
from dschat_ppo.runtime.processes import signal_when_parent_ends
from dschat_ppo.runtime.stop_requests import raise_if_stop_requested

CHUNK_ROWS = 20_000  # token rows that are shuffled together
_POLL_SECONDS = 0.1
_ENDED = (
    "the process that reads the stream has ended, most often because memory ran out (its own message, if any, is "
    "above); run the same command again to resume from the newest checkpoint"
)


class StreamedRows:
    """Token rows of a stream: `len(rows)`, `rows[i]` and `rows[[i, j]]` as for a `Dataset`.

    Row i is in chunk i // `chunk_rows`. Chunk 0, the one in use and the one before are in memory, so rows are to be
    used in the order of `batches.order_of`. `fingerprint` identifies the rows by what they are made from.

    Args:
        home: folder of the saved positions. They depend on nothing but the rows, so runs may share it.
        sources, num_rows, features: data sets, rows of an epoch, and columns of the token rows.
    """

    def __init__(
        self, home: Path, sources: Sequence[StreamSource], num_rows: int, features: Features, fingerprint: str
    ):
        self.chunk_rows = CHUNK_ROWS
        self.column_names = list(features)
        self.fingerprint = fingerprint
        self.counts: dict[str, int] = {}  # what was done with the raw rows of chunk 0
        self._home = home
        self._num_rows = num_rows
        self._features = features
        self._start = start_of(sources)
        self._chunks: dict[int, Dataset] = {}
        self._next = -1  # the chunk that the process makes next
        self._pipe, other_end = multiprocessing.Pipe()
        schema = features.arrow_schema
        self.process = multiprocessing.get_context("fork").Process(
            target=_serve,
            args=(other_end, self._pipe, partial(pieces, sources, num_rows, self.chunk_rows, schema)),
            daemon=True,
        )
        self.process.start()
        other_end.close()
        atexit.register(self.process.kill)  # before `multiprocessing` waits for it: it ignores SIGTERM
        self._use(0, may_stop=True)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int | slice | Sequence[int]) -> dict[str, Any]:
        """One row, or the columns of several. `UserError` if the stream has fewer, or a row of the chunk is bad."""
        if isinstance(index, int):
            if not 0 <= index < self._num_rows:
                raise IndexError(index)
            return dict(self._use(index // self.chunk_rows)[index % self.chunk_rows])
        numbers = range(*index.indices(len(self))) if isinstance(index, slice) else index
        rows = [self[number] for number in numbers]
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
            if 0 < chunk == (self._num_rows - 1) // self.chunk_rows:
                self._go_to(1)  # of the next epoch
        return self._chunks[chunk]

    def _go_to(self, chunk: int) -> None:
        """Let the process begin at a chunk, or at the last one before it whose position is saved."""
        self._next, position = 0, self._start
        for number in range(chunk, 0, -1):
            if (found := _saved(self._file_of(number), len(self._start["taken"]))) is not None:
                self._next, position = number, found
                break
        if self._next < chunk and dist.is_main():
            row, start = chunk * self.chunk_rows, self._next * self.chunk_rows
            logger().warning(
                f"data: the position of the stream after row {row} was not saved, so it is read again from row {start}"
            )
        self._send((self._next * self.chunk_rows, position))

    def _receive(self, may_stop: bool) -> Dataset:
        """The rows of the next chunk; the position after it is saved."""
        tables, end = list[pa.Table](), None
        while end is None:
            self._send(None)
            while may_stop and not self._pipe.poll(_POLL_SECONDS):
                raise_if_stop_requested("prepared the data")
            try:
                found: Piece | UserError = self._pipe.recv()
            except (EOFError, OSError):
                if may_stop:  # the signal that stops the run may reach the process before it ignores signals
                    raise_if_stop_requested("prepared the data")
                raise UserError(_ENDED) from None
            heartbeat()
            if isinstance(found, UserError):
                self._next = -1
                raise found
            tables.append(found.rows)
            end = found.end
        chunk, self._next = self._next, self._next + 1
        table = InMemoryTable(pa.concat_tables(tables))
        rows = Dataset(table, info=DatasetInfo(features=self._features), fingerprint=f"{self._home.name}_{chunk}")
        if chunk == 0:
            self.counts = end.counts
        self._note(chunk, len(rows), end)
        return rows

    def _note(self, chunk: int, count: int, end: ChunkEnd) -> None:
        """Log what was done, and save the position after the chunk."""
        first = chunk * self.chunk_rows
        if dist.is_main():
            done = ", ".join(f"{number} {what}" for what, number in end.counts.items())
            done = done or "read together with the rows before"
            logger().info(f"data: stream: rows {first + 1} to {first + count} of {self._num_rows}: {done}")
            for problem in end.problems:
                logger().warning(f"data: skipped: {problem}")
        path = self._file_of(chunk + 1)
        if dist.local_rank() == 0 and count == self.chunk_rows and _saved(path, len(self._start["taken"])) is None:
            try:
                draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # other runs and machines may write it too
                draft.write_text(json.dumps(end.position), encoding="utf-8")
                os.replace(draft, path)
            except OSError as problem:
                raise StorageError(f"{path}: cannot be written ({in_one_line(problem)})") from None

    def _file_of(self, chunk: int) -> Path:
        """The file with the position before a chunk."""
        return self._home / f"before_{chunk:06d}.json"

    def _send(self, order: tuple[int, Position] | None) -> None:
        try:
            self._pipe.send(order)
        except OSError:
            raise UserError(_ENDED) from None


def _serve(pipe: Connection, other_end: Connection, pieces_from: Callable[[int, Position], Iterator[Piece]]) -> None:
    """Body of the process: make pieces ahead, and answer the rank. DeepSpeed's launcher sends SIGTERM to all its
    descendants; the rank still needs the rows of its last step then, so the process ignores it, and ends with the
    rank."""
    other_end.close()  # so that the pipe ends with the rank
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal_when_parent_ends(signal.SIGKILL)
    on_heartbeat(None)  # its timer belongs to the rank
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of the tokenizer do not survive a fork
    made: Iterator[Piece | UserError] = iter(())
    ready: deque[Piece | UserError] = deque()
    while True:
        # a chunk ahead; a piece without rows counts as one
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
    return max(1, len(piece.rows)) if isinstance(piece, Piece) else 1


def _or_problem(made: Iterator[Piece]) -> Iterator[Piece | UserError]:
    try:
        yield from made
    except UserError as problem:
        yield problem


def _saved(path: Path, sources: int) -> Position | None:
    """A saved position in this many sources; None if there is none, or the file is damaged."""
    try:
        position = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    lists = [position.get(name) for name in ("sources", "taken")] if isinstance(position, dict) else []
    return position if lists and all(isinstance(one, list) and len(one) == sources for one in lists) else None


def start_stream(
    root: str | None, key: str, sources: Sequence[StreamSource], num_rows: int, features: Features, fingerprint: str
) -> StreamedRows:
    """Start to read a stream, and wait for its first chunk.

    Args:
        root: folder of prepared data; None for that of `datasets`.
        key: identifies the rows and how they are prepared.
        num_rows: rows of an epoch.
        features: columns of the token rows, with `source`.
        fingerprint: identifies the rows by what they are made from.
    """
    home = Path(root or datasets.config.HF_DATASETS_CACHE).expanduser() / "dschat_ppo" / f"stream_{key}_{CHUNK_ROWS}"
    try:
        make_folder(home)
    except OSError as problem:
        raise UserError(
            f"{home}: cannot be written ({problem.strerror}), and positions in the data are stored there; name another "
            "folder with --data_output_path"
        ) from None
    return StreamedRows(home, sources, num_rows, features, fingerprint)


def rows_at_hand(rows: Dataset | StreamedRows) -> Dataset:
    """All rows, or of a stream those of its first chunk."""
    return rows._use(0) if isinstance(rows, StreamedRows) else rows
