"""Raw rows of one data set, read in their order as they are needed, from any saved position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data.bad_lines import BadLines
from dschat_ppo.data.parts import Batch, Part, Row, read_part

SPLIT_ROWS = 1000  # raw rows that `--data_split` divides at a time
_SPLIT_USE = 2  # separates these draws from others with `SPLIT_SEED`
START: dict[str, Any] = {"part": 0, "number": 0, "place": None}  # position before the first row


@dataclass(frozen=True)
class RawBatch:
    """Some rows of a stream that belong to this step, "FILE, row N" of each, how many lines between them are left out
    because they cannot be read, and the problem of the first one, or ""."""

    origins: list[str]
    rows: list[Row]
    unreadable: int = 0
    problem: str = ""


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


class RawStream:
    """Reads the rows of one data set, batch by batch: of all its parts, or those of `share` alone. `position` is the
    place after the last batch, for `seek`, in values that JSON can hold. `skip` leaves out lines that cannot be read;
    otherwise they are an error."""

    def __init__(self, parts: Sequence[Part], share: StepShare | None, skip: bool = False):
        self._parts = parts
        self._share = share
        self._bad = BadLines(skip)
        self._batches: Iterator[Batch] | None = None
        self.position = START

    def batch(self) -> RawBatch | None:
        """The next batch, without rows if all belong to other steps; None at the end."""
        while (number := self.position["part"]) < len(self._parts):
            part = self._parts[number]
            if self._batches is None:
                self._batches = read_part(part, self._bad, self.position["place"])
            found = next(self._batches, None)
            unreadable, problem = self._bad.count, self._bad.first and f"{part.name}, {self._bad.first}"
            self._bad.forget()
            first = self.position["number"]
            if found is None:
                self._batches = None
                self.position = {"part": number + 1, "number": first, "place": None}
                if unreadable:
                    return RawBatch([], [], unreadable, problem)
                continue
            self.position = {"part": number, "number": first + len(found.rows), "place": found.place}
            mine = [True] * len(found.rows)
            if self._share is not None and found.rows:
                mine = self._share.includes(first, len(found.rows))
            kept = [i for i, is_mine in enumerate(mine) if is_mine]
            origins = [f"{part.name}, row {found.numbers[i]}" for i in kept]
            return RawBatch(origins, [found.rows[i] for i in kept], unreadable, problem)
        return None

    def seek(self, position: dict[str, Any]) -> None:
        """Read on from a `position` of a stream of the same parts."""
        self._batches, self.position = None, position
