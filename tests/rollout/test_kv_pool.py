"""The KV pool against a plain dictionary, and its free slots against a set."""

import numpy as np
import pytest
import torch
from tagged_keys import HEADS, tagged

from dschat_ppo.rollout.kv_cache import SPARE, FreeSlots, KVPool


def assert_is_table(pool: KVPool, table: dict[int, float]) -> None:
    tags = torch.tensor([table.get(slot, 0.0) for slot in range(pool.capacity)], dtype=torch.float64)
    keys, values = tagged(tags.unsqueeze(0))
    written = torch.tensor([slot in table for slot in range(pool.capacity)]).view(1, -1, 1)
    for layer in (0, 1):
        assert torch.equal(pool.keys[layer], keys[0] * written)
        assert torch.equal(pool.values[layer], values[0] * written)


def test_a_pool_is_a_table_of_slots():
    """Random writes, moves and changes of the capacity, against a plain dictionary."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        pool, table = KVPool(int(rng.integers(8, 20))), {}
        prefill(rng, pool, table)
        for _ in range(25):
            (prefill, decode, move)[rng.integers(3)](rng, pool, table)
            assert_is_table(pool, table)


def prefill(rng, pool, table) -> None:
    """Two prompts of 4 tokens, some of which go to slots."""
    tags = rng.integers(1, 10_000, (2, 4))
    count = int(rng.integers(0, 8))
    targets, source = rng.permutation(pool.capacity)[:count], rng.integers(0, 8, count)
    for layer in (0, 1):
        parts = torch.from_numpy(targets), torch.from_numpy(source), *tagged(torch.from_numpy(tags))
        pool.write_prefill(layer, *parts)
    table.update(zip(targets.tolist(), tags.flatten()[source].tolist(), strict=True))


def decode(rng, pool, table) -> None:
    slots, tags = rng.permutation(pool.capacity)[:3], rng.integers(1, 10_000, (3, 1))
    for layer in (0, 1):
        mapping = pool.slot_mapping(torch.from_numpy(slots), HEADS)
        pool.write_decode(layer, mapping, *tagged(torch.from_numpy(tags)))
    table.update(zip(slots.tolist(), tags[:, 0].tolist(), strict=True))


def move(rng, pool, table) -> None:
    """With the same capacity, the tensors keep their addresses; with another one, only what is moved remains."""
    capacity = pool.capacity + int(rng.integers(0, 3))
    count = int(rng.integers(0, min(pool.capacity, capacity)))
    sources, targets = rng.permutation(pool.capacity)[:count], rng.permutation(capacity)[:count]
    before, version, changes = pool.keys[0].data_ptr(), pool.version, capacity != pool.capacity
    pool.repack(sources, targets, capacity)
    moved = {t: table[s] for s, t in zip(sources.tolist(), targets.tolist(), strict=True) if s in table}
    kept = {} if changes else {slot: tag for slot, tag in table.items() if slot not in set(targets.tolist())}
    table.clear()
    table.update(kept | moved)
    assert (pool.keys[0].data_ptr() == before) is not changes
    assert pool.version == version + changes and pool.capacity == capacity


def test_a_token_of_each_row_goes_to_its_slot_in_each_head():
    assert KVPool(10).slot_mapping(torch.tensor([4, 7]), 3).tolist() == [4, 14, 24, 7, 17, 27]


def test_a_released_pool_holds_nothing():
    pool = KVPool(9)
    pool.write_prefill(0, torch.tensor([3]), torch.tensor([0]), *tagged(torch.tensor([[5]])))
    assert pool.nbytes == 9 * HEADS * (1 + 3) * 8
    version = pool.version
    pool.release()
    assert (pool.nbytes, pool.capacity) == (0, SPARE + 1) and pool.version != version


def test_free_slots_are_taken_and_given_back():
    rng = np.random.default_rng(0)
    for _ in range(30):
        capacity = int(rng.integers(1, 40))
        free, unused, taken = FreeSlots(1, capacity), set(range(1, capacity)), []
        for _ in range(40):
            if taken and rng.integers(2):
                start, size = taken.pop(int(rng.integers(len(taken))))
                free.give_back(start, size)
                unused |= set(range(start, start + size))
                continue
            sizes = rng.integers(1, 8, int(rng.integers(1, 4))).tolist()
            starts = free.take(sizes)
            if starts is None:
                assert not fits_in_order(unused, sizes)
                continue
            for start, size in zip(starts, sizes, strict=True):
                assert set(range(start, start + size)) <= unused
                unused -= set(range(start, start + size))
                taken.append((start, size))


def fits_in_order(unused: set[int], sizes: list[int]) -> bool:
    """Whether each size finds consecutive unused slots, the first ones first."""
    left = set(unused)
    for size in sizes:
        start = next((slot for slot in sorted(left) if set(range(slot, slot + size)) <= left), None)
        if start is None:
            return False
        left -= set(range(start, start + size))
    return True


@pytest.mark.parametrize(("first", "capacity", "expected"), [(1, 1, None), (1, 4, [1]), (3, 4, None)])
def test_the_first_free_slot(first, capacity, expected):
    assert FreeSlots(first, capacity).take([3]) == expected
