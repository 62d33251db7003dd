"""What a model is trained for in steps 1 and 2: batches, loss, denominator, metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from datasets import Dataset
from torch import Tensor

from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.types import Model

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Objective(Generic[Batch]):
    """What the model is trained for.

    Attributes:
        collate: `(rows, indices)` -> a batch on the device.
        count: a batch's number of units (tokens, pairs) that the loss is a mean over, a scalar tensor.
        size: a batch's number of samples, and of their tokens (prompt and answers), without padding: (2,) int64.
        loss: `(model, batch, total, sums)` -> the batch's part of the loss: its sum over units divided by `total`, the
            units of the whole optimizer step. Adds the batch's metrics to `sums`.
        real_rows: (rows,) bool, False on the rows that only fill a batch.
        summary: adds derived numbers to the reduced metrics.
        headline: names of the metrics in the log line of each step.
        prepare: `(model, rows)` -> rows with columns computed by the untrained model, or None. Collective.
        describe: `(model, rows)` -> entries about the trained model for its config and `result.json`, or None.
            Collective.
        score: `(model, rows, indices)` -> (len(indices), answers of a row): what the model gives each answer; or None.
        complete: `(model, batches)` -> this rank's batches of an optimizer step (or of a whole evaluation) with values
            that depend on those of all ranks, without gradient; or None. Collective.
    """

    collate: Callable[[Dataset, Sequence[int]], Batch]
    count: Callable[[Batch], Tensor]
    size: Callable[[Batch], Tensor]
    loss: Callable[[Model, Batch, Tensor, MetricSums], Tensor]
    real_rows: Callable[[Batch], Tensor]
    summary: Callable[[dict[str, float]], dict[str, float]]
    headline: tuple[str, ...]
    prepare: Callable[[Model, TokenRows], TokenRows] | None = None
    describe: Callable[[Model, TokenRows], dict[str, float | str]] | None = None
    score: Callable[[Model, Dataset, Sequence[int]], Tensor] | None = None
    complete: Callable[[Model, list[Batch]], list[Batch]] | None = None
