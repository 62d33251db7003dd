"""Means, maxima, moments and explained variance over the tokens or rows of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dschat_ppo.common.dist import gather_cat


class MetricSums:
    """Accumulates this rank's sums, counts and maxima of named metrics; `reduce` combines those of
    all ranks. A mean is the total over the count (of tokens or rows), not a mean of means over
    ranks or micro-batches. Every rank must add the same names. `sources` names the data sets, for
    `add_by_source`."""

    def __init__(self, sources: Sequence[str] = ()) -> None:
        self.sources = tuple(sources)
        self._means: dict[str, Tensor] = {}  # name -> (2,) fp64, sum and count
        self._means_if_any: dict[str, Tensor] = {}  # the same, not in the result without values
        self._maxima: dict[str, Tensor] = {}  # name -> scalar fp64

    def _tables(self) -> dict[str, dict[str, Tensor]]:
        """All that is accumulated, by kind."""
        return {
            "means": self._means,
            "means_if_any": self._means_if_any,
            "maxima": self._maxima,
        }

    def add_mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add `values`, of any shape, to the mean `name`; with a `mask` (same shape, bool) only
        where it is True."""
        counted_values = values
        if mask is not None:
            counted_values = _selected(values, mask, 0.0)
        self.add_sum(name, counted_values.sum(dtype=torch.float64), _count_of(values, mask))

    def add_mean_if_any(self, name: str, values: Tensor, mask: Tensor) -> None:
        """As `add_mean`, but the result has no entry for the name if `mask` (bool) is nowhere True
        on any rank."""
        total = _selected(values.detach().double(), mask, 0.0).sum()
        _add(self._means_if_any, name, torch.stack([total, _count_of(values, mask)]))

    def add_sum(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add a sum over `count` elements (both scalars) to the mean `name`."""
        _add(self._means, name, torch.stack([total.detach().double(), count.double()]))

    def add_by_source(
        self, name: str, values: Tensor, sources: Tensor | None, mask: Tensor | None = None
    ) -> None:
        """Add `values` (n,) to the mean `name/SOURCE` of the data set of each; nothing with fewer
        than two data sets, where `sources`, (n,) int64, may be None. Values where `mask` (n,) is
        False do not count."""
        if len(self.sources) < 2:
            return
        assert sources is not None
        exact = values.detach().double()
        counts = torch.ones_like(exact)
        if mask is not None:
            exact = torch.where(mask, exact, 0.0)
            counts = mask.double()
        pairs = torch.stack([exact, counts], dim=1)  # (n, 2)
        totals = pairs.new_zeros(len(self.sources), 2).index_add_(0, sources, pairs)
        for source, total_and_count in zip(self.sources, totals, strict=True):
            _add(self._means_if_any, f"{name}/{source}", total_and_count)

    def add_max(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add `values` to the maximum `name`; `mask` as in `add_mean`."""
        counted_values = values
        if mask is not None:
            counted_values = _selected(values, mask, -math.inf)
        counted_values = counted_values.detach().double()
        if counted_values.numel():
            largest = counted_values.max()
        else:
            largest = torch.full((), -math.inf, dtype=torch.float64, device=counted_values.device)
        _add_maximum(self._maxima, name, largest)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """This rank's sums and maxima, on the CPU, for `restored`."""
        state: dict[str, dict[str, Tensor]] = {}
        for kind, table in self._tables().items():
            state[kind] = {name: value.cpu() for name, value in table.items()}
        return state

    @classmethod
    def restored(
        cls, states: Sequence[dict[str, dict[str, Tensor]]], device: torch.device
    ) -> MetricSums:
        """One `MetricSums` from the `state_dict` of several ranks: sums are added, and maxima are
        compared."""
        merged = cls()
        for state in states:
            rank_sums = cls()
            for kind, table in rank_sums._tables().items():
                for name, value in state.get(kind, {}).items():
                    table[name] = value.to(device)
            merged.merge(rank_sums)
        return merged

    def scaled(self, factor: float) -> MetricSums:
        """The same means and maxima, with all sums and counts times `factor`."""
        scaled = MetricSums(self.sources)
        for name, terms in self._means.items():
            scaled._means[name] = terms * factor
        for name, terms in self._means_if_any.items():
            scaled._means_if_any[name] = terms * factor
        scaled._maxima = dict(self._maxima)
        return scaled

    def merge(self, added: MetricSums) -> None:
        """Add the sums of `added`, and compare its maxima."""
        for name, terms in added._means.items():
            _add(self._means, name, terms)
        for name, terms in added._means_if_any.items():
            _add(self._means_if_any, name, terms)
        for name, value in added._maxima.items():
            _add_maximum(self._maxima, name, value)

    def reduce(self) -> dict[str, float]:
        """Name -> value over all ranks; without values 0, or no entry for a data set.
        Collective."""
        means = {**self._means, **self._means_if_any}
        mean_names = sorted(means)
        maximum_names = sorted(self._maxima)
        if not means and not self._maxima:
            return {}
        values = [means[name] for name in mean_names]
        values += [self._maxima[name].view(1) for name in maximum_names]
        # (ranks, 2 N + M): all numbers in one collective
        ranks = gather_cat(torch.cat(values).unsqueeze(0))
        cut = 2 * len(mean_names)
        combined = torch.cat([ranks[:, :cut].sum(dim=0), ranks[:, cut:].amax(dim=0)]).tolist()
        result: dict[str, float] = {}
        for name, total, count in zip(mean_names, combined[:cut:2], combined[1:cut:2], strict=True):
            if count:
                result[name] = total / count
            elif name in self._means:
                result[name] = 0.0
        for name, maximum in zip(maximum_names, combined[cut:], strict=True):
            result[name] = maximum
            if maximum == -math.inf:  # no rank has values
                result[name] = 0.0
        return result


def _add(sums: dict[str, Tensor], name: str, terms: Tensor) -> None:
    sums[name] = sums.get(name, torch.zeros_like(terms)) + terms


def _add_maximum(maxima: dict[str, Tensor], name: str, value: Tensor) -> None:
    maxima[name] = torch.maximum(maxima.get(name, value), value)


def _selected(values: Tensor, mask: Tensor, filler: float) -> Tensor:
    """The `values` where `mask` is True; on a GPU, where the host would wait for their number, all
    of them, with `filler` in place of the others."""
    if values.device.type == "cpu":
        return values[mask]
    return torch.where(mask, values, filler)


def _count_of(values: Tensor, mask: Tensor | None) -> Tensor:
    """How many values count, a scalar fp64 on their device, made without waiting for it."""
    if mask is not None:
        return mask.sum(dtype=torch.float64)
    return torch.full((), values.numel(), dtype=torch.float64, device=values.device)


def read_scalars(named: Mapping[str, Tensor]) -> dict[str, float]:
    """The numbers in scalar tensors, by name; the host waits for their device once."""
    if not named:
        return {}
    scalars = torch.stack([value.detach().double() for value in named.values()])
    return dict(zip(named, scalars.tolist(), strict=True))


def moments(values: Tensor) -> tuple[float, float]:
    """The numbers of `mean_and_std`."""
    mean, std = torch.stack(mean_and_std(values)).tolist()
    return mean, std


def mean_and_std(values: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, population standard deviation) over all elements of a tensor, fp64 scalars; (0, 0) if
    it has none."""
    exact = values.double()
    if values.numel() == 0:
        exact = exact.new_zeros(1)
    return exact.mean(), exact.std(correction=0)


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """`1 - var(returns - values) / var(returns)` of (n,) predictions, an fp64 scalar; 0 if all
    returns are equal."""
    if returns.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=returns.device)
    variance = returns.double().var(correction=0)
    unexplained = (returns - values).double().var(correction=0)
    return torch.where(variance == 0, 0.0, 1 - unexplained / variance)
