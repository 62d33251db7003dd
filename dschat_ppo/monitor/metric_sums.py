"""Means, maxima and moments over tokens or rows of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dschat_ppo.common.dist import all_reduce


class MetricSums:
    """Sums up this rank's part of some metrics; `reduce` makes them exact over all ranks.

    Means are weighted by what was counted (tokens, rows), not averaged over ranks or micro-batches. Every rank must
    add the same names.
    """

    def __init__(self) -> None:
        self._means: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add_mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Count `values`, of any shape, into the mean `name`; with a `mask` (bool, alike) those where it is True."""
        kept = values if mask is None else values[mask]
        self.add_sum(name, kept.sum(dtype=torch.float64), kept.new_tensor(kept.numel(), dtype=torch.float64))

    def add_sum(self, name: str, total: Tensor, count: Tensor) -> None:
        """Count a sum over `count` things (both scalars) into the mean `name`."""
        part = torch.stack([total.detach().double(), count.double()])
        self._means[name] = self._means.get(name, torch.zeros_like(part)) + part

    def add_max(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Count `values` into the maximum `name`, as `add_mean` into the mean."""
        kept = (values if mask is None else values[mask]).detach().double()
        part = kept.max() if kept.numel() else kept.new_tensor(-math.inf)
        self._maxima[name] = torch.maximum(self._maxima.get(name, part), part)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """This rank's part so far, on the CPU; see `restored`."""
        parts = {"means": self._means, "maxima": self._maxima}
        return {kind: {name: value.cpu() for name, value in named.items()} for kind, named in parts.items()}

    @classmethod
    def restored(cls, states: Sequence[dict[str, dict[str, Tensor]]], device: torch.device) -> MetricSums:
        """The parts of some ranks, from `state_dict`, in one: sums are added, maxima compared."""
        merged = cls()
        for state in states:
            part = cls()
            part._means = {name: value.to(device) for name, value in state["means"].items()}
            part._maxima = {name: value.to(device) for name, value in state["maxima"].items()}
            merged.merge(part)
        return merged

    def emptied(self) -> MetricSums:
        """The same names with nothing counted under them: beside other ranks' parts it changes no value."""
        empty = MetricSums()
        empty._means = {name: torch.zeros_like(part) for name, part in self._means.items()}
        empty._maxima = {name: torch.full_like(part, -math.inf) for name, part in self._maxima.items()}
        return empty

    def merge(self, other: MetricSums) -> None:
        """Count everything that was counted into `other`."""
        for name, part in other._means.items():
            self._means[name] = self._means.get(name, torch.zeros_like(part)) + part
        for name, part in other._maxima.items():
            self._maxima[name] = torch.maximum(self._maxima.get(name, part), part)

    def only(self, name: str) -> MetricSums:
        """What was counted under this name alone."""
        part = MetricSums()
        part._means = {key: value for key, value in self._means.items() if key == name}
        part._maxima = {key: value for key, value in self._maxima.items() if key == name}
        return part

    def reduce(self) -> dict[str, float]:
        """Name -> value over all ranks; 0 for a name under which nothing was counted. Collective."""
        result: dict[str, float] = {}
        if self._means:
            names = sorted(self._means)
            total = all_reduce(torch.stack([self._means[name] for name in names]))
            result |= {name: _ratio(*row) for name, row in zip(names, total.tolist(), strict=True)}
        if self._maxima:
            names = sorted(self._maxima)
            largest = all_reduce(torch.stack([self._maxima[name] for name in names]), "max")
            result |= {name: _finite(value) for name, value in zip(names, largest.tolist(), strict=True)}
        return result


def _ratio(total: float, count: float) -> float:
    return total / count if count else 0.0


def _finite(value: float) -> float:
    return 0.0 if value == -math.inf else value


def moments(values: Tensor) -> tuple[float, float]:
    """(mean, population standard deviation) of a tensor's elements; (0, 0) if it has none."""
    if values.numel() == 0:
        return 0.0, 0.0
    exact = values.double()
    return float(exact.mean()), float(exact.std(correction=0))


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """`1 - var(returns - values) / var(returns)`; 0 where the returns do not vary.

    Args:
        values: (n,) predictions.
        returns: (n,) targets.
    """
    if returns.numel() == 0:
        return 0.0
    spread = returns.double().var(correction=0)
    if spread == 0:
        return 0.0
    return float(1 - (returns - values).double().var(correction=0) / spread)
