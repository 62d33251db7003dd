"""The KV cache against a plain dictionary."""

import numpy as np
import torch
from tagged_keys import HEADS, assert_holds, decode_batch_of, tagged

from dschat_ppo.rollout.kv_cache import KVCache, copy_shared_prefix, repack


def test_a_cache_is_a_table_of_rows_heads_and_slots():
    """Random writes, moves and changes of size, against a plain dictionary."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        rows, capacity = int(rng.integers(1, 6)), int(rng.integers(3, 9))
        cache, table = KVCache(rows, capacity), {}
        new_block(rng, cache, table, np.arange(rows))
        for _ in range(25):
            kind = rng.integers(4)
            if kind == 0:
                new_block(rng, cache, table, rng.permutation(cache.rows)[: rng.integers(1, cache.rows + 1)])
            elif kind == 1:
                new_token(rng, cache, table)
            elif kind == 2 and cache.rows > 1:
                count = int(rng.integers(1, cache.rows // 2 + 1))
                order = rng.permutation(cache.rows)
                sources, targets = order[:count].tolist(), order[count : 2 * count].tolist()
                cache.move_rows(sources, targets)
                moved = dict(zip(targets, sources, strict=True))
                table = {(r, h, s): table[moved.get(r, r), h, s] for r, h, s in table}
            elif kind == 3:
                keep, wider = int(rng.integers(1, cache.rows + 1)), cache.capacity + int(rng.integers(-1, 3))
                cache, capacity = repack([(cache, keep)], max(2, wider)), cache.capacity
                table = {
                    (r, h, s): table[r, h, s] if s < capacity else 0.0
                    for r in range(keep)
                    for h in range(HEADS)
                    for s in range(cache.capacity)
                }
            assert_is_table(cache, table)


def new_block(rng, cache, table, rows) -> None:
    length, count = int(rng.integers(1, cache.capacity + 1)), int(rng.integers(1, 4))
    source = rng.integers(0, count, len(rows))
    tags = torch.from_numpy(rng.integers(1, 10_000, (count, length)))
    if not table:
        cells = [(r, h, s) for r in range(cache.rows) for h in range(HEADS) for s in range(cache.capacity)]
        table.update(dict.fromkeys(cells, 0.0))
    for layer in (0, 1):
        cache.write_prefill(layer, torch.from_numpy(rows), torch.from_numpy(source), *tagged(tags))
    for row, taken in zip(rows.tolist(), source.tolist(), strict=True):
        for slot in range(length):
            for head in range(HEADS):
                table[row, head, slot] = float(tags[taken, slot]) + head / 2


def new_token(rng, cache, table) -> None:
    count = int(rng.integers(1, cache.rows + 1))
    slots = rng.integers(0, cache.capacity, count)
    tags = torch.from_numpy(rng.integers(1, 10_000, (count, 1)))
    for layer in (0, 1):
        cache.write_decode(layer, cache.slot_mapping(torch.from_numpy(slots), HEADS), *tagged(tags))
    for row, slot in enumerate(slots.tolist()):
        for head in range(HEADS):
            table[row, head, slot] = float(tags[row, 0]) + head / 2


def assert_is_table(cache, table) -> None:
    assert len(table) == cache.rows * HEADS * cache.capacity
    expected = torch.tensor([table[cell] for cell in sorted(table)], dtype=torch.float64)
    expected = expected.view(cache.rows, HEADS, cache.capacity, 1)
    for layer in (0, 1):
        assert torch.equal(cache.keys[layer], expected)
        assert torch.equal(cache.values[layer], -expected.expand(-1, -1, -1, 3))


def test_repacking_puts_the_rows_of_caches_one_after_another():
    first, second = decode_batch_of([1, 2, 3], position=4).cache, decode_batch_of([4, 5], position=7, capacity=64).cache
    both = repack([(first, 2), (second, 2)], 40)
    assert (both.rows, both.capacity) == (4, 40)
    for row, (answer, length) in enumerate([(1, 4), (2, 4), (4, 7), (5, 7)]):
        assert_holds(both, row, [answer * 100 + place for place in range(length)])
        assert both.keys[0][row, :, length:].eq(0).all()


def test_a_cache_is_zero_except_at_the_slots_that_are_written():
    cache = KVCache(3, 5)
    mapping = cache.slot_mapping(torch.tensor([4, 0]), 2)
    assert mapping.tolist() == [4, 9, 10, 15]  # rows of 2 heads of 5 slots
    keys = torch.arange(1.0, 17.0).view(2, 2, 1, 4)
    cache.write_decode(0, mapping, keys, keys.bfloat16())
    assert cache.keys[0].shape == (3, 2, 5, 4)
    assert cache.values[0].dtype == torch.bfloat16
    assert torch.equal(cache.keys[0][0, :, 4], keys[0, :, 0])
    assert torch.equal(cache.keys[0][1, :, 0], keys[1, :, 0])
    assert cache.keys[0].sum() == keys.sum(), "other slots are 0"


def test_copying_a_shared_prefix_puts_it_before_the_tokens_of_each_row():
    own, prefix = decode_batch_of([5, 6, 7], position=2).cache, decode_batch_of([1, 2], position=9).cache
    whole = copy_shared_prefix(own, prefix, [1, 0, 1], [9, 4, 3])
    assert whole.rows == 3
    for row, (answer, source, length) in enumerate(((5, 2, 9), (6, 1, 4), (7, 2, 3))):
        expected = [source * 100 + place for place in range(length)] + [answer * 100, answer * 100 + 1]
        assert_holds(whole, row, expected)
