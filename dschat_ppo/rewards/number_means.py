"""Means over all ranks of the other numbers that reward functions return."""

from __future__ import annotations

import math

from torch import Tensor

from dschat_ppo.common import dist


class NumberMeans:
    """Accumulates this rank's numbers by name; ranks may have different names."""

    def __init__(self) -> None:
        self._parts: dict[str, list[float]] = {}  # name -> numbers of this rank

    def add(self, numbers: dict[str, Tensor]) -> None:
        """Add "SOURCE/NAME" -> (B,) fp64; NaN marks responses without this number."""
        for name, values in numbers.items():
            self._parts.setdefault(name, []).extend(values[~values.isnan()].tolist())

    def reduce(self) -> dict[str, float]:
        """Name -> mean over the responses of all ranks that have the number. Collective."""
        own = {name: (math.fsum(values), len(values)) for name, values in self._parts.items()}
        ranks = dist.gather_objects(own)
        means = {}
        for name in sorted({name for part in ranks for name in part}):
            sums, counts = zip(*(part[name] for part in ranks if name in part), strict=True)
            if sum(counts):
                means[name] = math.fsum(sums) / sum(counts)
        return means
