"""Numbers of micro-batches return to the places of their tokens."""

from dataclasses import replace

import pytest
import torch
from test_mini_dataset import LENGTHS, experience

from dschat_ppo.common import dist
from dschat_ppo.ppo.mini_dataset import MiniDataset
from dschat_ppo.ppo.update import RecordedTokens

ROWS = replace(experience(range(8)), numbers=torch.arange(8))


def record(recorded: RecordedTokens, dataset: MiniDataset) -> None:
    [minibatch] = dataset.minibatches(ROWS, 1, step=1)
    for part in minibatch.micro_batches:
        outside = torch.where(part.response_mask, part.values, torch.nan).requires_grad_()
        recorded.record(part, torch.full_like(outside, 7.0))  # a first pass, which the second replaces
        recorded.record(part, outside)


@pytest.mark.parametrize("budget", [6, 1000])
def test_one_rank(budget):
    recorded = RecordedTokens()
    record(recorded, MiniDataset(8, budget, 9, seed=0))
    found = recorded.gathered(ROWS)
    assert torch.equal(found, ROWS.values) and not found.requires_grad


def test_the_parts_of_ranks_add_up_and_rows_that_fill_a_share_count_nothing(monkeypatch):
    """8 rows of 2 to 8 tokens: the two shares have different numbers of micro-batches."""
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    parts, passes, filled = [], [], 0
    for rank in (0, 1):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        recorded, dataset = RecordedTokens(), MiniDataset(8, 7, 9, seed=0)
        record(recorded, dataset)
        [minibatch] = dataset.minibatches(ROWS, 1, step=1)
        filled += sum(not part.response_mask.any() for part in minibatch.micro_batches)
        passes.append(len(minibatch.micro_batches))
        parts.append(recorded.gathered(ROWS))
    assert passes[0] == passes[1]
    assert torch.equal(parts[0] + parts[1], ROWS.values)
    assert (parts[0] != 0).any() and (parts[1] != 0).any() and not ((parts[0] != 0) & (parts[1] != 0)).any()


def test_a_row_that_fills_a_share_keeps_its_numbers():
    recorded, empty = RecordedTokens(), replace(ROWS, response_mask=torch.zeros_like(ROWS.response_mask))
    recorded.record(ROWS, ROWS.values)
    recorded.record(empty, torch.full_like(ROWS.values, 5.0))
    assert torch.equal(recorded.gathered(ROWS), ROWS.values)


def test_ranks_that_share_rows_count_them_once(monkeypatch):
    recorded = RecordedTokens()
    recorded.record(ROWS, ROWS.values)
    monkeypatch.setattr(dist, "sequence_rank", lambda: 1)
    assert not recorded.gathered(ROWS).any() and max(LENGTHS) == ROWS.values.shape[1]
