"""Weighted means, maxima, moments and explained variance, against numpy."""

import numpy as np
import pytest
import torch

from dschat_ppo.monitor import metric_sums
from dschat_ppo.monitor.metric_sums import MetricSums, explained_variance, moments

CPU = torch.device("cpu")


def uneven_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(values, mask) of micro-batches with 7, 1 and 0 valid tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = ((4, 3), (0, 1), (0, 0))
    return [
        (torch.randn(2, 4, generator=generator) + i, torch.arange(4) < torch.tensor(rows).unsqueeze(1))
        for i, rows in enumerate(lengths)
    ]


def all_kept() -> np.ndarray:
    return np.concatenate([values.numpy().astype(np.float64)[mask.numpy()] for values, mask in uneven_batches()])


def test_mean_is_weighted_by_tokens_not_by_micro_batches():
    sums = MetricSums()
    for values, mask in uneven_batches():
        sums.add_mean("x", values, mask)
        sums.add_max("top", values, mask)
        sums.add_sum("sum", values[mask].sum(), mask.sum())
    mean = pytest.approx(all_kept().mean(), rel=1e-6)
    assert sums.reduce() == {"x": mean, "top": all_kept().max(), "sum": mean}
    naive = np.mean([values[mask].mean().item() for values, mask in uneven_batches()[:2]])
    assert abs(naive - all_kept().mean()) > 0.1


def test_values_outside_the_mask_are_ignored():
    sums = MetricSums()
    values, mask = torch.tensor([1.0, float("nan"), float("inf")]), torch.tensor([True, False, False])
    sums.add_mean("mean", values, mask)
    sums.add_max("max", values, mask)
    assert sums.reduce() == {"mean": 1.0, "max": 1.0}


def test_a_mean_of_some_values_has_no_entry_without_them():
    sums, none = MetricSums(), torch.zeros(2, dtype=torch.bool)
    values = torch.tensor([1.0, 4.0], requires_grad=True)
    sums.add_mean_if_any("some", values, ~none)
    sums.add_mean_if_any("some", values * 3, torch.tensor([False, True]))
    sums.add_mean_if_any("no", values, none)  # and no metric has a gradient
    assert sums.reduce() == {"some": pytest.approx(17 / 3)}


def test_moments_match_numpy():
    values = torch.randn(101, generator=torch.Generator().manual_seed(1)) * 3 - 40
    exact = values.numpy().astype(np.float64)
    assert moments(values) == pytest.approx((exact.mean(), exact.std()), rel=1e-9)


@pytest.mark.parametrize(("values", "expected"), [
    ([1.0, 2.0, 3.0], 1.0),  # exact
    ([11.0, 12.0, 13.0], 1.0),  # an offset does not matter
    ([5.0, 5.0, 5.0], 0.0),  # a constant explains nothing
    ([3.0, 2.0, 1.0], -3.0),  # residuals -2, 0, 2 vary four times as much
])  # fmt: skip
def test_explained_variance_by_hand(values, expected):
    assert float(explained_variance(torch.tensor(values), torch.tensor([1.0, 2.0, 3.0]))) == pytest.approx(expected)
    assert explained_variance(torch.tensor(values), torch.full((3,), 2.0)) == 0.0
    assert explained_variance(torch.tensor([]), torch.tensor([])) == 0.0


