"""Token rows of a stream, made from raw rows in their order, from any saved position on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch

from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data.bad_lines import BadLines, too_many, way_out
from dschat_ppo.data.parts import Part, Row, read_part
from dschat_ppo.errors import UserError

READ, UNUSABLE, DUPLICATES = "raw rows", "that cannot be used", "that repeat another row of the chunk"
SPLIT_ROWS = 1000  # raw rows that `--data_split` divides at a time
_SPLIT_USE = 2  # separates these draws from others with `SPLIT_SEED`
_PIECE_ROWS = 1000  # at most
Position = dict[str, Any]  # in values that JSON can hold
START: Position = {"part": 0, "number": 0, "place": None}  # before the first raw row of a data set


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

    def includes(self, first: int, count: int) -> list[bool]:
        """Whether each of the raw rows `first .. first + count - 1` (from 0) belongs to the step."""
        start, end = self.bounds
        if end - start in (0, SPLIT_ROWS):
            return [end > start] * count
        found: list[bool] = []
        for block in range(first // SPLIT_ROWS, (first + count - 1) // SPLIT_ROWS + 1):
            order = torch.randperm(SPLIT_ROWS, generator=shared_generator(self.seed, _SPLIT_USE, block)).tolist()
            chosen = set(order[start:end])
            numbers = range(max(first, block * SPLIT_ROWS), min(first + count, (block + 1) * SPLIT_ROWS))
            found += [number % SPLIT_ROWS in chosen for number in numbers]
        return found


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
            mine = share.includes(number, len(rows)) if share and rows else [True] * len(rows)
            number += len(rows)
            kept = [index for index, is_mine in enumerate(mine) if is_mine]
            origins = [f"{part.name}, row {numbers[index]}" for index in kept]
            problem = bad.first and f"{part.name}, {bad.first}"
            after = {"part": part_number + has_ended, "number": number, "place": place}
            yield RawBatch(origins, [rows[index] for index in kept], bad.count, problem, after)
            bad.forget()


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
class ChunkEnd:
    """What was done to the raw rows of a chunk, problems of some of them, and the position after it."""

    counts: dict[str, int]
    problems: list[str]
    position: Position


@dataclass(frozen=True)
class Piece:
    """Some token rows, perhaps none, in their order. `end` is set on the last piece of a chunk."""

    rows: pa.Table
    end: ChunkEnd | None = None


class _Reader:
    """Reads one source: `next(rows)` is its next token row, or {} if a batch of raw rows gave none. `position` is the
    place of that row: a batch of raw rows, and how many of its token rows are used."""

    def __init__(self, source: StreamSource, position: Position):
        self.source = source
        self.position = position
        self.counts: Counter[str] = Counter()  # of the raw rows read for this chunk
        self.problem = ""  # of the first unusable one
        self.rows = self._read()

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
            if not tokens.rows:
                yield {}
            before, used = batch.after, 0

    def end_chunk(self) -> str:
        """The first problem in the chunk, or "". `UserError` if `--bad_rows` refuses so many unusable rows."""
        bad, rows, problem = self.counts[UNUSABLE], self.counts[READ], self.problem
        if too_many(bad, rows, self.source.bad_rows):
            hint = way_out(bad, rows, self.source.bad_rows)
            raise UserError(f"{self.source.name}: {bad} of {rows} rows cannot be used{hint}. The first: {problem}")
        self.counts.clear()
        self.problem = ""
        return problem


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
    rows, seen = list[Row](), set[int]()
    number, begin = first, first
    while number < num_rows:
        source = neediest(weights, taken)
        row = next(readers[source].rows, None)
        if row is None:
            readers[source].end_chunk()  # the better reason, if there is one
            raise UserError(_ended(sources, source, taken[source], number, num_rows))
        if row:
            rows.append(row | {"source": source})
            seen.add(hash((tuple(row["prompt_ids"]), *map(tuple, row["answers"]))))
            taken[source] += 1
            number += 1
        end = None
        if row and (number % chunk_rows == 0 or number == num_rows):
            counts = sum((reader.counts for reader in readers), Counter[str]())
            counts += Counter({DUPLICATES: number - begin - len(seen)})
            problems = [problem for reader in readers if (problem := reader.end_chunk())]
            after = {"sources": [reader.position for reader in readers], "taken": list(taken)}
            end = ChunkEnd(dict(counts), problems, after)
            seen, begin = set(), number
        if end or not row or len(rows) == _PIECE_ROWS:
            yield Piece(pa.Table.from_pylist(rows, schema), end)
            rows = []


def neediest(weights: Sequence[float], taken: Sequence[int]) -> int:
    """The source whose number of rows is furthest below its share of the rows so far and the next one."""
    rows = (sum(taken) + 1) / sum(weights)
    lacking = [weight * rows - count for weight, count in zip(weights, taken, strict=True)]
    return lacking.index(max(lacking))


def _ended(sources: Sequence[StreamSource], source: int, taken: int, rows: int, num_rows: int) -> str:
    """The message for a source without further rows after `rows` rows of the stream."""
    what = f"--streaming_rows {num_rows}: {sources[source].name} has only {taken} rows for this step"
    if rows == 0:
        return f"{what}: --data_split leaves it none, or --truncation drops all"
    if len(sources) > 1:
        what += f", enough for {rows} rows of the mixture"
    return (
        f"{what}; set --streaming_rows {rows} or less (a run that has begun resumes from its newest checkpoint "
        "with this value and --resume_force True)"
    )
