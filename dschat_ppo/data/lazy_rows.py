"""Training rows that are at hand whole, or lazy: a feature makes them while the run trains."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

from datasets import Dataset


@runtime_checkable
class LazyRows(Protocol):
    """Token rows that are made as a run uses them, in chunks as long as the first one. They are
    used in the order of `batches.chunked_order`."""

    column_names: list[str]
    fingerprint: str  # identifies the rows by what they are made from

    def __len__(self) -> int:
        """The rows of an epoch."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row. `UserError` if it cannot be made."""

    def first_chunk(self) -> Dataset:
        """The rows that are at hand before training."""

    def state_dict(self) -> dict[str, Any]:
        """How far the data are read, for `load_state_dict`."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Read on from a saved position; None: from the start."""


TrainingRows: TypeAlias = Dataset | LazyRows


def rows_at_hand(rows: TrainingRows) -> Dataset:
    """All rows, or of lazy ones the first chunk."""
    if isinstance(rows, LazyRows):
        return rows.first_chunk()
    return rows


def position_in_data(rows: TrainingRows) -> dict[str, Any] | None:
    """How far the data of lazy rows are read, for a checkpoint; None for rows that are at hand."""
    if isinstance(rows, LazyRows):
        return rows.state_dict()
    return None


def read_on(rows: TrainingRows, position: dict[str, Any] | None) -> None:
    """Let lazy rows be made on from a position of `position_in_data`."""
    if isinstance(rows, LazyRows):
        rows.load_state_dict(position)
