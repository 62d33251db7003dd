"""Chunks of a stream: token rows made from raw rows, in order, each chunk one entry of the cache. The position in the
raw rows after a chunk is saved with it, so the next chunk can be made from there by any process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features

from dschat_ppo.common.atomic_files import write_text
from dschat_ppo.data.bad_lines import too_many, way_out
from dschat_ppo.data.cache import cached_dataset
from dschat_ppo.data.parts import Row
from dschat_ppo.data.raw_stream import START, RawBatch, RawStream
from dschat_ppo.errors import UserError

READ, UNUSABLE, DUPLICATES = "raw rows", "that cannot be used", "that repeat another row of the chunk"
NOTHING = "without a sample for this step (as bad answers in SFT)"
_WRITTEN_ROWS = 1000  # at a time


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
    run). `weight` is its share of the rows, relative to the other data sets."""

    name: str
    weight: float
    raw: RawStream
    tokenise: Callable[[RawBatch], TokenBatch]
    bad_rows: str = "few"


class _TokenRows:
    """The token rows of one source, one after another."""

    def __init__(self, source: StreamSource, on_batch: Callable[[], None]):
        self.source = source
        self.counts: Counter[str] = Counter()  # of the raw rows read for this chunk
        self.problem = ""  # of the first unusable one
        self._on_batch = on_batch
        self._rows: list[Row] = []  # of the last batch
        self._used = 0
        self._before: dict[str, Any] = START  # position of that batch

    def next(self) -> Row | None:
        """The next row; None at the end."""
        while self._used == len(self._rows):
            if not self._read():
                return None
        self._used += 1
        return self._rows[self._used - 1]

    def _read(self) -> bool:
        before = self.source.raw.position
        batch = self.source.raw.batch()
        if batch is None:
            return False
        tokens = self.source.tokenise(batch) if batch.rows else TokenBatch([], {})
        self._rows, self._used, self._before = tokens.rows, 0, before
        unusable = batch.unreadable + tokens.unusable
        self.counts.update({READ: len(batch.rows) + batch.unreadable, UNUSABLE: unusable} | tokens.counts)
        self.problem = self.problem or batch.problem or tokens.problem
        self._on_batch()
        return True

    @property
    def state(self) -> dict[str, Any]:
        """The position, for `seek`: that of a batch, and how many of its rows are used."""
        if self._used == len(self._rows):
            return {"position": self.source.raw.position, "used": 0}
        return {"position": self._before, "used": self._used}

    def seek(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state`."""
        self.source.raw.seek(state["position"])
        self._rows, self._used, self._before = [], 0, state["position"]
        for _ in range(state["used"]):  # they may be in several batches now
            self.next()
        self.start_chunk()  # the chunk before counts these rows

    def start_chunk(self) -> None:
        """Count from here on."""
        self.counts.clear()
        self.problem = ""


class ChunkMaker:
    """Makes the chunks of a stream as entries of a cache.

    With several sources, each row comes from the source that lacks most to its share of the rows so far.

    Args:
        root: folder of the cache; None for that of `datasets`.
        folder, home: name of the stream's folder in it, and its path, for the saved positions.
        num_rows, chunk_rows: rows of the stream, and of a chunk; the last chunk may have fewer.
        on_batch: called after each batch of raw rows.
    """

    def __init__(
        self, root: str | None, folder: str, home: Path, sources: Sequence[StreamSource], num_rows: int,
        chunk_rows: int, features: Features, on_batch: Callable[[], None],
    ):  # fmt: skip
        self.root = root
        self.folder = folder
        self.home = home
        self.num_rows = num_rows
        self.chunk_rows = chunk_rows
        self._features = features
        self._readers = [_TokenRows(source, on_batch) for source in sources]
        self._taken = [0] * len(sources)  # rows of each source in the chunks before `_next`
        self._next = 0  # the chunk for which the readers are in place

    def provide(self, chunk: int) -> Dataset:
        """The rows of a chunk, from the cache if it is there; `UserError` if the stream ends before `num_rows` rows."""

        def make(folder: Path) -> Dataset:
            is_restarted = self._go_to(chunk)
            path = folder / "rows.arrow"
            schema = self._features.arrow_schema
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
                for rows in self._make(chunk, is_restarted):
                    writer.write_table(pa.Table.from_pylist(rows, schema))
            return Dataset.from_file(str(path))

        return cached_dataset(self.root, entry_key(self.folder, chunk, self.count(chunk)), make)

    def count(self, chunk: int) -> int:
        """Rows of a chunk."""
        return min(self.chunk_rows, self.num_rows - chunk * self.chunk_rows)

    def _go_to(self, chunk: int) -> bool:
        """Put the readers before a chunk; returns whether that took reading from the start of the stream."""
        if self._next == chunk:
            return False
        self._next, states, taken = 0, [{"position": START, "used": 0} for _ in self._readers], [0] * len(self._taken)
        for before in range(chunk - 1, -1, -1):
            found = read_state(self.home, before, self.chunk_rows)
            if found is not None:
                self._next, states, taken = before + 1, found["sources"], found["taken"]
                break
        for reader, state in zip(self._readers, states, strict=True):
            reader.seek(state)
        self._taken = taken
        is_restarted = self._next == 0 < chunk
        while self._next < chunk:
            for _ in self._make(self._next, is_restarted):
                pass
        return is_restarted

    def _make(self, chunk: int, is_restarted: bool) -> Iterator[list[Row]]:
        """The rows of the chunk before which the readers are, some at a time; save the position after it."""
        seen: set[int] = set()
        weights = [reader.source.weight for reader in self._readers]
        count, rows = self.count(chunk), list[Row]()
        for row_number in range(count):
            source = neediest(weights, self._taken)
            row = self._readers[source].next()
            if row is None:
                self._check_unusable(self._readers[source])  # the better reason, if there is one
                raise UserError(self._ended(source, chunk * self.chunk_rows + row_number))
            row = {**row, "source": source}
            rows.append(row)
            self._taken[source] += 1
            seen.add(hash((tuple(row["prompt_ids"]), *map(tuple, row["answers"]))))
            if len(rows) == _WRITTEN_ROWS:
                yield rows
                rows = []
        yield rows
        counts: Counter[str] = Counter()
        problems = [reader.problem for reader in self._readers if reader.problem]
        for reader in self._readers:
            self._check_unusable(reader)
            counts += reader.counts
            reader.start_chunk()
        counts += Counter({DUPLICATES: count - len(seen)})
        state = {
            "sources": [reader.state for reader in self._readers],
            "taken": self._taken,
            "counts": counts,
            "problems": problems,
            "restarted": is_restarted,
        }
        write_text(state_file(self.home, chunk, count), json.dumps(state))
        self._next = chunk + 1

    def _check_unusable(self, reader: _TokenRows) -> None:
        bad, rows = reader.counts[UNUSABLE], reader.counts[READ]
        if too_many(bad, rows, reader.source.bad_rows):
            hint = way_out(bad, rows, reader.source.bad_rows)
            raise UserError(
                f"{reader.source.name}: {bad} of {rows} rows cannot be used{hint}. The first: {reader.problem}"
            )

    def _ended(self, source: int, rows: int) -> str:
        """The message for a source without further rows."""
        name, taken = self._readers[source].source.name, self._taken[source]
        what = f"--streaming_rows {self.num_rows}: {name} has only {taken} rows for this step"
        if rows == 0:
            return f"{what}: --data_split leaves it none, or --truncation drops all"
        if len(self._readers) > 1:
            what += f", enough for {rows} rows of the mixture"
        return (
            f"{what}; set --streaming_rows {rows} or less (a run that has begun resumes from its newest checkpoint "
            "with this value and --resume_force True)"
        )


def neediest(weights: Sequence[float], taken: Sequence[int]) -> int:
    """The source whose number of rows is furthest below its share of the rows so far and the next one."""
    rows = (sum(taken) + 1) / sum(weights)
    lacking = [weight * rows - count for weight, count in zip(weights, taken, strict=True)]
    return lacking.index(max(lacking))


def entry_key(folder: str, chunk: int, count: int) -> str:
    """Key of a chunk of `count` rows in the cache. A last chunk that has become longer is another entry."""
    return f"{folder}/{entry_name(chunk, count)}"


def entry_name(chunk: int, count: int) -> str:
    """Name of the folder of a chunk in that of its stream."""
    return f"chunk_{chunk:06d}_{count}"


def state_file(home: Path, chunk: int, count: int) -> Path:
    """The file with the position after a chunk of `count` rows."""
    return home / f"after_{chunk:06d}_{count}.json"


def read_state(home: Path, chunk: int, count: int) -> dict[str, Any] | None:
    """The position saved after a chunk; None if there is none, or the file is damaged."""
    try:
        state = json.loads(state_file(home, chunk, count).read_bytes())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) and {"sources", "taken"} <= set(state) else None
