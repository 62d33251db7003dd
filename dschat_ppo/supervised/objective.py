"""What a model is trained for in steps 1 and 2: batches, loss, denominator, metrics; its batches
one step ahead."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.progress import Progress
from dschat_ppo.data.batches import optimizer_steps
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.types import Model, to_device

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class UsedRows:
    """The indices of the rows that a run uses, in the order in which it does; None: all rows."""

    train: Sequence[int] | None = None
    eval: Sequence[int] | None = None


@dataclass(frozen=True)
class Objective(Generic[Batch]):
    """What the model is trained for. `prepare`, `describe` and `complete` are collective."""

    collate: Callable[[Dataset, Sequence[int]], Batch]  # (rows, indices) -> a batch on the device
    # bool mask of what the loss is a mean over: tokens (B, T), or pairs, answers (B,)
    units: Callable[[Batch], Tensor]
    # (model, batch, total, sums) -> the sum over units divided by `total`, the units of the whole
    # optimizer step; adds the batch's metrics to `sums`
    loss: Callable[[Model, Batch, Tensor, MetricSums], Tensor]
    headline: tuple[str, ...]  # names of the metrics in the log line of each step
    rows_per_sample: int = 1  # rows of a batch for each sample
    # adds derived numbers to the reduced metrics
    summary: Callable[[dict[str, float]], dict[str, float]] = dict
    # (model, rows, those that the run uses) -> rows with columns computed by the untrained model
    prepare: Callable[[Model, TokenRows, UsedRows], TokenRows] | None = None
    # (model, rows) -> entries about the trained model for its config and `result.json`
    describe: Callable[[Model, TokenRows], dict[str, float | str]] | None = None
    # (model, rows, indices) -> (len(indices), answers of a row): what the model gives each answer
    score: Callable[[Model, Dataset, Sequence[int]], Tensor] | None = None
    # (model, this rank's batches of an optimizer step, or of an evaluation) -> these with values
    # that depend on those of all ranks, without gradient
    complete: Callable[[Model, list[Batch]], list[Batch]] | None = None

    def real_rows(self, batch: Any) -> Tensor:
        """(rows,) bool, False on the rows that only fill a batch."""
        units = self.units(batch)
        if units.dim() > 1:
            units = units.any(dim=1)
        return units.repeat(self.rows_per_sample)

    def counts(self, batch: Any) -> Tensor:
        """(3,) int64: units of a batch, samples, and their tokens (prompt and answers), without
        padding."""
        real = self.real_rows(batch)
        units = self.units(batch).sum()
        samples = real.sum() // self.rows_per_sample
        return torch.stack([units, samples, batch.lengths[real].sum()])


class BuiltObjective(NamedTuple):
    """How an objective of step 2 is made, and the type of its batches."""

    build: Callable[..., Objective[Any]]  # (pad id, device, config)
    batch: type


def collator_on_device(
    collate: Callable[..., Batch], device: torch.device, *settings: object
) -> Callable[[Dataset, Sequence[int]], Batch]:
    """`collate`, `(rows, indices, *settings)` -> a batch, for batches on the device."""
    return lambda rows, indices: to_device(collate(rows, indices, *settings), device)


@torch.no_grad()
def score_rows(
    model: Model,
    rows: Dataset,
    score: Callable[[Dataset, Sequence[int]], Tensor],
    batch_size: int,
    title: str,
    order: Sequence[int] | None = None,
) -> Tensor:
    """Apply `score`, `(rows, indices)` -> (len(indices), k), to the rows with the indices `order`,
    at least one, or to every row, without dropout; the ranks divide the rows, and each gets
    (len(order), k) on the CPU, in this order. Collective."""
    if order is None:
        order = range(len(rows))
    model.eval()
    batches = list(optimizer_steps(order, batch_size, 1, dist.data_ranks(), dist.data_rank()))
    scores = []
    with Progress(title, len(batches), unit="batch") as progress:
        for [indices] in batches:
            scores.append(dist.gather_data_cat(score(rows, indices)).cpu())
            heartbeat()
            progress.advance()
    model.train()
    return torch.cat(scores)[: len(order)]  # filler rows are at the end


MicroBatches = list[list[int]]  # row numbers


def collated(
    collate: Callable[[Dataset, Sequence[int]], Batch],
    rows: Any,
    steps: Iterable[MicroBatches],
    device: torch.device,
) -> Generator[tuple[MicroBatches, Callable[[], list[Batch]]], None, None]:
    """For each step: the row numbers of its micro-batches, and a function that waits for their
    batches, or raises an error of `collate`. A thread makes the batches of the next step while the
    caller uses those before; close the generator to end it. `device`: of the batches; a thread
    whose copies go to another GPU would use both."""

    def make(micro_batches: MicroBatches) -> list[Batch]:
        return [collate(rows, indices) for indices in micro_batches]

    if device.type == "cuda":
        thread = ThreadPoolExecutor(1, "collate", torch.cuda.set_device, (device,))
    else:
        thread = ThreadPoolExecutor(1, "collate")
    previous: tuple[MicroBatches, Callable[[], list[Batch]]] | None = None
    try:
        for micro_batches in steps:
            batches = thread.submit(make, micro_batches)
            if previous is not None:
                yield previous
            previous = (micro_batches, batches.result)
        if previous is not None:
            yield previous
    finally:  # lazy rows may still be awaited, for a step that will not run
        thread.shutdown(wait=isinstance(rows, Dataset), cancel_futures=True)
