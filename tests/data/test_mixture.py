"""Which rows a step uses, and mixtures of several data sets."""

import numpy as np
import pytest
import torch

from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data.examples import SPLIT_SEED
from dschat_ppo.data.prepare import Part, hold_out, mix, share_of_step
from dschat_ppo.data.sources import DataSource


def mixed(*sets: tuple[list[int], float | None, int | None]) -> list[list[int]]:
    """The rows of an epoch of data sets, each: its rows, weight and number of rows."""
    parts = [
        Part(DataSource(name, "--data_path", name, None, None, name, weight, samples), None, np.array(rows))
        for name, (rows, weight, samples) in zip("abc", sets, strict=False)
    ]
    return [list(part.order) for part in mix(parts)]


def used_rows(*sets: tuple[int, float | None, int | None]) -> list[int]:
    return list(map(len, mixed(*((list(range(rows)), weight, samples) for rows, weight, samples in sets))))


@pytest.mark.parametrize("shares", [(2.0, 4.0, 4.0), (1.0, 1.0, 1.0), (10.0, 0.0, 0.0), (0.2, 0.5, 0.3)])
@pytest.mark.parametrize("count", [1, 7, 100])
def test_the_parts_of_the_steps_are_disjoint_and_complete(shares, count):
    parts = [list(range(*share_of_step(count, shares, part))) for part in range(3)]
    assert sorted([*parts[0], *parts[1], *parts[2]]) == list(range(count))
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(part) - count * share / sum(shares)) <= 1


@pytest.mark.parametrize(("count", "fraction", "held"), [(100, 0.05, 5), (10, 0.01, 1), (2, 0.9, 1), (1, 0.5, 0)])
def test_hold_out_takes_its_fraction_and_keeps_a_training_row(count, fraction, held):
    train, kept = hold_out(np.arange(count) * 10, fraction)
    assert len(kept) == held
    assert sorted([*train, *kept]) == list(range(0, 10 * count, 10))


def test_hold_out_with_fraction_zero_holds_out_nothing():
    train, kept = hold_out(np.arange(3), 0.0)
    assert (list(train), list(kept)) == ([0, 1, 2], [])


def test_weights_share_the_sum_of_the_sizes_of_the_weighted_sets():
    assert used_rows((100, 3.0, None), (60, 1.0, None)) == [120, 40]
    assert used_rows((100, 0.3, None), (60, 0.1, None)) == [120, 40]
    assert used_rows((5, 1.0, None), (3, 1.0, None), (2, 1.0, None)) == [3, 4, 3]  # 10 rows in all
    assert used_rows((5, None, None), (3, None, 7), (4, 2.0, None)) == [5, 7, 4]


def test_a_set_is_repeated_whole_and_then_a_random_remainder_in_its_order():
    rows = [30, 10, 20, 50, 40]
    [found] = mixed((rows, None, 13))
    expected = sorted(torch.randperm(5, generator=shared_generator(SPLIT_SEED, 2, 0))[:3].tolist())
    assert found == rows * 2 + [rows[place] for place in expected]
    assert mixed((rows, None, 5)) == [rows]
    first, second = mixed((list(range(50)), None, 5), (list(range(50)), None, 5))
    assert first != second and len({*first}) == 5, "another set draws other rows"
