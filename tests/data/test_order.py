"""Which rows each rank sees at each step."""

from collections import Counter

import pytest
import torch
from datasets import Dataset

from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data import batches
from dschat_ppo.data.batches import PADDING_ROW, IndexStream, chunked_order, epoch_order, optimizer_steps


def rows_by_step(order, micro_batch, accumulation, world_size) -> list[Counter]:
    """The rows of each step over all ranks, without padding rows."""
    ranks = [list(optimizer_steps(order, micro_batch, accumulation, world_size, rank)) for rank in range(world_size)]
    assert len({len(steps) for steps in ranks}) == 1
    return [
        Counter(row for steps in ranks for micro in steps[i] for row in micro if row != PADDING_ROW)
        for i in range(len(ranks[0]))
    ]


def test_epoch_order_depends_on_seed_and_epoch_alone():
    assert epoch_order(50, 3, 0) == epoch_order(50, 3, 0)
    assert epoch_order(50, 3, 0) != epoch_order(50, 3, 1)
    assert epoch_order(50, 3, 0) != epoch_order(50, 4, 0)
    assert epoch_order(50, 3, 0) != sorted(epoch_order(50, 3, 0)) == list(range(50))


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "world_size"),
    [(8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4)],
)
@pytest.mark.parametrize("num_rows", [16, 21])
def test_a_step_holds_the_same_rows_for_every_split_of_eight(micro_batch, accumulation, world_size, num_rows):
    order = epoch_order(num_rows, seed=1, epoch=0)
    expected = [Counter(order[start : start + 8]) for start in range(0, num_rows, 8)]
    assert rows_by_step(order, micro_batch, accumulation, world_size) == expected


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_make_the_same_number_of_micro_batches_of_the_same_size(world_size):
    ranks = [list(optimizer_steps(range(13), 2, 3, world_size, rank)) for rank in range(world_size)]
    sizes = [[[len(micro) for micro in step] for step in steps] for steps in ranks]
    assert len(sizes[0]) == -(-13 // (6 * world_size))
    assert all(found == sizes[0] for found in sizes)
    assert all(len(step) == 3 and len(set(step)) == 1 for step in sizes[0])
    assert all(step == [2, 2, 2] for step in sizes[0][:-1])


def test_a_micro_batch_larger_than_the_data_is_not_padded():
    assert list(optimizer_steps([3, 4, 5], 1000, 1, 2, 0)) == [[[3, 4]]]
    assert list(optimizer_steps([3, 4, 5], 1000, 1, 2, 1)) == [[[5, PADDING_ROW]]]


def test_the_last_step_is_padded_by_hand_computation():
    steps = [list(optimizer_steps([5, 6, 7, 8, 9], 1, 2, 2, rank)) for rank in (0, 1)]
    assert steps[0] == [[[5], [6]], [[9], [PADDING_ROW]]]
    assert steps[1] == [[[7], [8]], [[PADDING_ROW], [PADDING_ROW]]]
    assert list(optimizer_steps([], 2, 2, 2, 0)) == []


@pytest.fixture
def chunks_of_8(monkeypatch):
    """Takes rows for those of a stream."""
    monkeypatch.setattr(batches, "rows_at_hand", lambda rows: rows[:8])


@pytest.mark.parametrize("rows", [1, 7, 8, 24, 29])
def test_the_order_of_a_stream_shuffles_each_chunk_and_keeps_the_chunks_in_order(rows, chunks_of_8):
    order = list(chunked_order(range(rows), seed=3, epoch=1))
    assert len(order) == rows
    for start in range(0, rows, 8):
        assert sorted(order[start : start + 8]) == list(range(start, min(start + 8, rows)))
        drawn = torch.randperm(min(8, rows - start), generator=shared_generator(3, 1, start // 8)).tolist()
        assert order[start : start + 8] == [start + place for place in drawn]


def test_a_chunk_longer_by_more_rows_keeps_the_order_of_the_chunks_before(chunks_of_8):
    assert list(chunked_order(range(29), 3, 1))[:24] == list(chunked_order(range(90), 3, 1))[:24]


def test_the_order_of_a_table_is_one_permutation_of_all_rows():
    assert list(chunked_order(Dataset.from_dict({"a": list(range(50))}), 3, 1)) == epoch_order(50, 3, 1)
    assert epoch_order(9, 3, 1) == torch.randperm(9, generator=shared_generator(3, 1)).tolist()


def test_an_index_stream_over_chunks_gives_their_order_epoch_after_epoch(chunks_of_8):
    expected = [index for epoch in range(3) for index in chunked_order(range(29), 3, epoch)]
    for counts in ([3] * 29, [1, 2, 70, 14]):  # a request may be longer than an epoch
        stream = IndexStream(range(29), 3)
        assert [index for count in counts for index in stream.take(count)] == expected
        assert stream.taken == 87


@pytest.mark.parametrize("cut", range(12))
def test_an_index_stream_continues_from_its_state_inside_and_across_chunks_and_epochs(cut, chunks_of_8):
    whole, before, after = (IndexStream(range(29), 3) for _ in range(3))
    expected = [whole.take(5) for _ in range(14)]
    first = [before.take(5) for _ in range(cut)]
    after.take(2)
    after.load_state_dict(before.state_dict())
    before.take(5)  # what is saved does not change with the stream
    assert first + [after.take(5) for _ in range(14 - cut)] == expected


def test_a_smaller_data_set_continues_as_if_it_had_given_as_many_rows():
    whole, after = IndexStream(range(4), seed=1), IndexStream(range(4), seed=1)
    whole.take(6)
    after.load_state_dict({"epoch": 0, "pending": [7, 2, 8], "taken": 6})  # of an earlier version
    assert after.take(9) == whole.take(9)
