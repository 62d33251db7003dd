"""Which rows of each data set a step uses, and in which order: the step's part, held-out rows, and mixtures of sets.
All are row numbers in arrays, equal on every rank and after a resume: they depend on counts and seeds alone."""

from __future__ import annotations

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
    """The parts with the rows that an epoch has of each: all of them as often as they fit, then a random remainder in
    the order of the file. Data sets with a weight share the sum of their sizes in proportion to their weights, rounded
    so that the total is exact; `@ROWS` sets a number; all others are used once."""
    used = [len(part.order) if part.source.samples is None else part.source.samples for part in parts]
    weighted = [place for place, part in enumerate(parts) if part.source.weight is not None]
    weights = [float(parts[place].source.weight or 0) for place in weighted]
    total, before = sum(len(parts[place].order) for place in weighted), 0
    for number, place in enumerate(weighted, start=1):
        bound = round(total * sum(weights[:number]) / sum(weights))
        used[place], before = bound - before, bound
    mixed = []
    for number, (part, count) in enumerate(zip(parts, used, strict=True)):
        there = len(part.order)
        whole, rest = divmod(count, there)
        chosen = torch.randperm(there, generator=shared_generator(SPLIT_SEED, _MIX, number))[:rest].sort().values
        mixed.append(replace(part, order=np.concatenate([*[part.order] * whole, part.order[chosen.numpy()]])))
        if len(parts) > 1 or count != there:
            share = f"{count} rows of an epoch ({100 * count / sum(used):.1f} %)"
            logger().info(f"data: {part.source.spec}: {share}, {count / there:.2f} times its {there}")
    return mixed


def joined(parts: list[Part]) -> tuple[Dataset, tuple[str, ...]]:
    """The rows of the parts in their order, with the column `source`; memory-mapped apart from that and the order. And
    the names of the data sets that this column numbers."""
    names = tuple(dict.fromkeys(part.source.name for part in parts))
    if not parts:
        return Dataset.from_dict({}), names
    tables, orders, before = [], [], 0
    for part in parts:
        source = np.full(len(part.rows), names.index(part.source.name), dtype=np.int32)
        tables.append(part.rows.add_column("source", source, feature=Value("int32")))
        orders.append(part.order + before)
        before += len(part.rows)
    order = np.concatenate(orders)
    rows = datasets.concatenate_datasets(tables)
    return (rows if np.array_equal(order, np.arange(len(rows))) else rows.select(order)), names
