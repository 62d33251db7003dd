"""Which rows of each data set a step uses, and in which order: the step's part, held-out rows, and mixtures of sets.
All are row numbers in arrays, equal on every rank and after a resume: they depend on counts and seeds alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import datasets
import numpy as np
import torch
from datasets import Dataset, Value

from dschat_ppo.common.logging import logger
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data.sources import DataSource

SPLIT_SEED = 1234  # of `--data_split`, the held-out rows and the mixture: the same in all steps and runs
_HOLD_OUT, _MIX = 1, 2  # separate the uses of a seed


def rows_of_step(count: int, shares: tuple[float, float, float], part: int, seed: int) -> np.ndarray:
    """(N,) int64, numbers of the rows of one step: `part` 0 is SFT, 1 reward model, 2 PPO. The parts are random,
    disjoint and complete. All three steps see the same split of `count` rows, which `shares` and `seed` decide."""
    order = torch.randperm(count, generator=shared_generator(seed)).numpy()
    bounds = [round(count * sum(shares[:i]) / sum(shares)) for i in range(4)]
    return order[bounds[part] : bounds[part + 1]]


def hold_out(numbers: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split row numbers at random into (for training, held out). At least one row is held out and one is kept. Nothing
    is held out if `fraction` is 0 or there is only one row."""
    if fraction == 0 or len(numbers) < 2:
        return numbers, numbers[:0]
    count = min(len(numbers) - 1, max(1, round(len(numbers) * fraction)))
    order = torch.randperm(len(numbers), generator=shared_generator(seed, _HOLD_OUT)).numpy()
    return numbers[order[count:]], numbers[order[:count]]


@dataclass(frozen=True)
class Part:
    """Token rows of one data set that a step uses: `order` are indices of `rows`, which are in the order of the
    file."""

    source: DataSource
    rows: Dataset
    order: np.ndarray


def mix(parts: list[Part]) -> list[Part]:
    """The parts with the rows that an epoch has of each, which the log shows as a table."""
    available = [len(part.order) for part in parts]
    used = used_rows([part.source for part in parts], available)
    if len(parts) > 1 or used != available:
        logger().info(table_of([part.source.name for part in parts], available, used))
    return [
        replace(part, order=repeated(part.order, count, SPLIT_SEED, number))
        for number, (part, count) in enumerate(zip(parts, used, strict=True))
    ]


def used_rows(sources: Sequence[DataSource], available: Sequence[int]) -> list[int]:
    """How many rows of each data set an epoch has. Data sets with a weight share the sum of their sizes in proportion
    to their weights, rounded so that the total is exact. `@ROWS` sets a number. All others are used once."""
    used = [count if source.samples is None else source.samples
            for source, count in zip(sources, available, strict=True)]  # fmt: skip
    weighted = [place for place, source in enumerate(sources) if source.weight is not None]
    weights, total = [float(sources[place].weight or 0) for place in weighted], sum(available[p] for p in weighted)
    before = 0
    for number, place in enumerate(weighted, start=1):
        bound = round(total * sum(weights[:number]) / sum(weights))
        used[place], before = bound - before, bound
    return used


def repeated(rows: np.ndarray, used: int, seed: int, number: int) -> np.ndarray:
    """`used` of these (N,) row numbers, N above 0 unless `used` is 0: all of them as often as they fit, then a random
    remainder in the order of `rows`. `number` is that of the data set, so that sets of equal size draw differently."""
    if used == len(rows):
        return rows
    whole, rest = divmod(used, len(rows))
    chosen = torch.randperm(len(rows), generator=shared_generator(seed, _MIX, number))[:rest].sort().values
    return np.concatenate([*[rows] * whole, rows[chosen.numpy()]])


def joined(parts: list[Part], names: tuple[str, ...]) -> Dataset:
    """The rows of the parts in their order, with the column `source`; memory-mapped apart from that and the order."""
    if not parts:
        return Dataset.from_dict({})
    tables, orders, before = [], [], 0
    for part in parts:
        source = np.full(len(part.rows), names.index(part.source.name), dtype=np.int32)
        tables.append(part.rows.add_column("source", source, feature=Value("int32")))
        orders.append(part.order + before)
        before += len(part.rows)
    order = np.concatenate(orders)
    rows = datasets.concatenate_datasets(tables)
    return rows if np.array_equal(order, np.arange(len(rows))) else rows.select(order)


def table_of(names: Sequence[str], available: Sequence[int], used: Sequence[int]) -> str:
    """The mixture for the log, one line for each data set."""
    rows = [("data set", "rows", "used", "repeats", "share")]
    for name, there, count in zip(names, available, used, strict=True):
        repeats = f"{count / there:.2f}" if there else "-"
        rows.append((name, str(there), str(count), repeats, f"{100 * count / sum(used):.1f} %"))
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
        for name, *cells in rows
    ]
    return "data: mixture of an epoch\n" + "\n".join(f"  {line}" for line in lines)
