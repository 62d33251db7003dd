"""Data sets as the flags name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dschat_ppo.config.data_flags import DataFlags


@dataclass(frozen=True)
class DataSource:
    """One data set.

    Attributes:
        spec: as the user wrote it, for messages.
        flag: the flag that names it.
        location: a file, a folder or a hub name.
        config: configuration on the hub, or None.
        split: the training split, or None.
        name: short and unique, for metrics and `data_source`.
        weight: share of the rows of an epoch relative to other data sets with a weight, or None.
        samples: number of rows of an epoch, or None.
    """

    spec: str
    flag: str
    location: str
    config: str | None = None
    split: str | None = None
    name: str = ""
    weight: float | None = None
    samples: int | None = None


def parse_sources(specs: Sequence[str], flag: str, flags: DataFlags) -> list[DataSource]:
    """The data sets that one flag names."""
    found = []
    for spec in specs:
        location, weight, samples = spec, None, None
        if not Path(spec).exists():
            if "@" in spec:
                location, _, text = spec.rpartition("@")
                samples = int(text)
            elif ":" in spec:
                location, _, text = spec.rpartition(":")
                weight = float(text)
        found.append(DataSource(spec, flag, location, None, None, Path(location).stem, weight, samples))
    return found
