"""Which samples share a packed row: by hand, and properties over random lengths."""

from collections import Counter

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from ragged import properties

from dschat_ppo.data import batches
from dschat_ppo.data.batches import (
    PADDING_ROW,
    PackingPlan,
    optimizer_steps,
    pack,
    plan_packing,
    sample_tokens,
    samples_of,
)

PAIRS = Dataset.from_list([
    {"prompt_ids": [1, 2, 3], "answers": [[4], [5, 6]]},  # 2 x 3 + 1 + 2
    {"prompt_ids": [1], "answers": [[4, 4, 4], [5]]},  # 2 x 1 + 3 + 1
    {"prompt_ids": [1, 2], "answers": [[4], [5]]},  # 2 x 2 + 1 + 1
])  # fmt: skip


def test_the_prompt_of_a_pair_counts_once_for_each_answer():
    assert sample_tokens(PAIRS).tolist() == [9, 6, 6]
    single = Dataset.from_list([{"prompt_ids": [1, 2], "answers": [[3, 4, 5]]}, {"prompt_ids": [1], "answers": [[0]]}])
    assert sample_tokens(single).tolist() == [5, 2]


def test_lengths_follow_selected_rows_over_several_chunks(monkeypatch):
    monkeypatch.setattr(batches, "_CHUNK", 2)
    assert sample_tokens(PAIRS.select([2, 0, 1, 0, 2])).tolist() == [6, 9, 6, 9, 6]


def test_the_longest_sample_comes_first_and_each_goes_into_the_fullest_row_with_room():
    # 7 opens row 0 (room 3), 6 opens row 1 (room 4); 3 fills row 0 and not row 1; 3 goes into row 1 (room 1);
    # 2 opens row 2 (room 8); 1 fills row 1.
    assert pack(np.array([3, 1, 7, 2, 6, 3]), 10, [0, 5, 1, 2, 3, 4]) == [[2, 0], [4, 5, 1], [3]]


def test_the_order_decides_among_samples_of_equal_length():
    assert pack(np.array([2, 2, 2, 2]), 4, [3, 1, 0, 2]) == [[3, 1], [0, 2]]


def test_a_sample_over_the_capacity_is_a_row_by_itself():
    assert pack(np.array([9, 2, 4]), 4, [0, 1, 2]) == [[0], [2], [1]]


@properties
@given(st.lists(st.integers(1, 16), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_every_sample_is_in_one_row_no_row_is_too_full_and_any_order_gives_as_many_rows(lengths, random):
    order = list(range(len(lengths)))
    found = pack(np.array(lengths), 16, order)
    assert Counter(sample for row in found for sample in row) == Counter(order)
    assert all(sum(lengths[sample] for sample in row) <= 16 for row in found)
    emptiest = sorted(sum(lengths[sample] for sample in row) for row in found)[:2]
    assert len(found) == 1 or sum(emptiest) > 16, "two rows fit into one"
    random.shuffle(order)
    assert len(pack(np.array(lengths), 16, order)) == len(found)


def plan_of(seed: int = 0) -> PackingPlan:
    tokens = np.random.default_rng(seed).integers(1, 20, 200)
    return PackingPlan(tokens, 32, len(pack(tokens, 32, range(200))))


def test_epochs_differ_and_are_fixed_by_seed_and_epoch():
    plan = plan_of()
    first, second = plan.epoch(3, 0), plan.epoch(3, 1)
    assert first == plan.epoch(3, 0) and first != plan.epoch(4, 0)
    assert sorted(map(sorted, first)) != sorted(map(sorted, second)), "other samples meet"
    assert len(first) == len(second) == plan.rows
    longest = [max(plan.tokens[row]) for row in first]
    assert longest != sorted(longest, reverse=True), "rows are not trained from the longest to the shortest"


@pytest.mark.parametrize(("micro_batch", "accumulation", "ranks"), [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)])
def test_a_step_has_the_same_samples_for_every_split_of_four_packed_rows(micro_batch, accumulation, ranks):
    packed = plan_of().epoch(1, 0)
    expected = [sorted(sum(packed[start : start + 4], [])) for start in range(0, len(packed), 4)]
    steps = [list(optimizer_steps(range(len(packed)), micro_batch, accumulation, ranks, r)) for r in range(ranks)]
    for number, samples in enumerate(expected):
        micro_batches = [samples_of(packed, part) for rank in steps for part in rank[number]]
        assert len(micro_batches) == accumulation * ranks
        assert sorted(s for part in micro_batches for s in part if s != PADDING_ROW) == samples


def test_filler_rows_are_left_out_unless_a_micro_batch_has_no_other():
    packed = [[5, 6], [7]]
    assert samples_of(packed, [1, PADDING_ROW, 0]) == [7, 5, 6]
    assert samples_of(packed, [PADDING_ROW, PADDING_ROW]) == [PADDING_ROW]


def test_a_packed_row_of_pairs_has_room_for_two_whole_rows():
    plan = plan_packing(PAIRS, 6)
    assert (plan.capacity, plan.rows, plan.tokens.tolist()) == (12, 2, [9, 6, 6])
    single = Dataset.from_list([{"prompt_ids": [1], "answers": [[2, 3]]}] * 5)
    plan = plan_packing(single, 6)
    assert (plan.capacity, plan.rows) == (6, 3)
