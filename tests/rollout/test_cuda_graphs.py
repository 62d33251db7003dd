"""Decode steps at fixed addresses. Without a GPU the same steps run without a graph."""

import numpy as np
import torch
from tagged_keys import decode_batch_of

from dschat_ppo.rollout.cuda_graphs import GraphedDecoder, length_bucket, row_bucket
from dschat_ppo.rollout.kv_cache import KVCache


def test_buckets_of_rows_and_lengths():
    assert [row_bucket(n, 12) for n in (1, 2, 3, 4, 5, 8, 9, 12)] == [1, 2, 4, 4, 8, 8, 12, 12]
    assert [length_bucket(n, 700) for n in (1, 256, 257, 512, 513, 700)] == [256, 256, 512, 512, 700, 700]


def test_idle_and_finished_entries_write_to_spare_places():
    """5 of 7 rows are running, in a bucket of 7 entries, 3 tokens at a time; row 1 finishes with its second token."""
    seen, spare, last = [], 99, 49
    cache = KVCache(7, last + 1)

    def step(inputs, metadata):
        seen.append([part.tolist() for part in (inputs.sequences, inputs.positions, inputs.slots)])
        (batch,) = metadata
        assert (batch.first, batch.count, batch.cache, batch.prefix) == (0, 7, cache, None)
        assert batch.length == last + 1
        finished = torch.zeros(7, dtype=torch.bool)
        finished[1] = len(seen) == 2
        return finished

    decoder = GraphedDecoder(step, cache, spare, 3, torch.device("cpu"))
    batch = decode_batch_of([20, 21, 22, 23, 24], position=6)
    batch.positions += np.arange(5)
    assert decoder.run(batch).tolist() == [False, True, False, False, False]
    idle = [(spare, 0, last)] * 2
    for number, parts in enumerate(seen):
        inputs = list(zip(*parts, strict=True))
        expected = [(20 + row, 6 + row + number, 6 + row + number) for row in range(5)]
        if number == 2:
            expected[1] = idle[0]
        assert inputs == expected + idle
    assert len(seen) == 3
