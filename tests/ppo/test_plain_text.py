"""Batches of plain text for the PTX loss."""

import pytest
import torch
from datasets import Dataset

from dschat_ppo.common import dist
from dschat_ppo.ppo.mini_dataset import TextBatches

LENGTHS = (3, 2, 5, 4, 2, 3, 4)
BLOCKS = Dataset.from_dict(
    {"prompt_ids": [[row] for row in range(7)], "answers": [[[9] * (length - 1)] for length in LENGTHS]}
)


def texts(rows_per_update=4, micro_batch=2) -> TextBatches:
    return TextBatches(BLOCKS, rows_per_update, micro_batch, 3, 0, torch.device("cpu"))


def read_blocks(batches) -> list[list[int]]:
    return [batch.input_ids[:, 0].tolist() for batch in batches]


def test_an_optimizer_step_takes_the_next_blocks_and_counts_their_tokens():
    served, order = texts(), texts().stream
    for _ in range(4):
        batches, tokens = served.take()
        expected = order.take(4)
        assert read_blocks(batches) == [expected[:2], expected[2:]]
        for batch in batches:
            assert batch.loss_mask.sum(dim=1).tolist() == [LENGTHS[row] - 1 for row in batch.input_ids[:, 0].tolist()]
        assert float(tokens) == sum(LENGTHS[row] - 1 for row in expected), "the first token of a block is not predicted"


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_ranks_share_the_blocks_and_divide_by_the_tokens_of_all(monkeypatch, micro_batch):
    expected = texts().stream.take(4)
    whole = sum(LENGTHS[row] - 1 for row in expected)
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda count: count + 100)
    found = []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        batches, tokens = texts(micro_batch=micro_batch).take()
        assert len(batches) == 2 // micro_batch
        own = sum(read_blocks(batches), [])
        assert float(tokens) == 100 + sum(LENGTHS[row] - 1 for row in own)
        found += own
    assert sorted(found) == sorted(expected) and sum(LENGTHS[row] - 1 for row in found) == whole