def test_sums_of_several_ranks_become_those_of_one_and_a_new_rank_changes_no_value():
    parts = [MetricSums() for _ in range(3)]
    for number, part in enumerate(parts):
        part.add_mean("mean", torch.arange(number + 1.0))  # 0 | 0 1 | 0 1 2
        part.add_max("most", torch.tensor([number * (-1.0) ** number]))  # 0, -1, 2
    states = [part.state_dict() for part in parts]
    assert MetricSums.restored(states[1:2], CPU).reduce() == {"mean": 0.5, "most": -1.0}
    together = MetricSums.restored(states, CPU)
    assert together.reduce() == {"mean": 4 / 6, "most": 2.0} and together.only("most").reduce() == {"most": 2.0}
    new = MetricSums.restored(states[1:2], CPU).emptied()
    assert new.reduce() == {"mean": 0.0, "most": 0.0}, "all names, nothing counted"
    for unchanged in (MetricSums.restored([*states, new.state_dict()], CPU), together):
        unchanged.merge(new)
        assert unchanged.reduce() == {"mean": 4 / 6, "most": 2.0}
    new.add_mean("mean", torch.tensor([10.0]))
    new.add_max("most", torch.tensor([-9.0]))
    assert new.reduce() == {"mean": 10.0, "most": -9.0}
    together.merge(new)
    assert together.reduce() == {"mean": 14 / 7, "most": 2.0}
    assert MetricSums.restored([], CPU).reduce() == {}


def by_source() -> MetricSums:
    """Two micro-batches of rows of `b` and `c`; one of rows of `a` would have to come."""
    sums = MetricSums(["a", "b", "c"])
    sums.add_mean("loss", torch.tensor([1.0, 2.0, 6.0]))
    sums.add_by_source("loss", torch.tensor([1.0, 2.0, 6.0]), torch.tensor([2, 1, 1]))
    sums.add_by_source("loss", torch.tensor([4.0, 9.0]), torch.tensor([2, 0]), torch.tensor([True, False]))
    return sums


def test_means_by_data_set_by_hand_and_none_without_values():
    assert by_source().reduce() == {"loss": 3.0, "loss/b": 4.0, "loss/c": 2.5}


def test_a_rank_without_rows_of_a_data_set_joins_the_one_reduction(monkeypatch):
    """This rank has rows of `b` and `c`, the other one has rows of `a` and `b`."""
    other, mine, calls = MetricSums(["a", "b", "c"]), by_source(), []
    other.add_mean("loss", torch.tensor([7.0, 12.0]))
    other.add_by_source("loss", torch.tensor([7.0, 12.0]), torch.tensor([0, 1]))

    def gather_cat(tensor):
        calls.append(tensor)
        return torch.cat(calls)

    other.add_max("top", torch.tensor([-2.0]))
    mine.add_max("top", torch.tensor([-3.0]))
    monkeypatch.setattr(metric_sums, "gather_cat", gather_cat)
    other.reduce()
    assert mine.reduce() == {"loss": 5.6, "loss/a": 7.0, "loss/b": 20 / 3, "loss/c": 2.5, "top": -2.0}
    assert [tuple(call.shape) for call in calls] == [(1, 9), (1, 9)], "sums, counts and maxima at once"


def test_means_by_data_set_are_merged_restored_emptied_and_selected():
    sums = by_source()
    sums.merge(MetricSums.restored([by_source().state_dict()], CPU))
    assert sums.reduce() == by_source().reduce()
    assert sums.only("loss/b").reduce() == {"loss/b": 4.0}
    assert sums.emptied().reduce() == {"loss": 0.0}
    old = {kind: named for kind, named in by_source().state_dict().items() if kind != "parts"}
    assert MetricSums.restored([old], CPU).reduce() == {"loss": 3.0}


def test_scaled_sums_have_the_same_means_and_less_weight_beside_others():
    shared, alone = MetricSums(["a", "b"]), MetricSums()
    shared.add_mean("x", torch.tensor([1.0, 3.0]))
    shared.add_max("top", torch.tensor([5.0]))
    shared.add_by_source("y", torch.tensor([1.0, 3.0]), torch.tensor([0, 1]))
    half = shared.scaled(0.5)
    assert half.reduce() == shared.reduce() == {"x": 2.0, "top": 5.0, "y/a": 1.0, "y/b": 3.0}
    alone.add_mean("x", torch.tensor([8.0]))
    half.merge(alone)  # 2 values of mean 2 that two ranks count, and one of 8: (2 + 8) / 2 on this rank
    assert half.reduce()["x"] == 5.0
