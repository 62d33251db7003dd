"""A KV cache and the free slots of a pool against plain dictionaries and sets."""

import numpy as np
import pytest
import torch
from tagged_keys import HEADS, put

from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.running_pool import FreeSlots


def test_a_cache_is_a_table_of_rows_and_slots():
    """Random writes, moves of rows and of slots, and changes of the capacity; what nobody wrote is 0."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        cache, table = KVCache(int(rng.integers(1, 6)), int(rng.integers(8, 20))), {}
        write(rng, cache, table)
        for _ in range(25):
            (write, move_rows, move_slots)[rng.integers(3)](rng, cache, table)
            expected = torch.zeros(cache.rows, HEADS, cache.capacity, 1, dtype=torch.float64)
            for (row, slot), tag in table.items():
                expected[row, :, slot, 0] = tag + torch.arange(HEADS) / 2
            for layer in (0, 1):
                assert torch.equal(cache.keys[layer], expected)
                assert torch.equal(cache.values[layer], -expected.expand(-1, -1, -1, 3))
            assert cache.nbytes == 2 * cache.rows * HEADS * cache.capacity * (1 + 3) * 8


def write(rng, cache, table) -> None:
    row, slots = int(rng.integers(cache.rows)), rng.permutation(cache.capacity)[: rng.integers(1, 6)]
    tags = rng.integers(1, 10_000, len(slots))
    put(cache, row, torch.from_numpy(tags), torch.from_numpy(slots))
    table.update(zip(((row, slot) for slot in slots.tolist()), tags.tolist(), strict=True))


def move_rows(rng, cache, table) -> None:
    if cache.rows == 1:
        return
    order, count = rng.permutation(cache.rows).tolist(), int(rng.integers(1, cache.rows // 2 + 1))
    sources, targets = order[:count], order[count : 2 * count]
    cache.move_rows(sources, targets)
    source_of = dict(zip(targets, sources, strict=True))
    for row, slot in [(row, slot) for row in targets for slot in range(cache.capacity)]:
        table[row, slot] = table.get((source_of[row], slot), 0)
        if (source_of[row], slot) not in table:
            del table[row, slot]


def move_slots(rng, cache, table) -> None:
    """With the same capacity, the tensors keep their addresses; with another one, only what is moved remains."""
    capacity = cache.capacity + int(rng.integers(0, 3))
    count = int(rng.integers(0, cache.capacity))
    sources, targets = rng.permutation(cache.capacity)[:count], rng.permutation(capacity)[:count]
    before, changes = cache.keys[0], capacity != cache.capacity
    kept = {} if changes else {key: tag for key, tag in table.items() if key[1] not in set(targets.tolist())}
    pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
    moved = {(row, t): table[row, s] for row in range(cache.rows) for s, t in pairs if (row, s) in table}
    cache.move_slots(sources, targets, capacity)
    table.clear()
    table.update(kept | moved)
    assert cache.capacity == capacity and (cache.keys[0].data_ptr() == before.data_ptr()) is not changes


def test_a_layer_has_the_heads_and_dtypes_of_what_is_written_first():
    cache, keys = KVCache(3, 5), torch.ones(2, 2, 1, 4)
    cache.layer(0, keys, keys[..., :3].bfloat16())
    assert cache.keys[0].shape == (3, 2, 5, 4) and cache.values[0].shape == (3, 2, 5, 3)
    assert (cache.keys[0].dtype, cache.values[0].dtype) == (torch.float32, torch.bfloat16)


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
