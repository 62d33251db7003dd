"""`--streaming`: training rows that are read and tokenised while the run trains, for data larger than the disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, Features

from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.logging import logger
from dschat_ppo.data.cache import cached_dataset
from dschat_ppo.data.chunk_reader import ChunkReader, wait_until_ready, want
from dschat_ppo.data.chunks import ChunkMaker, StreamSource, entry_key, read_state

CHUNK_ROWS = 20_000  # token rows that are prepared, and shuffled, together


class StreamedRows:
    """Token rows of a stream: `len(rows)`, `rows[i]` and `rows[[i, j]]` as for a `Dataset`.

    Row i is in chunk i // `chunk_rows`. A chunk is made when a rank first needs it, or ahead of that while the chunk
    before is used. Only chunk 0 and the chunks near the one in use are on the disk, so rows are to be used in the order
    of `batches.order_of`. `fingerprint` identifies the rows by what they are made from.
    """

    def __init__(
        self, root: str | None, home: Path, num_rows: int, chunk_rows: int, column_names: list[str], fingerprint: str
    ):
        self.chunk_rows = chunk_rows
        self.column_names = column_names
        self.fingerprint = fingerprint
        self._root = root
        self._home = home
        self._num_rows = num_rows
        self._open: dict[int, Dataset] = {}
        self._is_used = False  # training has begun

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int | slice | Sequence[int]) -> dict[str, Any]:
        """One row, or the columns of several. `UserError` if the stream has fewer, or a row of the chunk is bad."""
        if isinstance(index, int):
            return self._row(index)
        numbers = range(*index.indices(len(self))) if isinstance(index, slice) else index
        rows = [self._row(number) for number in numbers]
        return {name: [row[name] for row in rows] for name in self.column_names}

    def first_chunk(self, may_stop: bool = False) -> Dataset:
        """The rows of chunk 0. A stop request ends the wait for them (`StopRequested`) only if `may_stop`."""
        if 0 not in self._open:
            want(self._home, dist.local_rank(), 0, 0)
            self._open[0] = self._wait_and_open(0, may_stop)
        return self._open[0]

    def counts_of_first_chunk(self) -> dict[str, int]:
        """What was done with the raw rows of chunk 0 -> number of rows."""
        state = read_state(self._home, 0, self._count(0))
        return {} if state is None else dict(state["counts"])

    def _row(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._num_rows:
            raise IndexError(index)
        chunk, inside = divmod(index, self.chunk_rows)
        if chunk not in self._open or not self._is_used:
            self._is_used = True
            last = min(chunk + 1, (self._num_rows - 1) // self.chunk_rows)
            want(self._home, dist.local_rank(), chunk, last)
        if chunk not in self._open:
            rows = self._wait_and_open(chunk, may_stop=False)
            self._open = {number: self._open[number] for number in (0, chunk - 1) if number in self._open}
            self._open[chunk] = rows
        return dict(self._open[chunk][inside])

    def _count(self, chunk: int) -> int:
        return min(self.chunk_rows, self._num_rows - chunk * self.chunk_rows)

    def _wait_and_open(self, chunk: int, may_stop: bool) -> Dataset:
        count = self._count(chunk)
        while True:
            wait_until_ready(self._home, chunk, may_stop)
            try:
                rows = cached_dataset(self._root, entry_key(self._home.name, chunk, count), _raise_deleted)
            except _ChunkDeletedError:
                continue
            break
        heartbeat()
        state = read_state(self._home, chunk, count)
        if state is not None and dist.is_main():
            self._log(chunk, count, state)
        return rows

    def _log(self, chunk: int, count: int, state: dict[str, Any]) -> None:
        first = chunk * self.chunk_rows
        if state["restarted"]:
            logger().warning(
                f"data: the position of the stream after row {first} was not saved, so it was read from its start"
            )
        done = ", ".join(f"{number} {what}" for what, number in state["counts"].items())
        done = done or "read together with the rows before"
        logger().info(f"data: stream: rows {first + 1} to {first + count} of {self._num_rows}: {done}")
        for problem in state["problems"]:
            logger().warning(f"data: skipped: {problem}")


class _ChunkDeletedError(Exception):
    """The reader deleted a chunk between its announcement and its use."""


def _raise_deleted(_folder: Path) -> Dataset:
    raise _ChunkDeletedError


def start_stream(
    root: str | None, key: str, sources: Sequence[StreamSource], num_rows: int, features: Features, fingerprint: str,
    chunk_rows: int | None = None,
) -> StreamedRows:  # fmt: skip
    """Start the reader of this node, and wait for the first chunk. Collective.

    Args:
        root: folder of the cache; None for that of `datasets`.
        key: identifies the rows and how they are prepared, for the names in the cache.
        num_rows: rows of an epoch.
        features: columns of the token rows, with `source`.
        fingerprint: identifies the rows by what they are made from.
        chunk_rows: rows of a chunk; not given: `CHUNK_ROWS`.
    """
    home, chunk_rows = "", chunk_rows or CHUNK_ROWS
    if dist.local_rank() == 0:
        base = Path(root or datasets.config.HF_DATASETS_CACHE).expanduser() / "dschat_ppo"
        reader = ChunkReader.in_free_folder(lambda number: base / f"stream_{key}_{number}")
        reader.start(partial(ChunkMaker, root, reader.home.name, reader.home, sources, num_rows, chunk_rows, features))
        home = str(reader.home)
    home = dist.gather_objects(home)[dist.rank() - dist.local_rank()]
    rows = StreamedRows(root, Path(home), num_rows, chunk_rows, list(features), fingerprint)
    rows.first_chunk(may_stop=True)
    return rows
