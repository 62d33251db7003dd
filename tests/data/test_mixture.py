"""Which rows a step uses, and mixtures of several data sets."""

import numpy as np
import pytest
import torch

from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data.mixture import hold_out, repeated, rows_of_step, table_of, used_rows
from dschat_ppo.data.sources import DataSource


def source(name: str, weight: float | None = None, samples: int | None = None) -> DataSource:
    return DataSource(name, "--data_path", name, None, None, name, weight, samples)


@pytest.mark.parametrize("shares", [(2.0, 4.0, 4.0), (1.0, 1.0, 1.0), (10.0, 0.0, 0.0), (0.2, 0.5, 0.3)])
@pytest.mark.parametrize("count", [1, 7, 100])
def test_the_parts_of_the_steps_are_disjoint_and_complete(shares, count):
    parts = [list(rows_of_step(count, shares, part, seed=5)) for part in range(3)]
    assert sorted([*parts[0], *parts[1], *parts[2]]) == list(range(count))
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(part) - count * share / sum(shares)) <= 1


def test_parts_are_random_and_reproducible():
    first = list(rows_of_step(100, (1, 1, 1), 0, seed=5))
    assert first == list(rows_of_step(100, (1, 1, 1), 0, seed=5))
    assert first != list(rows_of_step(100, (1, 1, 1), 0, seed=6))
    assert sorted(first) != list(range(33))


@pytest.mark.parametrize(("count", "fraction", "held"), [(100, 0.05, 5), (10, 0.01, 1), (2, 0.9, 1), (1, 0.5, 0)])
def test_hold_out_takes_its_fraction_and_keeps_a_training_row(count, fraction, held):
    train, kept = hold_out(np.arange(count) * 10, fraction, seed=1)
    assert len(kept) == held
    assert sorted([*train, *kept]) == list(range(0, 10 * count, 10))


def test_hold_out_with_fraction_zero_holds_out_nothing():
    train, kept = hold_out(np.arange(3), 0.0, seed=1)
    assert (list(train), list(kept)) == ([0, 1, 2], [])


def test_weights_share_the_sum_of_the_sizes_of_the_weighted_sets():
    assert used_rows([source("a", 3.0), source("b", 1.0)], [100, 60]) == [120, 40]
    assert used_rows([source("a", 0.3), source("b", 0.1)], [100, 60]) == [120, 40]
    assert used_rows([source("a", 1.0), source("b", 1.0), source("c", 1.0)], [5, 3, 2]) == [3, 4, 3]  # 10 rows in all
    assert used_rows([source("a"), source("b", samples=7), source("c", 2.0)], [5, 3, 4]) == [5, 7, 4]


def test_a_set_is_repeated_whole_and_then_a_random_remainder_in_its_order():
    rows = np.array([30, 10, 20, 50, 40])
    found = list(repeated(rows, 13, seed=1, number=0))
    assert found[:10] == [30, 10, 20, 50, 40] * 2
    expected = sorted(torch.randperm(5, generator=shared_generator(1, 2, 0))[:3].tolist())
    assert found[10:] == [int(rows[place]) for place in expected]
    assert list(repeated(rows, 5, seed=1, number=0)) == list(rows)
    assert len(set(repeated(rows, 3, seed=1, number=0))) == 3
    draws = {tuple(repeated(np.arange(50), 5, seed, number)) for seed in (1, 2) for number in (0, 1)}
    assert len(draws) == 4, "another seed or another set draws other rows"


def test_the_table_shows_rows_repeats_and_shares():
    lines = table_of(["maths", "chat"], [10, 300], [25, 75]).splitlines()
    assert lines == [
        "data: mixture of an epoch",
        "  data set  rows  used  repeats   share",
        "  maths       10    25     2.50  25.0 %",
        "  chat       300    75     0.25  75.0 %",
    ]
