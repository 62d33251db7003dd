"""Decode batches without a model: rows keep their keys when others finish, merge or need more slots."""

import numpy as np
import pytest
import torch
from tagged_keys import assert_holds, decode_batch_of

from dschat_ppo.rollout.scheduler import DecodeBatch, DecodeInputs, Scheduler, merged, rounded_up


@pytest.mark.parametrize("finished", [[0], [3], [0, 1], [2, 3], [0, 3], [1, 2], [0, 1, 2], [0, 2, 3], [0, 1, 2, 3], []])
def test_the_last_rows_move_into_those_of_finished_sequences(finished):
    batch = decode_batch_of([10, 11, 12, 13])
    mask = np.isin(np.arange(4), finished)
    batch.positions += np.arange(4)
    batch.remove(mask)
    left = [sequence for row, sequence in enumerate([10, 11, 12, 13]) if row not in finished]
    assert sorted(batch.sequences.tolist()) == left
    assert batch.positions.tolist() == [sequence - 10 + 3 for sequence in batch.sequences.tolist()]
    for row, sequence in enumerate(batch.sequences.tolist()):
        assert_holds(batch.cache, row, [sequence * 100 + place for place in range(3)])
    stay = [row for row in range(len(left)) if row not in finished]
    assert [batch.sequences[row] for row in stay] == [10 + row for row in stay]  # unfinished rows before the holes stay


def test_a_merged_batch_has_the_rows_and_keys_of_both_in_order():
    first, second = decode_batch_of([5, 6], position=3), decode_batch_of([7], position=40, capacity=64)
    both = merged(first, second)
    assert both.sequences.tolist() == [5, 6, 7]
    assert both.positions.tolist() == [3, 3, 40]
    assert both.cache.capacity == 64
    for row, (sequence, position) in enumerate([(5, 3), (6, 3), (7, 40)]):
        assert_holds(both.cache, row, [sequence * 100 + place for place in range(position)])


@pytest.mark.parametrize(("position", "capacity"), [(31, 32), (32, 64), (33, 64), (63, 64), (64, 96)])
def test_a_cache_grows_if_the_next_token_does_not_fit(position, capacity):
    batch = decode_batch_of([1, 2], position=position, capacity=rounded_up(position))
    scheduler = Scheduler(np.array([1]), np.array([0]), 1)
    scheduler.batches = [batch]
    scheduler.reserve_slots()
    assert batch.cache.capacity == capacity
    for row, sequence in enumerate((1, 2)):
        assert_holds(batch.cache, row, [sequence * 100 + place for place in range(position)])


def test_capacities_are_multiples_of_the_growth():
    assert [rounded_up(n) for n in (0, 1, 32, 33, 64)] == [0, 32, 32, 64, 64]


def test_new_rows_come_after_the_last_one():
    batch = decode_batch_of([4, 5])
    batch.extend(np.array([8]), np.array([6]))
    assert batch.sequences.tolist() == [4, 5, 8]
    assert batch.positions.tolist() == batch.slots.tolist() == [3, 3, 6]


def shared_batch() -> DecodeBatch:
    """Sequences 10, 11 and 12 with one own token each; 10 and 12 read a prefix of 5 tokens, 11 one of 4."""
    batch, prefix = decode_batch_of([10, 11, 12], position=1), decode_batch_of([7, 8], position=5).cache
    batch.prefix, batch.prefix_rows, batch.prefix_lengths = prefix, np.array([1, 0, 1]), np.array([5, 4, 5])
    batch.positions = np.array([6, 5, 6])
    return batch


def test_the_metadata_of_a_shared_prefix_groups_the_rows_by_prompt():
    batch = shared_batch()
    metadata = batch.metadata(3, torch.from_numpy(batch.slots))
    assert (metadata.first, metadata.count, metadata.length) == (3, 3, batch.cache.capacity)
    assert metadata.slots.tolist() == [1, 1, 1]
    assert metadata.prefix.lengths.tolist() == [5, 4, 5]
    assert metadata.prefix.grid.shape == (2, 2)
    assert metadata.prefix.grid[0, 0] == 1 and metadata.prefix.grid[1].tolist() == [0, 2]
    assert metadata.prefix.cells.tolist() == [2, 0, 3]


def test_an_unshared_batch_has_whole_rows():
    batch = shared_batch()
    batch.unshare()
    assert batch.prefix is None and not batch.prefix_lengths.any() and not batch.prefix_rows.any()
    assert batch.slots.tolist() == [6, 5, 6]
    for row, (sequence, prompt, length) in enumerate(((10, 8, 5), (11, 7, 4), (12, 8, 5))):
        assert_holds(batch.cache, row, [*(100 * prompt + n for n in range(length)), 100 * sequence])


def test_the_inputs_of_a_step_are_the_rows_of_all_batches_in_order():
    inputs = DecodeInputs.of([shared_batch(), decode_batch_of([3], position=2)], torch.device("cpu"))
    assert inputs.sequences.tolist() == [10, 11, 12, 3]
    assert inputs.positions.tolist() == [6, 5, 6, 2]
    assert inputs.slots.tolist() == [1, 1, 1, 2]
    assert inputs.first(2).positions.tolist() == [6, 5]
