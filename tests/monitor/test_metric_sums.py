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
    assert sums.reduce()["x"] == pytest.approx(all_kept().mean(), rel=1e-6)
    naive = np.mean([values[mask].mean().item() for values, mask in uneven_batches()[:2]])
    assert abs(naive - all_kept().mean()) > 0.1


def test_sums_with_counts_by_hand():
    sums = MetricSums()
    sums.add_sum("loss", torch.tensor(6.0), torch.tensor(2))
    sums.add_sum("loss", torch.tensor(1.0), torch.tensor(5))
    assert sums.reduce() == {"loss": 1.0}


def test_maximum_over_masked_values():
    sums = MetricSums()
    for values, mask in uneven_batches():
        sums.add_max("x", values, mask)
    assert sums.reduce()["x"] == all_kept().max()


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
    sums.add_mean_if_any("no", values, none)
    assert sums.reduce() == {"some": pytest.approx(17 / 3)}


def test_metrics_have_no_gradient():
    sums = MetricSums()
    values = torch.ones(3, requires_grad=True)
    sums.add_mean("mean", values)
    sums.add_max("max", values * 2)
    assert sums.reduce() == {"mean": 1.0, "max": 2.0}


def test_moments_match_numpy():
    values = torch.randn(101, generator=torch.Generator().manual_seed(1)) * 3 - 40
    exact = values.numpy().astype(np.float64)
    assert moments(values) == pytest.approx((exact.mean(), exact.std()), rel=1e-9)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0], 1.0),  # exact
        ([11.0, 12.0, 13.0], 1.0),  # an offset does not matter
        ([5.0, 5.0, 5.0], 0.0),  # a constant explains nothing
        ([3.0, 2.0, 1.0], -3.0),  # residuals -2, 0, 2 vary four times as much
    ],
)
def test_explained_variance_by_hand(values, expected):
    assert float(explained_variance(torch.tensor(values), torch.tensor([1.0, 2.0, 3.0]))) == pytest.approx(expected)


def test_explained_variance_of_constant_returns_is_zero():
    assert explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0])) == 0.0
    assert explained_variance(torch.tensor([]), torch.tensor([])) == 0.0


def test_restored_sums_of_two_ranks_equal_the_sums_of_all_values():
    parts, whole = [MetricSums(), MetricSums()], MetricSums()
    for part, values in zip(parts, ([1.0, 2.0], [6.0]), strict=True):
        for sums in (part, whole):
            sums.add_mean("mean", torch.tensor(values))
            sums.add_max("max", torch.tensor(values))
    restored = MetricSums.restored([part.state_dict() for part in parts], CPU)
    assert restored.reduce() == whole.reduce() == {"mean": 3.0, "max": 6.0}
    restored.merge(restored.emptied())
    assert restored.reduce() == whole.reduce()
    assert restored.only("max").reduce() == {"max": 6.0}


def test_metrics_of_an_update_are_merged_and_selected():
    total, part = MetricSums(), MetricSums()
    for sums, values in ((total, [1.0, 2.0]), (part, [6.0])):
        sums.add_mean("mean", torch.tensor(values))
        sums.add_max("largest", torch.tensor(values))
    part.add_mean("other", torch.tensor([4.0]))
    total.merge(part)
    assert total.reduce() == {"mean": 3.0, "other": 4.0, "largest": 6.0}
    assert part.only("largest").reduce() == {"largest": 6.0}
    assert part.only("other").reduce() == {"other": 4.0}


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


def test_sums_of_several_ranks_become_those_of_one():
    parts = [MetricSums() for _ in range(3)]
    for number, part in enumerate(parts):
        part.add_mean("mean", torch.arange(number + 1.0))  # 0 | 0 1 | 0 1 2
        part.add_max("most", torch.tensor([number * (-1.0) ** number]))  # 0, -1, 2
    alone = MetricSums.restored([parts[1].state_dict()], CPU)
    assert alone.reduce() == {"mean": 0.5, "most": -1.0}
    together = MetricSums.restored([part.state_dict() for part in parts], CPU)
    assert together.reduce() == {"mean": 4 / 6, "most": 2.0}
    together.add_mean("mean", torch.tensor([10.0]))
    assert together.reduce()["mean"] == 14 / 7
    assert MetricSums.restored([], CPU).reduce() == {}


def test_a_rank_that_is_new_has_all_names_and_changes_no_value():
    saved = MetricSums()
    saved.add_mean("mean", torch.tensor([-2.0, -4.0]))
    saved.add_max("most", torch.tensor([-7.0]))
    new = MetricSums.restored([saved.state_dict()], CPU).emptied()
    assert new.reduce() == {"mean": 0.0, "most": 0.0}, "all names, nothing counted"
    both = MetricSums.restored([saved.state_dict(), new.state_dict()], CPU)
    assert both.reduce() == {"mean": -3.0, "most": -7.0}
    new.add_mean("mean", torch.tensor([5.0]))
    new.add_max("most", torch.tensor([-9.0]))
    assert new.reduce() == {"mean": 5.0, "most": -9.0}
    assert saved.reduce() == {"mean": -3.0, "most": -7.0}
